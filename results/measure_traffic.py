"""Bytes that one training step hands to other processes, counted, beside what the formulas say.

    python results/measure_traffic.py results/records/cpu-traffic/traffic.json

Trains a small GPT-2 in bf16 on CPU processes over gloo under every case of CASES: two steps that
are not looked at (DDP rearranges its buckets in the second), then one in which every operation of
torch.distributed is counted as PyTorch dispatches it. Tensors of at most 8 bytes (gradient norm,
overflow flags) are listed apart. Exit code 1 where a count and its formula differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

from traffic_formulas import Formulas, sent_bytes

from distributed_training import launch, sizes
from distributed_training.config import RunConfig, build_config
from distributed_training.data import Sampler
from distributed_training.files import load_json
from distributed_training.machine import detect_machine
from distributed_training.plan import load_plan_data, make_plan
from distributed_training.record import git_commit, timestamp, versions, write_json
from distributed_training.strategy import MESH_AXES, load_strategy
from distributed_training.topology import Topology, build_topology, process_group
from distributed_training.worker import build_engine, seed_dropout

SIZE = sizes.ModelSize(
    vocab_size=2048, num_positions=128, num_layers=8, num_heads=4, hidden_size=32
)
sizes.SIZES["eight-layers"] = SIZE
BASE = {
    "model": "eight-layers",
    "tokenizer": "embedded",
    "dataset": "embedded",
    "max_length": 32,
    "num_samples": 400,
    "learning_rate": 1e-3,
    "precision": "bf16",
    "batch_size": 2,
    "grad_accum_steps": 2,
}


def _mesh(**axes: int) -> dict[str, Any]:
    """CONFIG of the strategy with all axes, those that are not given being 1."""
    return {"strategy": "3d", **dict.fromkeys(MESH_AXES, 1), **axes}


_PIPELINE = {"strategy": "pp", "grad_accum_steps": 8}
_GATHER = {"stage3_param_persistence_threshold": 0}  # else all of this model stays whole
_TWICE = {**_GATHER, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
# Processes -> row of the table -> CONFIG; "zero_optimization" changes the strategy's JSON.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "`dp` 4, k = 2": {"strategy": "dp"},
        "`zero1` 4, k = 2": {"strategy": "zero1"},
        "`zero2` 4, k = 2": {"strategy": "zero2"},
        "`zero3` 4, k = 2, g = 1": {"strategy": "zero3", "zero_optimization": _GATHER},
        "`zero3` 4, k = 2, g = 2": {"strategy": "zero3", "zero_optimization": _TWICE},
        "`fsdp` 4, k = 2": {"strategy": "fsdp"},
        "`fsdp` 2 copies x 2, k = 2": {"strategy": "fsdp", "dp_replicate": 2},
        "`tp` 4, k = 2": {"strategy": "tp"},
        "`tp` 4, k = 2, no sequence_parallel": {"strategy": "tp", "sequence_parallel": False},
        "`pp` 4, m = 8, gpipe": {**_PIPELINE, "pipeline_schedule": "gpipe"},
        "`pp` 4, m = 8, 1f1b": {**_PIPELINE, "pipeline_schedule": "1f1b"},
        "`pp` 4, m = 8, interleaved": {**_PIPELINE, "pipeline_schedule": "interleaved"},
        "`pp` 4, m = 8, zb-h1": {**_PIPELINE, "pipeline_schedule": "zb-h1"},
        "`pp` 4, m = 8, zb-v": {**_PIPELINE, "pipeline_schedule": "zb-v"},
        "`3d` dp_shard 2 x tp 2, k = 2": _mesh(dp_shard=2, tp=2),
        "`3d` pp 2 x dp_shard 2, m = 4": {**_mesh(pp=2, dp_shard=2), "grad_accum_steps": 4},
        "`hybrid` pp 2 x 2, m = 4": {"strategy": "hybrid", "grad_accum_steps": 4},
    },
    8: {
        "`3d` pp 2 x dp_shard 2 x tp 2, m = 4": {
            **_mesh(pp=2, dp_shard=2, tp=2), "grad_accum_steps": 4,
        },
        "`3d` pp 2 x dp_replicate 2 x tp 2, m = 4": {
            **_mesh(pp=2, dp_replicate=2, tp=2), "grad_accum_steps": 4,
        },
    },
}  # fmt: skip
SMALL_BYTES = 8
# Operation -> (kind, its argument that is counted, whether the argument is one process's part).
COUNTED = {
    "c10d.allreduce_": ("all_reduce", 0, False),
    "c10d._allgather_base_": ("all_gather", 0, False),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, False),
    "c10d.broadcast_": ("broadcast", 0, False),
    "c10d.send": ("send", 0, False),
    "_c10d_functional.all_reduce": ("all_reduce", 0, False),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0, True),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0, False),
}
# The other end of a send; waiting, and marks for autograd.
PASSED_OVER = {
    "c10d.recv_", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd",
}  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts what is handed to torch.distributed while it is entered, on this thread."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology
        self.large: dict[str, Counter[str]] = {}
        """ "axis kind" -> calls, tensor_bytes, sent_bytes."""
        self.small: Counter[str] = Counter()
        """ "axis kind" -> calls."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if DTensor in types:
            return NotImplemented  # DTensor takes the operation apart and comes here again
        name = f"{func.namespace}.{func.__name__.split('.')[0]}"
        if name in COUNTED:
            self._count(name, args)
        elif "c10d" in func.namespace and name not in PASSED_OVER:
            raise NotImplementedError(f"{name} is not known here: add it to COUNTED")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        kind, place, is_part = COUNTED[name]
        members = dist.get_process_group_ranks(_group_of(args))
        if kind == "send":
            members = [self.topology.rank, members[args[2]]]
        size = _num_bytes(args[place]) * (len(members) if is_part else 1)
        key = f"{self._axis(members)} {kind}"
        if size <= SMALL_BYTES:
            self.small[key] += 1
            return
        sent = sent_bytes(kind, size, len(members))
        self.large.setdefault(key, Counter()).update(calls=1, tensor_bytes=size, sent_bytes=sent)

    def _axis(self, members: list[int]) -> str:
        """The axes along which these ranks differ."""
        places = [dataclasses.replace(self.topology, rank=rank) for rank in members]
        shards = self.topology.dp_shard
        coordinates = {
            "pp": {p.pp_rank for p in places},
            "dp_replicate": {p.dp_rank // shards for p in places},
            "dp_shard": {p.dp_rank % shards for p in places},
            "tp": {p.tp_rank for p in places},
        }
        return "+".join(axis for axis, values in coordinates.items() if len(values) > 1)


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """c10d's operations carry their group as an object, functional ones its name, last."""
    if isinstance(args[-1], str):
        return dist.distributed_c10d._resolve_process_group(args[-1])
    return dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))


