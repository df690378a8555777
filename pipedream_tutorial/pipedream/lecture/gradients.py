"""Exercises about gradients: each answer is compared with plain backpropagation."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipedream.lecture.verdict import WrongAnswer, graded
from pipedream.train.gradients import relative_difference
from pipedream.train.models import build_stages, build_task
from pipedream.train.oracle import train
from pipedream.train.trainer import StageTrainer, Weights

Microbatches = Sequence[tuple[Tensor, Tensor]]
"""Inputs and target of each."""

EXACT = 1e-9
"""Sums in another order differ by less, in float64."""


class Channel:
    """From one stage to the next: what is sent first is received first, and nothing has a name."""

    def __init__(self) -> None:
        self._under_way: deque[Tensor] = deque()

    def send(self, tensor: Tensor) -> None:
        """Numbers travel; the graph that they came from stays behind."""
        self._under_way.append(tensor.detach().clone())

    def receive(self) -> Tensor:
        """The oldest message, as a new leaf that will have a gradient."""
        if not self._under_way:
            raise WrongAnswer("a stage waits for ever: it receives, and nothing was sent")
        return self._under_way.popleft().requires_grad_()


def some_microbatches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs [8, 32] and target classes [8] of each."""
    task = build_task(seed=0)
    return [task.microbatch(i) for i in range(count)]


def gradient_on_one_gpu(model: nn.Module, microbatches: Microbatches) -> list[Tensor]:
    """Of the mean loss of all samples at once, by parameter."""
    inputs, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    loss = cross_entropy(model(inputs), targets)
    return list(torch.autograd.grad(loss, list(model.parameters())))


@graded
def check_run_batch(run_batch: Callable[[Sequence[nn.Module], Microbatches], object]) -> str:
    """Exercise 2: a batch through two stages; its gradient is then in .grad."""
    for m in (4, 3):
        stages = build_stages(2, 1, seed=0)
        microbatches = some_microbatches(m)
        run_batch(stages, microbatches)
        exact = iter(gradient_on_one_gpu(nn.Sequential(*stages), microbatches))
        off = []
        for stage, module in enumerate(stages):
            found = [p.grad for p in module.parameters() if p.grad is not None]
            if len(found) < len(list(module.parameters())):
                raise WrongAnswer(f"stage {stage} has no gradient")
            off.append(relative_difference(found, [next(exact) for _ in found]))
        if max(off) > EXACT:
            raise WrongAnswer(
                f"with m={m} the gradient is off by {off[0]:.0%} on stage 0 and by {off[1]:.0%} on "
                f"stage 1. No shape is wrong and nothing crashed: which microbatch's message does "
                f"each receive take?"
            )
    return "both stages have the gradient that one GPU computes."


@graded
def check_batch_gradient(
    batch_gradient: Callable[[nn.Module, Microbatches], Sequence[Tensor]],
) -> str:
    """Exercise 3: a batch's gradient, accumulated from its microbatches."""
    for m in (4, 3):
        model = build_stages(1, 1, seed=0)[0]
        microbatches = some_microbatches(m)
        found = batch_gradient(model, microbatches)
        if found is None:
            raise WrongAnswer("batch_gradient returns nothing")
        exact = gradient_on_one_gpu(model, microbatches)
        along = sum(float((a.detach() * b).sum()) for a, b in zip(found, exact, strict=True))
        ratio = along / sum(float(b.square().sum()) for b in exact)
        if relative_difference(found, [ratio * b for b in exact]) > EXACT:
            off = f"{relative_difference(found, exact):.0%}"
            raise WrongAnswer(f"with m={m} the gradient is off by {off}, in its direction, too")
        if abs(ratio - 1) > EXACT:
            raise WrongAnswer(
                f"with m={m} the gradient has the right direction and is {ratio:.3g} times as long "
                f"as it should be. Training would look fine, at another learning rate."
            )
    return "the microbatches' gradients add up to the batch's."


Update = Callable[[Weights, Weights, float], Weights]
"""(weights by name, gradients by name, learning rate) -> the next version of the weights."""


@graded
def check_update(update: Update) -> str:
    """Exercise 6: a stage's update under PipeDream, with microbatches in flight."""
    replaced = False

    class Trainer(StageTrainer):
        """The tutorial's, with this update."""

        def _update(self, gradients: tuple[Tensor, ...]) -> None:
            nonlocal replaced
            old = self.weights
            before = {name: weight.detach().clone() for name, weight in old.items()}
            new = update(old, dict(zip(old, gradients, strict=True)), self.learning_rate)
            if not isinstance(new, dict) or new.keys() != old.keys():
                raise WrongAnswer("update has to return a dict with a tensor for each weight")
            replaced |= any(not torch.equal(old[name], before[name]) for name in old)
            self.updates += 1
            self.versions[self.updates] = {n: w.requires_grad_() for n, w in new.items()}
            self._drop_versions()

    settings: dict[str, Any] = {
        "num_stages": 4, "num_microbatches": 8, "num_batches": 2, "layers_per_stage": 1,
        "learning_rate": 0.5, "seed": 0,
    }  # fmt: skip
    exact = train("pipedream", **settings).weights
    try:
        found = train("pipedream", **settings, trainer_class=Trainer).weights
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise WrongAnswer(
            "autograd refuses a backward pass: the weights that its forward pass used were changed "
            "in place"
        ) from error
    pairs = zip(found, exact, strict=True)
    off = [relative_difference(ours.values(), theirs.values()) for ours, theirs in pairs]
    if max(off) > EXACT:
        shown = ", ".join(f"{error:.2%}" for error in off)
        why = ": the step is another one than weight - learning_rate * gradient"
        if replaced:
            seen = "backward passes saw other weights than their forward passes did."
            why = f". Nothing crashed: {seen}"
        at = "after 16 microbatches the weights of the 4 stages"
        raise WrongAnswer(f"{at} are off by {shown}{why}")
    return "the old weights stay as they were for the microbatches that still need them."


@graded
def check_halves(
    input_gradient: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, object]],
    weight_gradient: Callable[[Tensor, object], Tensor],
) -> str:
    """Exercise 7: I and W of Y = tanh(X W), where W sees only X and what I has kept."""
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (3, 4))
    )
    dy = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    y = torch.tanh(x @ w)
    exact = torch.autograd.grad(y, (x, w), dy)
    with torch.no_grad():
        halves = input_gradient(dy, y.detach(), w)
        if not isinstance(halves, tuple) or len(halves) != 2:
            raise WrongAnswer("input_gradient has to return two things: dX, and what W will need")
        found = halves[0], weight_gradient(x, halves[1])
    for name, like, ours, theirs in zip(("dX", "dW"), "XW", found, exact, strict=True):
        if ours is None:
            raise WrongAnswer(f"the function for {name} returns nothing")
        if ours.shape != theirs.shape:
            raise WrongAnswer(
                f"{name} has the shape {list(ours.shape)}; {like} has {list(theirs.shape)}"
            )
        off = relative_difference([ours], [theirs])
        if off > EXACT:
            raise WrongAnswer(
                f"{name} has the right shape and is off by {off:.0%}. What lies between Y and X W?"
            )
    return "both agree with autograd, and W needs nothing from another rank."
