"""The JSON record of a run: what was asked, what ran, what came out. No torch import."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from distributed_training.errors import UserError
from distributed_training.files import load_json, parse_json, shown
from distributed_training.strategy import ROOT

SCHEMA_VERSION = 1
RECORD_FILE = "record.json"
METRICS_FILE = "metrics.jsonl"
FAILURE_FILE = ".failure"
LOST = "lost another process"
STATUSES = ("running", "ok", "oom", "failed", "interrupted")
_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "numpy", "tokenizers")
logger = logging.getLogger(__name__)


class RunRecord:
    """A record that is on disk, whole, after every change."""

    def __init__(self, run_dir: Path, values: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self.values = values

    def update(self, **values: Any) -> None:
        """Change top-level entries and write the file."""
        self.values.update(values)
        write_json(self.run_dir / RECORD_FILE, self.values)


def start_record(run_dir: Path, /, **values: Any) -> RunRecord:
    """Create a record with status "running" and everything known before the first step."""
    record = RunRecord(
        run_dir,
        {
            "schema_version": SCHEMA_VERSION,
            "status": "running",
            "error": None,
            "started_at": timestamp(),
            "finished_at": None,
            "git_commit": git_commit(),
            "versions": versions(),
            "hostname": platform.node(),
            "pid": os.getpid(),
            **values,
        },
    )
    record.update()
    return record


def load_record(path: Path) -> dict[str, Any]:
    """Read a record from its file or its run's folder.

    Raises UserError for a file that is not a record or has another schema version.
    """
    file = path / RECORD_FILE if path.is_dir() else path
    values = load_json(file, "record")
    if not isinstance(values, dict) or "schema_version" not in values:
        raise UserError(f"{file} is not a run record", fix="give a folder under runs/")
    if values["schema_version"] != SCHEMA_VERSION:
        raise UserError(
            f"{file} has schema version {shown(values['schema_version'])}",
            f"this code reads version {SCHEMA_VERSION}",
            "run it again, or read it with the commit it names",
        )
    return values


def is_alive(record: dict[str, Any]) -> bool:
    """Whether a record says "running" and the process that wrote it is there, on this host."""
    if record.get("status") != "running" or record.get("hostname") != platform.node():
        return False
    try:
        process = psutil.Process(int(record["pid"]))
        # A process born after the record was begun has only inherited the number.
        return process.create_time() <= datetime.fromisoformat(record["started_at"]).timestamp() + 1
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def claim_failure(run_dir: Path) -> bool:
    """Whether this process is the first of its run to report a failure."""
    try:
        os.close(os.open(run_dir / FAILURE_FILE, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True  # better said twice than not at all
    return True


def mark_stopped(run_dir: Path, status: str, error: str, *, consequence: bool = False) -> None:
    """Set a terminal status on a record that says "running"; other statuses stay.

    Any rank, and the launching process, may call this: the first reason given is kept, but for one
    that is only the consequence of another process's end (`LOST`) and gives way to a cause.
    """
    file = run_dir / RECORD_FILE
    if not file.is_file():
        return
    values = json.loads(file.read_text(encoding="utf-8"))
    lost = LOST in (values["error"] or "")
    if values["status"] == "running" or (lost and not consequence):
        values.update(status=status, error=error, finished_at=timestamp())
        write_json(file, values)


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file; NaN and infinities, which JSON does not have, become null."""
    _write_whole(path, json.dumps(_finite(values), indent=2, allow_nan=False) + "\n")


def append_metrics(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """Add one JSON line per step; NaN and infinities become null."""
    with open(run_dir / METRICS_FILE, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows)


def truncate_metrics(run_dir: Path, num_steps: int) -> None:
    """Drop rows past `num_steps`, which a resumed run will do again, and what is no row: a run
    that was killed leaves half a line.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    steps = [_step_of(line) for line in lines]
    kept = [
        line + "\n"
        for line, step in zip(lines, steps, strict=True)
        if step is not None and step <= num_steps
    ]
    _write_whole(path, "".join(kept))
    if None in steps:
        logger.warning("%s: left out %d lines that are no metrics", path, steps.count(None))


def _step_of(line: str) -> int | None:
    """The step of a line of metrics, or None when it is none."""
    try:
        row = parse_json(line)
    except json.JSONDecodeError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None


def _finite(node: Any) -> Any:
    """`node` with None for every NaN and infinity."""
    if isinstance(node, dict):
        return {key: _finite(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def new_run_dir(output_dir: Path, strategy: str, model: str, world_size: int) -> Path:
    """A folder name under `output_dir` that is not taken: <time>-<strategy>-<model>-x<N>."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{strategy}-{model}-x{world_size}"
    for suffix in ["", *(f"-{count}" for count in range(2, 1000))]:
        if not (output_dir / (stem + suffix)).exists():
            return output_dir / (stem + suffix)
    raise UserError(f"{output_dir} holds a thousand runs of this second", fix="remove some")


def timestamp() -> str:
    """Now, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def git_commit() -> str | None:
    """Commit of this checkout, with "-dirty" when files differ; None outside a checkout."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide results."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
