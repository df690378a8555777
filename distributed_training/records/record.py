"""Define the JSON record of a run or measurement, and write it. No torch import."""

import contextlib
import functools
import importlib.metadata
import itertools
import json
import logging
import math
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field
from pydantic_core import to_json

from distributed_training.plan.layout import Batch
from distributed_training.settings.files import ROOT, crc32, load_json, parse_as, publish, shown
from distributed_training.settings.strategies import MESH_AXES

RECORD_FILE = "record.json"
LAST = "hf"  # folder with the last weights in Hugging Face's format
BEST = "best"  # folder with the weights of the lowest validation loss
METRICS_FILE = "metrics.jsonl"
TRACE_FILE = "trace-rank{}.json.gz"
MEMORY_FILE = "memory-rank{}.pickle"
FAULTS_FILE = ".faults"  # file with one line of JSON for each failure that a process has reported
LOST = "lost another process"
# Axis -> size. The earliest records have no tp and pp.
Mesh = Annotated[dict[str, int], AfterValidator(lambda mesh: dict.fromkeys(MESH_AXES, 1) | mesh)]


def _has(*names: str) -> AfterValidator:
    """Return a validator that an object has these keys."""

    def check(values: dict[str, Any]) -> dict[str, Any]:
        if absent := [name for name in names if name not in values]:
            raise ValueError(f"it lacks {absent[0]}")
        return values

    return AfterValidator(check)


