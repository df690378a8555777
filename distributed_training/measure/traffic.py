"""Bytes that one training step hands to other processes, counted, beside what the formulas say.

    python real_model_example.py measure traffic results/records/cpu-traffic/traffic.json

Trains a small GPT-2 in bf16 on CPU processes over gloo under every case of
results/plans/cpu-traffic.json: two steps that are not looked at (DDP rearranges its buckets in the
second), then one in which every operation of torch.distributed is counted as PyTorch dispatches it.
Tensors of at most 8 bytes (gradient norm, overflow flags) are listed apart. Exit code 1 where a
count and its formula differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed_training.measure.harness import Run, each_run, open_group
from distributed_training.measure.traffic_counter import Traffic
from distributed_training.models.gpt2 import SIZES, gpt2_size
from distributed_training.plan.topology import fill_mesh
from distributed_training.plan.traffic import Formulas, sent_bytes
from distributed_training.records.record import git_commit, timestamp, versions, write_json
from distributed_training.run import launch
from distributed_training.settings.config import build_config
from distributed_training.settings.files import ROOT, load_json
from distributed_training.settings.strategies import load_strategy

PLAN = load_json(ROOT / "results/plans/cpu-traffic.json", "plan")
MODELS = {name: gpt2_size(**shape) for name, shape in PLAN["models"].items()}
SIZES.update(MODELS)
BASE, IN_DEPTH = PLAN["common"], PLAN["in_depth"]
SCRIPT, COMMAND = ROOT / "real_model_example.py", ("measure", "traffic")
# Processes -> row of the table -> CONFIG; "zero_optimization" changes the strategy's JSON.
CASES: dict[int, dict[str, Any]] = {int(n): cases for n, cases in PLAN["cases"].items()}
DEEPER = {f"{name}, 12 blocks": {**CASES[4][name], "model": "twelve-blocks"} for name in IN_DEPTH}
CASES[4] |= DEEPER  # the difference is what blocks send


def with_batch(values: dict[str, Any], count: int) -> dict[str, Any]:
    """A case's CONFIG with the batch_size that its micro-batches make on `count` processes."""
    whole = {**BASE, **values}
    known = {key: value for key, value in whole.items() if key != "zero_optimization"}
    config = build_config(known)
    mesh = fill_mesh(load_strategy(config), count, config)
    sequences = whole["micro_batch_size"] * whole["num_microbatches"]
    return {**values, "batch_size": sequences // (mesh["pp"] * mesh["tp"])}


def config_of(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All CONFIG values of a case; a JSON of its own is written to `folder`."""
    values = {**BASE, **values}
    changes = values.pop("zero_optimization", None)
    if changes is not None:
        document = load_json(ROOT / f"configs/ds_config_{values['strategy']}.json", "JSON")
        document["zero_optimization"].update(changes)
        file = folder / f"{values['strategy']}-{len(changes)}-changes.json"
        file.write_text(json.dumps(document))
        values["deepspeed_config"] = str(file)
    return values


def count_step(run: Run) -> dict[str, Any]:
    """What this process handed over in the third step. Collective."""
    topology = run.topology
    for step in range(2):
        run.engine.train_step(run.batch(step))
    with Traffic(topology) as traffic:
        run.engine.train_step(run.batch(2))
    formulas: dict[str, float] = {}
    for (axis, kind), size in Formulas(run.plan, topology).total().items():
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
    found = {}
    with open_group() as group:
        count = group.process.world_size
        cases = {name: with_batch(values, count) for name, values in CASES[count].items()}
        runs = {name: config_of(values, group.folder) for name, values in cases.items()}
        for finished in each_run(group, runs, count_step):
            if finished.refused is not None:
                raise SystemExit(f"{finished.name}: {finished.refused}")
            found[finished.name] = {
                "config": cases[finished.name], "processes": count, "ranks": finished.results,
            }  # fmt: skip
        if group.process.rank == 0:
            out.write_text(json.dumps(found))


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
    blocks = MODELS["twelve-blocks"].num_layers - MODELS["eight-blocks"].num_layers
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


def main(argv: Sequence[str] | None = None) -> int:
    """Start the processes, put their parts together, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args(argv).out
    if launch.current_process(os.environ) is not None:
        work(out)
        return 0
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in CASES:
            part = Path(folder) / f"{count}.json"
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            subprocess.run([*run, f"--nproc_per_node={count}", SCRIPT, *COMMAND, part], check=True)
            cases.update(json.loads(part.read_text()))
    rows = {name: table_row(case) for name, case in cases.items()}
    deeper = {name: rows.pop(f"{name}, 12 blocks") for name in IN_DEPTH}
    record = {
        "what": "one training step on CPU processes over gloo: bytes given to each operation of "
        "torch.distributed, and what a process sends for them in a ring",
        "command": "python real_model_example.py measure traffic OUT.json",
        "made_at": timestamp(),
        "git_commit": git_commit(),
        "versions": versions(),
        "models": PLAN["models"],
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
