"""Define and write the JSON record of a run or measurement. This module does not import torch."""

import contextlib
import fcntl
import functools
import importlib.metadata
import json
import math
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json, to_json

from distributed_training.plan.layout import Batch
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import (
    ROOT,
    JsonObject,
    crc32,
    load_json,
    parse_as,
    replace_file,
)

RECORD_FILE = "record.json"
LAST = "hf"  # folder with the final weights in Hugging Face format
BEST = "best"  # folder with the weights that had the lowest validation loss
METRICS_FILE = "metrics.jsonl"
TRACE_FILE = "trace-rank{}.json.gz"
OWNER_FILE = ".owner.json"  # lock of a run's folder (supervise/claims.py)
LOST_PEER = "lost the connection to another process"


class History(BaseModel):
    """Results that accumulate during training. A resumed run adds to the results of the original
    run. The times in `saves` differ between ranks."""

    step: int = 0  # number of finished optimizer steps
    loss_curve: list[tuple[int, float | None]] = []  # (step, training loss or None if not finite)
    # Keys: step, loss, perplexity, bits_per_byte, num_targets, and num_bytes of the targets' text.
    # A value is None if it is not finite or if there is no text. Earlier records lack bits_per_byte
    # and num_bytes.
    evaluations: list[JsonObject] = []
    # Steps that were skipped because of non-finite gradients
    skipped_steps: list[int] = []
    # Tokens of a mixture's most loaded expert, relative to the mean of its layer, in the last
    # micro-batch
    expert_load: float | None = None
    # Keys: step, copied (whether a copy in host memory was written), stall_s (how long the save
    # blocked training), write_s (time until the checkpoint was on disk), bytes.
    saves: list[JsonObject] = []
    best: JsonObject | None = None  # with keep_best: the evaluation of the weights in best/

    @property
    def comparable_evaluations(self) -> list[JsonObject]:
        """Evaluations on the samples of the last one. `eval_samples` may change when a run is
        resumed, and the number of targets tells its values apart."""
        if not self.evaluations:
            return []
        num_targets = self.evaluations[-1].get("num_targets")
        return [row for row in self.evaluations if row.get("num_targets") == num_targets]

    def describe_plateau(self, count: int) -> str:
        """If none of the last `count` evaluations lowered the validation loss, return the lowest
        loss and its step as text. Otherwise, or if `count` is 0, return ""."""
        evaluations = self.comparable_evaluations
        best_index = 0
        lowest = math.inf
        for index, row in enumerate(evaluations):
            if row["loss"] is not None and row["loss"] < lowest:
                best_index = index
                lowest = row["loss"]
        if not count or len(evaluations) - best_index <= count:
            return ""
        return f"{lowest:.4f} at step {evaluations[best_index]['step']}"

    def truncate(self, step: int) -> None:
        """Drop all results that were recorded after `step`, except for the best evaluation, because
        best/ keeps its weights."""
        self.step = step
        self.loss_curve = [row for row in self.loss_curve if row[0] <= step]
        for rows in (self.evaluations, self.saves):
            rows[:] = [row for row in rows if row["step"] <= step]
        self.skipped_steps = [skipped for skipped in self.skipped_steps if skipped <= step]


