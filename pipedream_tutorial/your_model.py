"""Run your own module in PyTorch's pipeline, in two processes on the CPU, and compare its gradients
and its time: python your_model.py"""

from argparse import ArgumentParser
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from pipedream.runtime.stage import listen_on_loopback, median_us
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.simulator import Costs, simulate
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

torch.manual_seed(0)  # the same weights and samples in both processes
MODEL = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.Tanh())])
CUT, M = 4, 8  # layers of stage 0; microbatches
X, TARGET, LOSS = torch.randn(512, 1024), torch.randn(512, 1024), nn.MSELoss()


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    listen_on_loopback()
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=2, rank=rank)
    module = MODEL[CUT:] if rank else MODEL[:CUT]
    x = X.chunk(M)[0]
    if rank == 1:  # the input of stage 1 comes from stage 0 and needs a gradient
        x = MODEL[:CUT](x).detach().requires_grad_()
    f = median_us(lambda: module(x))
    b = median_us(lambda: module(x).sum().backward()) - f

    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, M, loss_fn=LOSS)
    args, target = ([], TARGET) if rank else ([X], None)
    measured = median_us(lambda: schedule.step(*args, target=target))
    MODEL.zero_grad()
    schedule.step(*args, target=target)
    ours = [weight.grad for weight in module.parameters()]

    MODEL.zero_grad()
    LOSS(MODEL(X), TARGET).backward()  # one process with the whole model and the whole batch
    reference = [weight.grad for weight in module.parameters()]
    off = max((a - b).norm() / b.norm() for a, b in zip(ours, reference, strict=True))
    stages = [None, None]
    dist.all_gather_object(stages, (f, b, off.item()))
    if rank == 0:  # rank 0 prints for both ranks, because the lines of two processes could mix
        forward, backward, off = zip(*stages, strict=True)
        verdict = "equal" if max(off) < 1e-5 else "DIFFER from"
        comparison = f"The gradients {verdict} the gradients of one process."
        print(f"{comparison} Errors: {off[0]:.1e} and {off[1]:.1e}")
        costs = Costs(forward=forward, input_gradient=backward, weight_gradient=(0, 0))
        predicted = int(simulate(build_schedule("1f1b", 2, M), costs).makespan)
        print(f"F per stage, in µs: {forward}. B per stage, in µs: {backward}")
        print(f"Time per batch: predicted {predicted} µs, measured {measured} µs")


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()  # the only option is --help
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder,), nprocs=2)
