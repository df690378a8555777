"""Train a model in a pipeline written by hand: one process per rank, `isend` and `irecv`.

    torchrun --standalone --nproc_per_node 4 pipeline_by_hand.py

Any number of ranks up to NUM_BLOCKS + 2 gives the same losses, on CPUs and GPUs. The model learns
to continue this text. Try this:

1. Run it with 1, 2 and 4 ranks, and compare the losses and the last lines.
2. `order` returns GPipe's order. Return the order of 1F1B instead (part 2 of README.md). The losses
   stay the same, and rank r then holds the activations of p - r microbatches instead of m.
3. Replace `build_layers` with your own layers, and set MESSAGE to the shape of what they return."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

M, SIZE = 8, 32  # microbatches per batch, samples per microbatch
CONTEXT, WIDTH, NUM_BLOCKS = 16, 256, 6  # bytes that predict the next byte, width of a message
MESSAGE = (SIZE, WIDTH)  # shape of each message: the result of the layer before a cut
NUM_STEPS = 40


def order(p: int, m: int, r: int) -> list[str]:
    """Return the operations of stage `r` of `p` for `m` microbatches, such as ["F0", "B0"]."""
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)]


class Block(nn.Module):
    """Residual block, [SIZE, WIDTH] -> [SIZE, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build_layers() -> list[nn.Module]:
    """Return the whole model as a list, which is cut into stages."""
    first = nn.Sequential(nn.Embedding(256, WIDTH // CONTEXT), nn.Flatten())
    return [first, *(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 256)]


def cut(layers: list[nn.Module], p: int) -> list[nn.Sequential]:
    """Return the layers of each of `p` stages."""
    cuts = [len(layers) * r // p for r in range(p + 1)]
    return [nn.Sequential(*layers[cuts[r] : cuts[r + 1]]) for r in range(p)]


def check_messages(stages: list[nn.Sequential], x: torch.Tensor) -> None:
    """Exit if a stage would send another message. `x` is one microbatch, [SIZE, ...]."""
    for r, stage in enumerate(stages[:-1]):
        for layer in stage:
            x = layer(x) if isinstance(x, torch.Tensor) else x  # a tuple stays
        returned = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else "a tuple"
        if returned != f"torch.float32 {MESSAGE}":
            error = f"error: Stage {r} returns {returned} from {len(stage)} layers, but MESSAGE"
            sys.exit(1 if dist.get_rank() else f"{error} is float32 {MESSAGE}.")


class Stage:
    """Layers of one rank, and its connections to the stages before and after it."""

    def __init__(self, module: nn.Sequential, device: torch.device) -> None:
        self.r, self.p = dist.get_rank(), dist.get_world_size()
        self.module = module.to(device)
        self.device = device
        # NCCL runs a group's messages in order, and two neighbors may both send first.
        self.down, self.up = dist.new_group(), dist.new_group()
        self.most_held = 0

    def receive(self, source: int, group: dist.ProcessGroup) -> torch.Tensor:
        """Wait for a message of another stage."""
        message = torch.empty(MESSAGE, device=self.device)
        dist.irecv(message, source, group).wait()
        return message

    def run_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Add the gradients of a batch, [M, SIZE, CONTEXT] and [M, SIZE], to the parameters.
        Return the mean loss. Only the last stage knows it; the others return 0."""
        first, last = self.r == 0, self.r == self.p - 1
        held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # inputs and outputs until B
        sends = []  # a message must stay in memory until it has been sent
        total = 0.0
        for operation in order(self.p, M, self.r):
            kind, i = operation[0], int(operation[1:])
            if kind == "F":
                x = inputs[i] if first else self.receive(self.r - 1, self.down).requires_grad_()
                y = self.module(x)
                if last:
                    y = F.cross_entropy(y, targets[i]) / M
                    total += y.item()
                else:
                    message = y.detach().contiguous()
                    sends.append((dist.isend(message, self.r + 1, self.down), message))
                held[i] = x, y
                self.most_held = max(self.most_held, len(held))
            else:
                x, y = held.pop(i)
                y.backward(None if last else self.receive(self.r + 1, self.up))
                if not first:
                    message = x.grad.contiguous()
                    sends.append((dist.isend(message, self.r - 1, self.up), message))
        for work, _ in sends:
            work.wait()
        return total


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not torch.cuda.is_available():
        device = torch.device("cpu")
        torch.set_num_threads(1)  # with more, a few small layers take longer
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # every rank builds the same model and keeps its part
    stages = cut(build_layers(), dist.get_world_size())
    text = torch.tensor(list(__doc__.encode()))
    windows = text.unfold(0, CONTEXT + 1, 1)  # all pieces of CONTEXT + 1 bytes
    check_messages(stages, windows[:SIZE, :CONTEXT])
    stage = Stage(stages[dist.get_rank()], device)
    optimizer = torch.optim.AdamW(stage.module.parameters(), lr=1e-3)
    choice = torch.Generator().manual_seed(0)  # dropout on a rank must not change the data
    for step in range(1, NUM_STEPS + 1):
        batch = windows[torch.randint(len(windows), (M, SIZE), generator=choice)].to(device)
        loss = stage.run_batch(batch[..., :CONTEXT], batch[..., CONTEXT])
        optimizer.step()  # after all backward passes of the batch: the flush
        optimizer.zero_grad()
        if step % 10 == 0 and stage.r == stage.p - 1:
            print(f"step {step}: loss {loss:.6f}\n", end="")  # one write, so that lines do not mix
    print(f"rank {stage.r} held the activations of {stage.most_held} microbatches\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