def _num_bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_num_bytes, tensors))


def build_case(values: dict[str, Any], folder: Path) -> RunConfig:
    """The CONFIG of a case; a JSON of its own is written to `folder`."""
    values = {**BASE, "output_dir": str(folder), **values}
    changes = values.pop("zero_optimization", None)
    if changes is not None:
        document = load_json(ROOT / f"configs/ds_config_{values['strategy']}.json", "JSON")
        document["zero_optimization"].update(changes)
        file = folder / f"zero{abs(hash(str(changes)))}.json"
        file.write_text(json.dumps(document))
        values["deepspeed_config"] = str(file)
    return build_config(values)


def run_case(config: RunConfig, topology: Topology) -> dict[str, Any]:
    """What this process handed over in the third step. Collective."""
    count = topology.world_size
    plan = make_plan(config, detect_machine(), num_processes=count, processes_here=count)
    data, _ = load_plan_data(plan)
    sampler = Sampler(
        num_samples=len(data.train),
        micro_batch_size=config.micro_batch_size,
        grad_accum_steps=config.grad_accum_steps,
        dp_size=topology.dp_size,
        dp_rank=topology.dp_rank,
        seed=config.seed,
    )
    engine = build_engine(plan, topology)
    seed_dropout(config, topology)
    for step in range(2):
        engine.train_step(sampler.step_batch(data.train, step))
    with Traffic(topology) as traffic:
        engine.train_step(sampler.step_batch(data.train, 2))
    engine.close()
    formulas: dict[str, float] = {}
    for (axis, kind), size in Formulas(config, count, topology.rank).total().items():
        members = 2 if axis == "pp" else topology.axes[axis]
        formulas[f"{axis} {kind}"] = sent_bytes(kind, size, members)
    return {
        "rank": topology.rank,
        "counted": {key: dict(value) for key, value in sorted(traffic.large.items())},
        "formula_sent_bytes": {key: size for key, size in sorted(formulas.items()) if size},
        "small": dict(sorted(traffic.small.items())),
    }


