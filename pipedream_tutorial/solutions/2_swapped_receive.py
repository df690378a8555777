"""Solution: stage 1 sends the gradient of microbatch 0 first, so stage 0 must use this gradient for
microbatch 0. With reversed(), stage 0 used it for the last microbatch. Every gradient has the same
shape, so nothing crashed. Another solution is to run the backward passes of both stages in reverse
order, as GPipe's authors do.
"""

from pipedream.lecture.checks import Channel
from torch.nn.functional import cross_entropy


def run_batch(stages, microbatches):
    there, back = Channel(), Channel()
    m, outputs, inputs, losses = len(microbatches), [], [], []
    for x, _ in microbatches:
        outputs.append(stages[0](x))
        there.send(outputs[-1])
    for _, target in microbatches:
        inputs.append(there.receive())
        losses.append(cross_entropy(stages[1](inputs[-1]), target) / m)
    for i in range(m):
        losses[i].backward()
        back.send(inputs[i].grad)
    for i in range(m):
        outputs[i].backward(back.receive())
