"""Run a list of trainings one after the other and bundle their records.

    python real_model_example.py measure runs results/plans/h200-x1.json OUT_DIR
    python real_model_example.py measure runs --unpack OUT_DIR/records.json FOLDER

A plan is JSON: {"num_gpus": N, "common": {CONFIG keys}, "runs": [{CONFIG keys}, ...]}. Every run is
the command a user would type. Runs that would start after the deadline are not started; which
ones is printed and can be read from the bundle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed_training.records.record import RECORD_FILE, write_json
from distributed_training.records.schema import Record
from distributed_training.records.tables import layout_words, table
from distributed_training.settings.files import ROOT

COLUMNS = (
    "strategy", "processes", "batch", "precision", "tokens/s", "ms a step", "timed steps", "MFU",
    "peak GPU memory", "peak host memory", "disk a step", "perplexity", "steps", "status",
)  # fmt: skip


def run_plan(plan: dict[str, Any], out: Path, deadline_s: float, git_commit: str | None) -> None:
    """Run what fits before the deadline; write records.json after every run.

    `git_commit` is for a copy of the tree without its .git, where a run cannot know it.
    """
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    records, skipped = [], []
    for run in plan["runs"]:
        settings = {**plan["common"], **run}
        name = " ".join(f"{key}={value}" for key, value in run.items())
        if time.monotonic() - began > deadline_s:
            skipped.append(name)
            continue
        run_began = time.monotonic()
        record = run_once(settings, plan["num_gpus"], Path("/tmp/plan-runs"), out)
        print(f"[{time.monotonic() - began:5.0f} s] {name}: {time.monotonic() - run_began:.0f} s")
        if record is not None:
            record["git_commit"] = record["git_commit"] or git_commit
            records.append(record)
            print(table([Record.model_validate(record)], COLUMNS).splitlines()[-1], flush=True)
        write_json(out / "records.json", {"records": records, "not_started": skipped})
    print(table([Record.model_validate(record) for record in records], COLUMNS))
    for name in skipped:
        print(f"not started: {name}")


def run_once(
    settings: dict[str, Any], num_gpus: int, output_dir: Path, out: Path
) -> dict[str, Any] | None:
    """One training; its record, or None when it wrote none (its output is then in log.txt)."""
    command = [sys.executable, str(ROOT / "real_model_example.py"), "--num_gpus", str(num_gpus)]
    for key, value in {**settings, "output_dir": str(output_dir)}.items():
        command += ["--set", f"{key}={value}"]
    before = set(output_dir.glob(f"*/{RECORD_FILE}"))
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with open(out / "log.txt", "a") as log:
        log.write(f"\n$ {' '.join(command)}\n{result.stdout}")
    new = set(output_dir.glob(f"*/{RECORD_FILE}")) - before
    if result.returncode != 0:
        print(f"exit code {result.returncode}\n{result.stdout[-1500:]}")
    return json.loads(new.pop().read_text()) if new else None


def unpack(bundle: Path, folder: Path) -> None:
    """One file a record, named by what distinguishes it; a run that the bundle holds again gets a
    number. Files of earlier bundles are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen: Counter[str] = Counter()
    for values in json.loads(bundle.read_text())["records"]:
        record = Record.model_validate(values)
        parts = (
            record.config["model"],
            record.strategy.name,
            *layout_words(record),
            record.config["precision"],
            f"b{record.batch.micro_batch_size}",
            f"x{record.world_size}",
        )
        name = "-".join(parts)
        seen[name] += 1
        again = f"-{seen[name]}" if seen[name] > 1 else ""
        write_json(folder / f"{name}{again}.json", values)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run a list of trainings, bundle their records.")
    parser.add_argument("source", type=Path, help="plan, or bundle with --unpack")
    parser.add_argument("target", type=Path, help="folder for the results")
    parser.add_argument("--deadline_s", type=float, default=float("inf"))
    parser.add_argument("--git_commit", help="of this tree, where it has no .git")
    parser.add_argument("--first", type=int, default=0, help="skip the runs before this one")
    parser.add_argument("--unpack", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.unpack:
        unpack(arguments.source, arguments.target)
        return 0
    plan = json.loads(arguments.source.read_text())
    plan["runs"] = plan["runs"][arguments.first :]
    run_plan(plan, arguments.target, arguments.deadline_s, arguments.git_commit)
    return 0
