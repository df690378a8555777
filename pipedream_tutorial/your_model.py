"""Your own module in PyTorch's pipeline: two processes on the CPU, checked against one process.

    python your_model.py

Exercises. Predict before you run, and change one thing at a time:
1. CUT = 1. Which stage is now too long, and which cut is the fastest? The prediction knows.
2. SCHEDULE = "gpipe". What changes: the time, the gradients, or neither?
3. Add nn.BatchNorm1d(512) to MODEL. Why do the gradients now differ from one process's?
"""

import os
import tempfile
from statistics import median_low
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.simulator import Costs, simulate
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

torch.manual_seed(0)
MODEL = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())])
CUT = 4  # stage 0 has the layers before it, stage 1 the others
SCHEDULE, MICROBATCHES = "1f1b", 8
X, TARGET = torch.randn(256, 512), torch.randn(256, 512)
LOSS = nn.MSELoss()


def gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in module.parameters()])


def time_stage(stage: nn.Module, x: torch.Tensor, target: torch.Tensor | None) -> list[int]:
    """Microseconds of one microbatch's forward and backward pass."""
    x = x.detach().requires_grad_(target is not None)
    begin = perf_counter()
    out = stage(x)
    loss = out.sum() if target is None else LOSS(out, target)
    middle = perf_counter()
    loss.backward()
    return [round(1e6 * (middle - begin)), round(1e6 * (perf_counter() - middle))]


def run(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # listen on this machine only
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=2, rank=rank)
    module = MODEL[CUT:] if rank else MODEL[:CUT]
    x = X.chunk(MICROBATCHES)[0]
    example = (MODEL[:CUT](x), TARGET.chunk(MICROBATCHES)[0]) if rank else (x, None)
    own = [time_stage(module, *example) for _ in range(10)]
    times: list[list[int]] = [[], []]  # of each stage: F and B
    dist.all_gather_object(times, [median_low(kind) for kind in zip(*own, strict=True)])

    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[SCHEDULE]
    schedule = kind(stage, MICROBATCHES, loss_fn=LOSS)  # divides gradients by m itself
    measured = []
    for _ in range(6):
        module.zero_grad()
        dist.barrier()
        begin = perf_counter()
        schedule.step(*([] if rank else [X]), target=TARGET if rank else None)
        dist.barrier()
        measured.append(round(1e6 * (perf_counter() - begin)))
    found = gradients(module)

    MODEL.zero_grad()
    LOSS(MODEL(X), TARGET).backward()  # the whole model here, the batch at once
    off = (found - gradients(module)).norm() / gradients(module).norm()
    print(f"stage {rank}: gradient off by {off:.1e} from one process's", flush=True)
    if rank == 0:
        f, b = zip(*times, strict=True)
        costs = Costs(forward=f, input_gradient=b, weight_gradient=(0, 0))
        makespan = simulate(build_schedule(SCHEDULE, 2, MICROBATCHES), costs).makespan
        print("F of the stages:", *f, "us; B:", *b, "us")
        wanted, took = float(makespan) / 1000, median_low(measured[2:]) / 1000
        print(f"predicted: {wanted:.1f} ms; measured: {took:.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(run, (meeting,), nprocs=2)
