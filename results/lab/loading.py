"""Measure the time, RAM and GPU memory that each rank needs to build a run's model.

    torchrun --nproc_per_node=N results/lab/loading.py --out FOLDER [--set key=value ...]

`--set model=FOLDER weights=pretrained` reads a Hugging Face folder. By default the model is
Llama-3.2-1B with random weights. Each rank builds the strategy's engine once. `ram` is the growth
of the process's peak RAM (ru_maxrss), and `file pages` is the RAM that holds pages of mapped files.
"""

import json
import resource
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout
import torch
from tabulate import tabulate

from distributed_training.parallel.agree import gather
from distributed_training.planner.data import load_planned_data
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.machine import GIB
from distributed_training.settings.request import build_config
from distributed_training.start.rendezvous import agree_on_plan
from distributed_training.tools.harness import Group, open_group
from distributed_training.train.build import build_engine, build_topology

COMMON: dict[str, Any] = {
    "model": "Llama-3.2-1B", "strategy": "fsdp", "batch_size": 1, "max_length": 1024,
    "precision": "bf16", "dataset": "embedded", "weights": "random", "num_samples": 8,
    "eval_samples": 1, "checkpoint_every": 0,
}  # fmt: skip


def peak_ram_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def file_pages_gib() -> float:
    """Return the amount of this process's RAM that holds pages of mapped files, in GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("RssFile")]
    return int(kib) * 1024 / GIB


def measure(values: dict[str, Any], group: Group) -> list[dict[str, Any]]:
    """Build the engine. Return the time and the memory that each rank needed to build it. All ranks
    must call this function."""
    settings = {"output_dir": str(group.folder), **values}
    config = build_config(settings)
    plan = agree_on_plan(config, group.process, gather)
    topology = build_topology(plan, group.process, group.device)
    load_planned_data(plan)
    plan.strategy.load_engine()  # Import the engine before the measurement.
    on_gpu = group.device.type == "cuda"
    if on_gpu:
        torch.zeros(1, device=group.device)
    ram_before = peak_ram_gib()
    began = time.perf_counter()
    engine = build_engine(plan, topology)
    measured: dict[str, Any] = {"seconds": time.perf_counter() - began, "ram before": ram_before}
    measured |= {"ram": peak_ram_gib() - ram_before, "file pages": file_pages_gib()}
    if on_gpu:
        measured["gpu"] = torch.cuda.memory_allocated() / GIB
        measured["gpu peak"] = torch.cuda.max_memory_allocated() / GIB
    parameters = engine.stages.parameters()  # type: ignore[attr-defined]
    local_shards = (p.to_local() if hasattr(p, "to_local") else p for p in parameters)
    measured["local shard"] = sum(shard.nbytes for shard in local_shards) / GIB
    engine.close()
    return gather(measured)


def main(argv: Sequence[str] | None = None) -> int:
    parser = checkout.Parser(
        description="Measure the time and memory that each rank needs to build a model."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
    values = dict(COMMON)
    for override in arguments.set:
        key, text = override.split("=", 1)
        values[key] = json.loads(text) if text.isdigit() else text
    with open_group() as group:
        ranks = measure(values, group)
        if group.process.rank == 0:
            print(tabulate(ranks, "keys", "github", floatfmt=".2f"))
            document = {**provenance(shlex.join(["python", *sys.argv])), "config": values}
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_json(arguments.out / "loading.json", document | {"ranks": ranks})
    return 0


if __name__ == "__main__":
    checkout.run(main)