def work(out: Path) -> None:
    """All cases of this number of processes, in one process group."""
    process, group = launch.current_process(os.environ), None
    assert process is not None
    launch.prepare_environment(detect_machine(), process.world_size)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, values in CASES[process.world_size].items():
            config = build_case(values, Path(folder))
            topology = build_topology(
                load_strategy(config),
                world_size=process.world_size,
                rank=process.rank,
                local_rank=process.local_rank,
                device_type="cpu",
            )
            if group is None:
                group = process_group(topology)
                group.__enter__()
            ranks: list[Any] = [None] * process.world_size
            dist.all_gather_object(ranks, run_case(config, topology))
            found[name] = {"config": values, "processes": process.world_size, "ranks": ranks}
        if process.rank == 0:
            out.write_text(json.dumps(found))
        assert group is not None
        group.__exit__(None, None, None)


def table_row(case: dict[str, Any]) -> dict[str, float]:
    """The row of the process that sends most."""
    rows = []
    for rank in case["ranks"]:
        row = {"over tp": 0.0, "over dp": 0.0, "over pp": 0.0}
        for key, value in rank["counted"].items():
            row[f"over {key[:2]}"] += value["sent_bytes"]
        row["in all"] = sum(row.values())
        rows.append({**row, "by formula": sum(rank["formula_sent_bytes"].values())})
    return max(rows, key=lambda row: row["in all"])


def differences(cases: dict[str, Any]) -> list[str]:
    """Where a count is not what its formula says."""
    found = []
    for name, case in cases.items():
        for rank in case["ranks"]:
            counted = {key: value["sent_bytes"] for key, value in rank["counted"].items()}
            if counted != rank["formula_sent_bytes"]:
                found.append(f"{name}, rank {rank['rank']}: counted {counted}, formula "
                             f"{rank['formula_sent_bytes']}")  # fmt: skip
    return found


def main() -> int:
    """Start the processes, put their parts together, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    if launch.current_process(os.environ) is not None:
        work(out)
        return 0
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in CASES:
            part = Path(folder) / f"{count}.json"
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            subprocess.run([*run, f"--nproc_per_node={count}", __file__, part], check=True)
            cases.update(json.loads(part.read_text()))
    record = {
        "what": "one training step on CPU processes over gloo: bytes given to each operation of "
        "torch.distributed, and what a process sends for them in a ring",
        "command": "python results/measure_traffic.py results/records/cpu-traffic/traffic.json",
        "made_at": timestamp(),
        "git_commit": git_commit(),
        "versions": versions(),
        "model": dataclasses.asdict(SIZE),
        "base": BASE,
        "bytes_sent": {name: table_row(case) for name, case in cases.items()},
        "cases": cases,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, record)
    wrong = differences(cases)
    print("\n".join(wrong) or f"{len(cases)} cases, every count as its formula says; wrote {out}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