class Record(History):
    """Fields of a run's record that this package reads. The record also contains other fields.
    REAL_MODELS_GUIDE.md documents the main fields."""

    # Unknown keys are kept.
    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    schema_version: Literal[2]
    status: Literal["running", "ok", "oom", "failed", "interrupted"]
    error: str | None = None  # the reason why the run failed
    started_at: str  # UTC, ISO 8601
    hostname: str | None = None  # host of the process that writes the record
    run_dir: str  # "" if the run left no folder
    # CONFIG after all "auto" values have been resolved
    config: JsonObject
    engine_options: JsonObject = {}  # keys that only this strategy's engine declares
    config_requested: JsonObject = {}  # CONFIG as the user wrote it
    # Keys: name, as in CONFIG, and engine
    strategy: JsonObject
    work: JsonObject  # equal for runs that can be compared
    world_size: int
    mesh: dict[str, int]  # axis -> size
    # Keys: schedule, num_microbatches, blocks_per_stage and ideal_bubble. ideal_bubble is the idle
    # share if all stages take equally long, or None if there is no formula.
    pipeline: JsonObject | None = None
    # Machine of rank 0: gpu_name (None without GPUs), num_gpus, num_cpus
    machine: JsonObject
    num_parameters: int  # parameters of the whole model
    # Trained parameters: all parameters or, with lora_rank, only the adapters. None if not recorded
    num_learning: int | None = None
    estimated_state_bytes: dict[str, int] = {}  # component -> bytes per process
    # Predicted before the run. The main keys are:
    # - peak_bytes, memory_bytes: size of the tensors in the process that uses the most memory, in
    #   total and by component
    # - host_bytes: RAM per process
    # - step_time_s, tokens_per_s, bound_by: time of a step, speed and main bottleneck; None for an
    #   unknown GPU
    # - likely_s, evidence: 80% range of the time, or None, and the nearest measured run
    # - sent_bytes: bytes sent per step, by axis
    prediction: JsonObject | None = None
    batch: Batch
    data: JsonObject  # form, numbers of samples, share of real tokens, steps per epoch
    num_steps: int  # planned number of steps
    # From metrics.py: step_time_s (p10, p50, p90, p99), and tokens_per_s and mfu of the median
    # step. Empty if the run ended before they were measured.
    performance: JsonObject = {}
    # Peak memory during training: the maxima over all ranks, and by_rank. Values that were not
    # measured are None.
    memory: JsonObject = {}

    @property
    def layout_name(self) -> str:
        """Return the strategy's name. If the layout uses cp, tp, pp, or both replicas and shards,
        the name also contains the axes, the pipeline schedule and the number of micro-batches."""
        name = str(self.strategy["name"])
        axes = {axis: size for axis, size in self.mesh.items() if size > 1}
        if len(axes) < 2 and axes.keys() <= {"dp_replicate", "dp_shard"}:
            return name
        for axis, size in axes.items():
            name += f" {axis}{size}"
        if self.pipeline:
            name += f" {self.pipeline['schedule']}-m{self.pipeline['num_microbatches']}"
        return name


@dataclass
class RunRecord:
    """Record of a run that is written to disk after every change."""

    run_dir: Path
    values: JsonObject

    def update(self, **values: Any) -> None:
        """Set top-level entries and write the file."""
        self.values.update(values)
        end = {}
        if has_begun(self.run_dir) and self.values["status"] != "ok":
            written = json.loads((self.run_dir / RECORD_FILE).read_bytes())
            if written["error"]:  # another process has recorded why the run ends
                end = {key: written[key] for key in ("status", "error", "finished_at")}
        write_json(self.run_dir / RECORD_FILE, self.values | end)


def start_record(run_dir: Path, /, **values: Any) -> RunRecord:
    """Create a record with status "running" and all values that are known before the first step."""
    about = {
        "schema_version": 2,
        "status": "running",
        "error": None,
        "started_at": timestamp(),
        "finished_at": None,
        "git_commit": git_commit(),
        "versions": versions(),
        "hostname": platform.node(),
    }
    record = RunRecord(run_dir, {**about, **values})
    record.update()
    return record


def load_record(path: Path) -> Record:
    """Return the record in a file or in a run's folder. Raises UserError if there is no valid
    record."""
    file = path / RECORD_FILE if path.is_dir() else path
    fix = "name a run's folder, or use the version of this suite that wrote the record"
    what = f"{file} is not a run record that this version can read"
    record = parse_as(Record, load_json(file, "record"), what, fix)
    # The folder may have been copied or moved.
    run_dir = file.parent if file.name == RECORD_FILE else file.with_suffix("")
    return record.model_copy(update={"run_dir": str(run_dir.resolve())})


def find_record(run_dir: Path) -> Record | None:
    """Return a run's record, or None if the file was removed, or damaged by a crash. Raises
    UserError if another version of this suite wrote the record."""
    try:
        load_json(run_dir / RECORD_FILE, "record")
    except UserError:
        return None
    return load_record(run_dir)


def has_finished(run_dir: Path) -> bool:
    """Return whether a run's record has the status "ok"."""
    with contextlib.suppress(UserError):
        return load_record(run_dir).status == "ok"
    return False