def _are_numbers(values: Any) -> Any:
    """Return an object after checking that it contains only numbers and None, at any depth."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, dict | list | tuple):
            _are_numbers(value)
        elif not (value is None or isinstance(value, float) or _is_count(value)):
            raise ValueError(f"{shown(value)} is not a number that a run writes")
    return values


def _is_count(value: object) -> bool:
    # Larger than any number of FLOPs or bytes
    return isinstance(value, int) and -(2**80) < value < 2**80


_Step = Annotated[int, Field(ge=0, lt=2**53)]
_Row = Annotated[dict[str, Any], _has("step"), AfterValidator(_are_numbers)]
_Numbers = Annotated[dict[str, Any], AfterValidator(_are_numbers)]
_OPEN = ConfigDict(extra="allow", frozen=True, defer_build=True)  # unknown keys are kept
logger = logging.getLogger(__name__)


class History(BaseModel):
    """Results that grow during training and that a resumed run continues. Each rank has its own
    seconds of saves and loads."""

    step: _Step = 0  # number of finished optimizer steps
    loss_curve: list[tuple[_Step, float | None]] = []  # (step, training loss), None if not finite
    # Keys: step, loss, perplexity, bits_per_byte, num_targets and num_bytes of their text. A value
    # is None if it is not finite or if there is no text. Earlier records have no bytes.
    evaluations: list[_Row] = []
    epochs: list[_Row] = []  # mean training loss and validation loss per epoch
    # Steps skipped because of non-finite gradients or by a rollback
    skipped_steps: list[_Step] = []
    # Keys: step, stall_s (how long the save blocked training), write_s (until the checkpoint was on
    # disk), bytes.
    saves: list[_Row] = []
    loads: list[_Row] = []  # step and load_s for each resume
    best: _Row | None = None  # with keep_best: the evaluation of the weights in best/
    # Text of the untrained model; `sample` is from the trained model
    sample_before: str | None = None

    def end_epoch(self, steps_per_epoch: int) -> None:
        """Add the epoch that has just ended, after its evaluation."""
        epoch = (self.step - 1) // steps_per_epoch
        numbers = [loss for step, loss in self.loss_curve if step > epoch * steps_per_epoch]
        # A NaN becomes None when a run is resumed.
        losses = [loss for loss in numbers if loss is not None and math.isfinite(loss)]
        last = self.evaluations[-1]
        row = {
            "epoch": epoch + 1, "step": self.step,
            "mean_step_loss": sum(losses) / len(losses) if losses else None,
            "validation_loss": last["loss"], "validation_perplexity": last["perplexity"],
        }  # fmt: skip
        self.epochs.append(row)

    def find_stall(self, count: int) -> str:
        """Describe the lowest validation loss if the last `count` evaluations did not improve on
        it, otherwise return "". A `count` of 0 means never."""
        losses = [row["loss"] for row in self.evaluations]
        losses = [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]
        if not count or len(losses) <= count or min(losses[-count:]) < min(losses[:-count]):
            return ""
        lowest = min(losses)
        return f"{lowest:.4f} at step {self.evaluations[losses.index(lowest)]['step']}"

    def cut(self, step: int) -> None:
        """Drop the results after `step`."""
        self.step = step
        self.loss_curve = [row for row in self.loss_curve if row[0] <= step]
        for rows in (self.evaluations, self.epochs, self.saves, self.loads):
            rows[:] = [row for row in rows if row["step"] <= step]
        self.skipped_steps = [skipped for skipped in self.skipped_steps if skipped <= step]
        if self.best and self.best["step"] > step:  # best/ then changes when the steps are repeated
            self.best = None


class Record(History):
    """Fields of a run's record that this code reads. REAL_MODELS_GUIDE.md documents all fields."""

    model_config = _OPEN
    schema_version: Literal[1, 2]
    status: Literal["running", "ok", "oom", "failed", "interrupted"]
    error: str | None = None  # the reason why the run failed
    started_at: str  # UTC, ISO 8601, like finished_at
    finished_at: str | None = None
    hostname: str | None = None  # host of the process that writes the record
    pid: int | None = None  # process id of the same process
    run_dir: str  # "" if the run left no folder
    # The resolved CONFIG, without "auto"
    config: Annotated[dict[str, Any], _has("model", "dataset", "max_length", "precision")]
    engine_options: dict[str, Any] = {}  # keys that only this strategy's engine declares
    config_requested: dict[str, Any] = {}  # CONFIG as the user wrote it
    from_strategy_defaults: list[str] = []  # CONFIG keys that the strategy set
    # name, as in CONFIG; sharding, which describes the sharded state
    strategy: Annotated[dict[str, Any], _has("name")]
    work: dict[str, Any]  # equal for runs that can be compared
    world_size: Annotated[int, Field(ge=1)]
    mesh: Mesh = Field(validation_alias=AliasChoices("mesh", "topology"))
    # schedule, num_microbatches, blocks_per_stage, and ideal_bubble: the idle share if all stages
    # take equally long, or None if there is no formula
    pipeline: dict[str, Any] | None = None
    # first_step and last_step of the trace, and the names of its files (traces, memory)
    profile: dict[str, Any] | None = None
    # Machine of rank 0: gpu_name (None without GPUs), num_gpus, num_cpus
    machine: Annotated[dict[str, Any], _has("gpu_name")]
    num_parameters: int  # parameters of the whole model
    num_learning: int | None = None  # trained parameters, including adapters; None if not recorded
    dtypes: dict[str, str] | None = None  # tensor -> dtype; None until the engine is built
    estimated_state_bytes: dict[str, int] = {}  # component -> bytes per process
    # Predicted before the run: peak_bytes and memory_bytes (by component) of the fullest process;
    # step_time_s and tokens_per_s, which are None for an unknown GPU; bound_by; sent_bytes per
    # step, by axis
    prediction: dict[str, Any] | None = None
    batch: Batch
    data: dict[str, Any]  # form, numbers of samples, share of real tokens, steps per epoch
    num_steps: int  # planned number of steps
    startup_s: dict[str, float] = {}  # seconds of rank 0 by phase, until the first step
    # From metrics.py: step_time_s (p10, p50, p90, p99), and tokens_per_s and mfu of the median
    # step. Empty if the run ended before they were measured
    performance: _Numbers = {}
    # Peaks during training, of the fullest rank and by_rank; None if not measured
    memory: _Numbers = {}
    loss_seconds: list[float] = []  # training time up to each entry of loss_curve; set by `compare`
    disk: dict[str, int] | None = None  # read_bytes and write_bytes of all ranks in num_steps
    bubble: dict[str, Any] | None = None  # idle_share of the pipeline phase, averaged over ranks

    @property
    def layout_name(self) -> str:
        """Return the strategy's name with, unless the strategy determines them, the axes, the
        pipeline schedule and the number of micro-batches."""
        axes = self.mesh
        parts = [self.strategy["name"]]
        is_hybrid = axes["dp_replicate"] > 1 and axes["dp_shard"] > 1
        if is_hybrid or axes["tp"] > 1 or axes["pp"] > 1:
            parts += [f"{axis}{size}" for axis, size in axes.items() if size > 1]
            if axes["tp"] > 1 and not self.config.get("sequence_parallel", True):
                parts.append("whole-norms")
            if cut := self.config.get("pipeline_cut"):
                parts.append("cut-" + cut.replace(" ", "").replace(",", "-"))
            if pipeline := self.pipeline:
                parts.append("{schedule}-m{num_microbatches}".format(**pipeline))
        return " ".join(parts)


@dataclass
class RunRecord:
    """Record that is written to disk after every change."""

    run_dir: Path
    values: dict[str, Any]

    def update(self, **values: Any) -> None:
        """Set top-level entries and write the file."""
        self.values.update(values)
        _write_with_cause(self.run_dir, self.values)


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
        "pid": os.getpid(),
    }
    record = RunRecord(run_dir, {**about, **values})
    record.update()
    return record


def load_record(path: Path) -> Record:
    """Return the record in a file or a run's folder. Raises UserError for other files."""
    file = path / RECORD_FILE if path.is_dir() else path
    fix = "name a folder under runs/, or use the commit that the record names"
    what = f"{file} is not a run record that this version can read"
    record = parse_as(Record, load_json(file, "record"), what, fix)
    if path.is_dir():  # the folder may have been copied or moved
        return record.model_copy(update={"run_dir": str(path.resolve())})
    return record


def has_finished(run_dir: Path) -> bool:
    """Return whether a run's record has the status "ok"."""
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((run_dir / RECORD_FILE).read_bytes())["status"] == "ok")
    return False


