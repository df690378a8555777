"""Run our CSV files in torch's pipeline runtime, with a small fp64 model and four processes.

    run_csv.py FOLDER NAME...

For each FOLDER/NAME.csv, compare the gradients of this rank's stage with the gradients of the whole
batch, computed without a pipeline. Write the largest difference and the order of operations to
FOLDER/rank<r>.json."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipedream.runtime.launch import STORE_ENV, launch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, MICROBATCHES, ROWS = 8, 8, 4


def record(stage: PipelineStage, ran: list[str]) -> None:
    """Record the operations that torch's runtime runs on `stage`, by appending each one to
    `ran`."""

    def wrap(method: str, kind: Callable[[dict[str, Any]], str]) -> None:
        inner = getattr(stage, method)

        def recorded(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            ran.append(f"{stage.stage_index}{kind(kwargs)}{microbatch}")
            return inner(microbatch, *args, **kwargs)

        setattr(stage, method, recorded)

    wrap("forward_one_chunk", lambda kwargs: "F")
    wrap("backward_one_chunk", lambda kwargs: "B" if kwargs["full_backward"] else "I")
    wrap("backward_weight_one_chunk", lambda kwargs: "W")


def run(csv: Path, rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(1)
    stages = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(world_size)
    ]
    x, y = torch.randn(2, MICROBATCHES * ROWS, WIDTH)
    loss = nn.MSELoss()
    loss(nn.Sequential(*stages)(x), y).backward()
    expected = [p.grad.clone() for p in stages[rank].parameters()]
    stages[rank].zero_grad()

    stage = PipelineStage(stages[rank], rank, world_size, torch.device("cpu"))
    ran: list[str] = []
    record(stage, ran)
    schedule = _PipelineScheduleRuntime([stage], MICROBATCHES, loss_fn=loss)
    schedule._load_csv(str(csv))
    schedule.step(*[x] * (rank == 0), target=y if rank == world_size - 1 else None)
    apart = max(
        float((p.grad - e).abs().max() / e.abs().max())
        for p, e in zip(stages[rank].parameters(), expected, strict=True)
    )
    return {"apart": apart, "ran": ran}


def main(rank: int) -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    store = dist.FileStore(os.environ[STORE_ENV], 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    world_size = dist.get_world_size()
    found = {name: run(folder / f"{name}.csv", rank, world_size) for name in names}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(launch(main, 4))