def is_alive(run_dir: Path) -> bool:
    """Return whether a process of the run on this machine still holds the lock on the run's
    folder."""
    with contextlib.suppress(FileNotFoundError), open(run_dir / OWNER_FILE, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # the lock is held, or the file system has no locks
            return True
    return False


def has_begun(run_dir: Path) -> bool:
    """Return whether the current attempt of a run has written the record. Each attempt first writes
    plan.json with a new id."""
    record = run_dir / RECORD_FILE
    files = filter(Path.is_file, (run_dir / "plan.json", record))
    with contextlib.suppress(ValueError):  # a damaged record is of an earlier attempt
        ids = {json.loads(file.read_bytes()).get("attempt_id") for file in files}
        return record.is_file() and len(ids) == 1
    return False


def mark_stopped(
    run_dir: Path, status: str, error: str, *, consequence: bool = False, decides: bool = False
) -> bool:
    """Record why a run is stopping, unless the run has finished or another process has recorded a
    cause. Any rank or the launching process may call this function. Return False if the record
    contains another cause.

    Set `consequence` if another failure led to this one. For example, a lost connection is a
    consequence if the process at the other end failed. A cause replaces a consequence. Set
    `decides` if this cause replaces any other, because the launching process saw it happen."""
    if not has_begun(run_dir):  # rank 0 writes the record later
        return True
    file = run_dir / RECORD_FILE
    values = json.loads(file.read_bytes())
    is_open = values["status"] == "running" or LOST_PEER in (values["error"] or "")
    is_open = is_open or (decides and values["status"] != "ok")
    if not is_open or (consequence and values["error"]):
        return False
    values |= {"status": status, "error": error, "finished_at": timestamp()}
    try:
        write_json(file, values)
    except OSError:
        # The disk has no space for a second file. Without indentation, the record is shorter than
        # the old one, so overwrite the old file.
        with contextlib.suppress(OSError), open(file, "r+b") as old_record:
            old_record.write(to_json(values, inf_nan_mode="null") + b"\n")
            old_record.truncate()
    return not consequence


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file. NaN and infinities become null, because JSON has no such values."""
    replace_file(path, to_json(values, indent=2, inf_nan_mode="null") + b"\n")


def append_metrics(run_dir: Path, rows: list[JsonObject]) -> None:
    """Append `rows` to metrics.jsonl, one line per step. NaN and infinities become null."""
    with open(run_dir / METRICS_FILE, "ab") as file:
        file.writelines(to_json(row, inf_nan_mode="null") + b"\n" for row in rows)


def truncate_metrics(run_dir: Path, num_steps: int) -> None:
    """Drop the rows of steps after `num_steps`, because a resumed run repeats these steps. Also
    drop any lines that a crash damaged."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return
    kept_lines = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        # A crash may have damaged the line.
        with contextlib.suppress(ValueError, TypeError, LookupError):
            if from_json(line)["step"] <= num_steps:
                kept_lines.append(line + b"\n")
    replace_file(path, b"".join(kept_lines))


def provenance(command: str, *, commit: str | None = None) -> JsonObject:
    """Return the entries that describe the origin of a measurement: the command, the time, the
    commit and the package versions. Pass `commit` if the checkout has no .git."""
    return {
        "command": command,
        "made_at": timestamp(),
        "git_commit": commit or git_commit(),
        "versions": versions(),
    }


def timestamp() -> str:
    """Return the current UTC time in ISO 8601 format, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def git_commit() -> str | None:
    """Return the commit of this checkout, with the suffix "-dirty" if files differ from the commit.
    Return None outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5)
        return result.stdout.strip() or None
    return None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect results."""
    installed = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "transformers", "numpy", "tokenizers"):
        # Native strategies run without DeepSpeed.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


@functools.cache
def code_checksums() -> dict[str, str]:
    """Return the CRC-32 of each Python file in the package and in the strategies, by path."""
    files = [*ROOT.glob("distributed_training/**/*.py"), *ROOT.glob("strategies/*/*.py")]
    return {str(file.relative_to(ROOT)): f"CRC-32 {crc32(file):08x}" for file in sorted(files)}
