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
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from distributed_training import sizes  # noqa: E402

SIZE = sizes.ModelSize(
    vocab_size=2048, num_positions=128, num_layers=8, num_heads=4, hidden_size=32
)
DEEPER = dataclasses.replace(SIZE, num_layers=12)  # the difference is what blocks send
MODELS = {"eight-blocks": SIZE, "twelve-blocks": DEEPER}
sizes.SIZES.update(MODELS)  # before config reads SIZES

from traffic_counter import Traffic  # noqa: E402
from traffic_formulas import Formulas, sent_bytes  # noqa: E402

from distributed_training import launch  # noqa: E402
from distributed_training.assemble import (  # noqa: E402
    build_engine,
    build_sampler,
    seed_dropout,
)
from distributed_training.config import RunConfig, build_config  # noqa: E402
from distributed_training.files import load_json  # noqa: E402
from distributed_training.machine import detect_machine  # noqa: E402
from distributed_training.plan import load_plan_data, make_plan  # noqa: E402
from distributed_training.record import (  # noqa: E402
    git_commit,
    timestamp,
    versions,
    write_json,
)
from distributed_training.strategy import MESH_AXES, load_strategy  # noqa: E402
from distributed_training.topology import (  # noqa: E402
    Topology,
    build_topology,
    process_group,
)

BASE = {
    "model": "eight-blocks",
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
        "`tp` 4, k = 2, recomputed": {"strategy": "tp", "activation_checkpointing": "full"},
        "`pp` 4, m = 8, gpipe": {**_PIPELINE, "pipeline_schedule": "gpipe"},
        "`pp` 4, m = 8, 1f1b": {**_PIPELINE, "pipeline_schedule": "1f1b"},
        "`pp` 4, m = 8, interleaved": {**_PIPELINE, "pipeline_schedule": "interleaved"},
        "`pp` 4, m = 8, zb-h1": {**_PIPELINE, "pipeline_schedule": "zb-h1"},
        "`pp` 4, m = 8, zb-v": {**_PIPELINE, "pipeline_schedule": "zb-v"},
        "`3d` dp_shard 2 x tp 2, k = 2": _mesh(dp_shard=2, tp=2),
        "`3d` pp 2 x tp 2, m = 4": {**_mesh(pp=2, tp=2), "grad_accum_steps": 4},
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
IN_DEPTH = (
    "`dp` 4, k = 2", "`fsdp` 4, k = 2", "`fsdp` 2 copies x 2, k = 2", "`tp` 4, k = 2",
    "`tp` 4, k = 2, no sequence_parallel", "`pp` 4, m = 8, 1f1b",
)  # fmt: skip
CASES[4] |= {
    f"{name}, 12 blocks": {**CASES[4][name], "model": "twelve-blocks"} for name in IN_DEPTH
}


def build_case(values: dict[str, Any], folder: Path) -> RunConfig:
    """The CONFIG of a case; a JSON of its own is written to `folder`."""
    values = {**BASE, "output_dir": str(folder), **values}
    changes = values.pop("zero_optimization", None)
    if changes is not None:
        document = load_json(ROOT / f"configs/ds_config_{values['strategy']}.json", "JSON")
        document["zero_optimization"].update(changes)
        file = folder / f"{values['strategy']}-{len(changes)}-changes.json"
        file.write_text(json.dumps(document))
        values["deepspeed_config"] = str(file)
    return build_config(values)


def run_case(config: RunConfig, topology: Topology) -> dict[str, Any]:
    """What this process handed over in the third step. Collective."""
    count = topology.world_size
    plan = make_plan(config, detect_machine(), num_processes=count, processes_here=count)
    data, _ = load_plan_data(plan)
    sampler = build_sampler(config, data, topology)
    engine = build_engine(plan, topology)
    seed_dropout(config, topology)
    for step in range(2):
        engine.train_step(sampler.step_batch(data.train, step))
    with Traffic(topology) as traffic:
        engine.train_step(sampler.step_batch(data.train, 2))
    engine.close()
    formulas: dict[str, float] = {}
    for (axis, kind), size in (
        Formulas(config, MODELS[config.model], count, topology.rank).total().items()
    ):
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


def block_row(deeper: dict[str, float], row: dict[str, float]) -> dict[str, float]:
    """What one block adds to a step."""
    blocks = DEEPER.num_layers - SIZE.num_layers
    return {name: (deeper[name] - row[name]) / blocks for name in ("in all", "by formula")}


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
    rows = {name: table_row(case) for name, case in cases.items()}
    deeper = {name: rows.pop(f"{name}, 12 blocks") for name in IN_DEPTH}
    record = {
        "what": "one training step on CPU processes over gloo: bytes given to each operation of "
        "torch.distributed, and what a process sends for them in a ring",
        "command": "python results/measure_traffic.py results/records/cpu-traffic/traffic.json",
        "made_at": timestamp(),
        "git_commit": git_commit(),
        "versions": versions(),
        "models": {name: dataclasses.asdict(size) for name, size in MODELS.items()},
        "base": BASE,
        "bytes_sent": rows,
        "bytes_sent_for_a_block": {name: block_row(deeper[name], rows[name]) for name in IN_DEPTH},
        "cases": cases,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, record)
    wrong = differences(cases)
    print("\n".join(wrong) or f"{len(cases)} cases, every count as its formula says; wrote {out}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