def is_alive(r: Record) -> bool:
    """Return whether the process that wrote a record still runs on this host."""
    # The process has ended, or the record is invalid
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(r.pid)
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        # A process that started later has reused the pid.
        began = datetime.fromisoformat(r.started_at).timestamp()
        return r.pid is not None and not ended and process.create_time() <= began + 1
    return False


def mark_stopped(
    run_dir: Path, status: str, error: str, *, consequence: bool = False, ago_s: float = 0.0
) -> bool:
    """Report why the run stops, from any rank or the launcher, and update the status of a record
    that rank 0 has not finished. Return whether this is the first reported cause.

    The cause occurred `ago_s` seconds ago, and the earliest cause counts. A `consequence`, such as
    a lost connection to a failed process, counts only until a cause is reported."""
    fault = {
        "at": time.time() - ago_s, "consequence": consequence,
        "said": {"status": status, "error": error, "finished_at": timestamp()},
    }  # fmt: skip
    # The disk may be full.
    with contextlib.suppress(OSError), open(run_dir / FAULTS_FILE, "ab") as file:
        file.write(to_json(fault) + b"\n")
    record = run_dir / RECORD_FILE
    if record.is_file():
        values = json.loads(record.read_bytes())
        # If a full disk had no space for the fault, an earlier error may be in the record only. A
        # cause replaces it.
        replaces = values["error"] is not None and not consequence
        if values["status"] == "running" or replaces:
            _write_with_cause(run_dir, values, fault)
    causes = [f for f in _read_faults(run_dir, fault) if not f["consequence"]]
    return causes[:1] == [fault]


def _read_faults(run_dir: Path, *known_faults: Any) -> list[dict[str, Any]]:
    """Return the faults in the file in the order of their reports, then `known_faults`."""
    faults = list[Any]()
    # The file is missing, or a full disk truncated it
    with contextlib.suppress(OSError, ValueError):
        faults.extend(map(json.loads, (run_dir / FAULTS_FILE).read_bytes().splitlines()))
    return faults + [fault for fault in known_faults if fault not in faults]


def _write_with_cause(run_dir: Path, values: dict[str, Any], *known_faults: Any) -> None:
    """Write a record. Unless the run succeeded, include the cause of its end that any process has
    reported. Repeat this if another cause is reported in the meantime. With `known_faults`, write
    even to a full disk."""
    file = run_dir / RECORD_FILE
    old_faults = None
    while (faults := _read_faults(run_dir, *known_faults)) != old_faults:
        first = min(faults, key=lambda fault: (fault["consequence"], fault["at"]), default={})
        record = values if values["status"] == "ok" else values | first.get("said", {})
        try:
            write_json(file, record)
        except OSError:
            if not known_faults:
                raise
            # The disk has no space for a second file. Without indentation the record is shorter
            # than the old one, so overwrite the old file.
            with open(file, "r+b") as old_record:
                old_record.write(to_json(record, inf_nan_mode="null") + b"\n")
                old_record.truncate()
        old_faults = faults


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file. NaN and infinities become null, because JSON does not have them."""
    _replace(path, to_json(values, indent=2, inf_nan_mode="null") + b"\n")


def append_metrics(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """Append one line of JSON per step. NaN and infinities become null."""
    with open(run_dir / METRICS_FILE, "ab") as file:
        file.writelines(to_json(row, inf_nan_mode="null") + b"\n" for row in rows)


def truncate_metrics(run_dir: Path, num_steps: int) -> None:
    """Drop rows after `num_steps`, which a resumed run repeats, and lines damaged by a crash."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return
    kept_lines = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            if json.loads(line)["step"] <= num_steps:
                kept_lines.append(line + b"\n")
        except (ValueError, TypeError, KeyError):
            logger.warning("%s: dropped a damaged line", path)
    _replace(path, b"".join(kept_lines))


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that readers see either the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    try:
        temporary.write_bytes(content)
        publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def free_path(folder: Path, name: str, suffix: str = "") -> Path:
    """Return an unused path in `folder`. If the name is in use, a number is added."""
    path = folder / f"{name}{suffix}"
    numbers = itertools.count(2)
    while path.exists():
        path = folder / f"{name}-{next(numbers)}{suffix}"
    return path


def provenance(command: str, *, commit: str | None = None) -> dict[str, Any]:
    """Return the first entries of a measurement's record. Give `commit` for checkouts without
    .git."""
    return {
        "command": command,
        "made_at": timestamp(),
        "git_commit": commit or git_commit(),
        "versions": versions(),
    }


def timestamp() -> str:
    """Return the current time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def git_commit() -> str | None:
    """Return this checkout's commit, with "-dirty" if files differ, or None outside a checkout."""
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
def code() -> dict[str, str]:
    """Return the CRC-32 of each Python file of the package and of the strategies, by path."""
    files = [*ROOT.glob("distributed_training/**/*.py"), *ROOT.glob("strategies/*/*.py")]
    return {str(file.relative_to(ROOT)): f"CRC-32 {crc32(file):08x}" for file in sorted(files)}
