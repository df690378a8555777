"""The JSON record of a run or measurement: its schema, how it is written. No torch import."""

import contextlib
import functools
import importlib.metadata
import itertools
import json
import logging
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
LAST = "hf"  # a folder of the run's weights in Hugging Face's format
BEST = "best"  # the same, of the lowest validation loss
METRICS_FILE = "metrics.jsonl"
TRACE_FILE = "trace-rank{}.json.gz"
MEMORY_FILE = "memory-rank{}.pickle"
FAULTS_FILE = ".faults"  # a line of JSON for each that a process of the run has noted
LOST = "lost another process"
# Axis -> size. The earliest records have no tp and pp.
Mesh = Annotated[dict[str, int], AfterValidator(lambda mesh: dict.fromkeys(MESH_AXES, 1) | mesh)]


def _has(*names: str) -> AfterValidator:
    """Return a check that an object has these keys."""

    def check(values: dict[str, Any]) -> dict[str, Any]:
        if lacking := [name for name in names if name not in values]:
            raise ValueError(f"it lacks {lacking[0]}")
        return values

    return AfterValidator(check)


def _are_numbers(values: Any) -> Any:
    """Check that an object has numbers and None only, at any depth."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, dict | list | tuple):
            _are_numbers(value)
        elif not (value is None or isinstance(value, float) or _is_count(value)):
            raise ValueError(f"{shown(value)} is not a number that a run writes")
    return values


def _is_count(value: object) -> bool:
    return isinstance(value, int) and -(2**80) < value < 2**80  # FLOPs and bytes are below


_Step = Annotated[int, Field(ge=0, lt=2**53)]
_Row = Annotated[dict[str, Any], _has("step"), AfterValidator(_are_numbers)]
_Numbers = Annotated[dict[str, Any], AfterValidator(_are_numbers)]
_OPEN = ConfigDict(extra="allow", frozen=True, defer_build=True)  # unknown keys are kept
logger = logging.getLogger(__name__)


class History(BaseModel):
    """What grows while a run trains, and what a resumed run takes over; on each rank with its own
    seconds of saves and loads."""

    step: _Step = 0  # optimizer steps done
    loss_curve: list[tuple[_Step, float | None]] = []  # (step, training loss); None: not finite
    # step, loss, perplexity, bits_per_byte, num_targets and num_bytes of their text; None: not
    # finite, or no text. Earlier records have no bytes.
    evaluations: list[_Row] = []
    epochs: list[_Row] = []  # mean and validation loss of each
    skipped_steps: list[_Step] = []  # not applied: gradients were not finite, or passed over
    # Checkpoints: step, stall_s in which training waited, write_s until it was on the disk, bytes.
    saves: list[_Row] = []
    loads: list[_Row] = []  # step and load_s, where a run went on from a checkpoint
    best: _Row | None = None  # with keep_best: the evaluation of what is in best/
    sample_before: str | None = None  # text of the untrained model; `sample` is the trained one's

    def cut(self, step: int) -> None:
        """Forget what came after `step`."""
        self.step = step
        self.loss_curve = [row for row in self.loss_curve if row[0] <= step]
        for rows in (self.evaluations, self.epochs, self.saves, self.loads):
            rows[:] = [row for row in rows if row["step"] <= step]
        self.skipped_steps = [skipped for skipped in self.skipped_steps if skipped <= step]
        if self.best and self.best["step"] > step:  # the steps after this one find it again
            self.best = None


class Record(History):
    """The record of a run, as far as this code reads it; REAL_MODELS_GUIDE.md describes all."""

    model_config = _OPEN
    schema_version: Literal[1, 2]
    status: Literal["running", "ok", "oom", "failed", "interrupted"]
    error: str | None = None  # why it failed, in a line
    started_at: str  # UTC, ISO 8601, as is finished_at
    finished_at: str | None = None
    hostname: str | None = None  # of the process that writes the record
    pid: int | None = None  # of that process
    run_dir: str  # empty where the run left no folder
    # CONFIG as resolved: no "auto" left
    config: Annotated[dict[str, Any], _has("model", "dataset", "max_length", "precision")]
    engine_options: dict[str, Any] = {}  # keys that the strategy's own engine adds
    config_requested: dict[str, Any] = {}  # as it was asked for
    from_strategy_defaults: list[str] = []  # CONFIG keys that the strategy decided
    strategy: Annotated[
        dict[str, Any], _has("name")
    ]  # name, as in CONFIG; sharding: what it divides, in words
    work: dict[str, Any]  # equal for runs that can be compared
    world_size: Annotated[int, Field(ge=1)]
    mesh: Mesh = Field(validation_alias=AliasChoices("mesh", "topology"))
    # schedule, num_microbatches, blocks_per_stage, and ideal_bubble, the idle share with equal
    # stages; None: no formula is known.
    pipeline: dict[str, Any] | None = None
    # first_step and last_step that were traced, names of the files (traces, memory); None: no.
    profile: dict[str, Any] | None = None
    machine: Annotated[
        dict[str, Any], _has("gpu_name")
    ]  # of rank 0: gpu_name (None: CPU only), num_gpus, num_cpus
    num_parameters: int  # of the whole model
    num_learning: int | None = None  # of them, or of adapters beside them; None: not recorded
    dtypes: dict[str, str] | None = None  # of what -> format; None until the engine is built
    estimated_state_bytes: dict[str, int] = {}  # part -> bytes per process
    # Before the run: peak_bytes, and by component, of the fullest process; step_time_s, None for a
    # GPU of which nothing is known, tokens_per_s, bound_by, sent_bytes a step by axis.
    prediction: dict[str, Any] | None = None
    batch: Batch
    data: dict[str, Any]  # form, numbers of samples, share of real tokens, steps an epoch
    num_steps: int  # planned
    startup_s: dict[str, float] = {}  # of rank 0's process, by what it did until the first step
    # Step time (step_time_s has p10, p50, p90, p99) and what follows from its median; empty
    # where the run did not get so far.
    performance: _Numbers = {}
    # Peaks while training, the highest rank's, and by_rank; None: not measured.
    memory: _Numbers = {}
    loss_seconds: list[float] = []  # of training until each entry of loss_curve, by `compare`
    disk: dict[str, int] | None = None  # read_bytes, write_bytes of all ranks in num_steps
    bubble: dict[str, Any] | None = None  # idle_share of the pipeline phase, mean over ranks

    @property
    def layout_name(self) -> str:
        """The strategy and, unless that says all, axes, a pipeline's schedule and micro-batches."""
        axes = self.mesh
        words = [self.strategy["name"]]
        both = axes["dp_replicate"] > 1 and axes["dp_shard"] > 1
        if both or axes["tp"] > 1 or axes["pp"] > 1:
            words += [f"{axis}{size}" for axis, size in axes.items() if size > 1]
            if axes["tp"] > 1 and not self.config.get("sequence_parallel", True):
                words.append("whole-norms")
            if cut := self.config.get("pipeline_cut"):
                words.append("cut-" + cut.replace(" ", "").replace(",", "-"))
            if pipeline := self.pipeline:
                words.append("{schedule}-m{num_microbatches}".format(**pipeline))
        return " ".join(words)


@dataclass
class RunRecord:
    """A record that is on disk, whole, after every change."""

    run_dir: Path
    values: dict[str, Any]

    def update(self, **values: Any) -> None:
        """Change top-level entries and write the file."""
        self.values.update(values)
        _write_with_cause(self.run_dir, self.values)


def start_record(run_dir: Path, /, **values: Any) -> RunRecord:
    """Create a record with status "running" and everything known before the first step."""
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
    """Read a record from its file or its run's folder; raises UserError for what is none."""
    file = path / RECORD_FILE if path.is_dir() else path
    fix = "give a folder under runs/, or use the commit that the record names"
    what = f"{file} is not a run record that this code reads"
    record = parse_as(Record, load_json(file, "record"), what, fix)
    if path.is_dir():  # which may have been copied or moved since
        return record.model_copy(update={"run_dir": str(path.resolve())})
    return record


def has_finished(run_dir: Path) -> bool:
    """Return whether a run's record says that it has ended well."""
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((run_dir / RECORD_FILE).read_bytes())["status"] == "ok")
    return False


def is_alive(r: Record) -> bool:
    """Whether the process of this host that wrote a record still runs."""
    with contextlib.suppress(psutil.Error, ValueError):  # it has ended; no date or number
        process = psutil.Process(r.pid)
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        # A process that began later has only been given the same number.
        began = datetime.fromisoformat(r.started_at).timestamp()
        return r.pid is not None and not ended and process.create_time() <= began + 1
    return False


def mark_stopped(
    run_dir: Path, status: str, error: str, *, consequence: bool = False, ago_s: float = 0.0
) -> bool:
    """Note why the run stops, from any rank or the launcher, `ago_s` after it happened, and set the
    status of a record that rank 0 has not ended itself. The earliest cause counts; what follows
    from another process's end (`consequence`) only until there is a cause. Whether this is the
    first cause to be noted."""
    fault = {
        "at": time.time() - ago_s, "consequence": consequence,
        "said": {"status": status, "error": error, "finished_at": timestamp()},
    }  # fmt: skip
    with contextlib.suppress(OSError), open(run_dir / FAULTS_FILE, "ab") as file:  # a full disk
        file.write(to_json(fault) + b"\n")
    record = run_dir / RECORD_FILE
    if record.is_file():
        values = json.loads(record.read_bytes())
        # One that the record alone has, as a full disk had no room for the note, yields to a cause.
        replaces = values["error"] is not None and not consequence
        if values["status"] == "running" or replaces:
            _write_with_cause(run_dir, values, fault)
    causes = [each for each in _read_faults(run_dir, fault) if not each["consequence"]]
    return causes[:1] == [fault]


def _read_faults(run_dir: Path, *known: Any) -> list[dict[str, Any]]:
    """Those in the file, in the order in which they were noted, and `known` ones that it lacks."""
    found = list[Any]()
    with contextlib.suppress(OSError, ValueError):  # not there; cut off by a full disk
        found.extend(map(json.loads, (run_dir / FAULTS_FILE).read_bytes().splitlines()))
    return found + [fault for fault in known if fault not in found]


def _write_with_cause(run_dir: Path, values: dict[str, Any], *known: Any) -> None:
    """Write a record with what ended the run, as any process noted, unless it ended well after all;
    once more where that was noted meanwhile. With a `known` fault also where the disk is full."""
    file = run_dir / RECORD_FILE
    before = None
    while (faults := _read_faults(run_dir, *known)) != before:
        first = min(faults, key=lambda each: (each["consequence"], each["at"]), default={})
        whole = values if values["status"] == "ok" else values | first.get("said", {})
        try:
            write_json(file, whole)
        except OSError:
            if not known:
                raise
            # No room for another file; without indentation it is shorter than it was.
            with open(file, "r+b") as same:
                same.write(to_json(whole, inf_nan_mode="null") + b"\n")
                same.truncate()
        before = faults


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file; NaN and infinities, which JSON does not have, become null."""
    _replace(path, to_json(values, indent=2, inf_nan_mode="null") + b"\n")


def append_metrics(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """Add one JSON line per step; NaN and infinities become null."""
    with open(run_dir / METRICS_FILE, "ab") as file:
        file.writelines(to_json(row, inf_nan_mode="null") + b"\n" for row in rows)


def truncate_metrics(run_dir: Path, num_steps: int) -> None:
    """Drop rows past `num_steps`, which a resumed run repeats, and lines that a crash broke."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return
    kept = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            if json.loads(line)["step"] <= num_steps:
                kept.append(line + b"\n")
        except (ValueError, TypeError, KeyError):
            logger.warning("%s: dropped a line that is not metrics", path)
    _replace(path, b"".join(kept))


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old one or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    try:
        temporary.write_bytes(content)
        publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def free_path(folder: Path, name: str, suffix: str = "") -> Path:
    """A path in `folder` that is not taken; the name gets a number where it is."""
    path = folder / f"{name}{suffix}"
    numbers = itertools.count(2)
    while path.exists():
        path = folder / f"{name}-{next(numbers)}{suffix}"
    return path


def provenance(command: str, *, commit: str | None = None) -> dict[str, Any]:
    """The head of a measurement's record; `commit`: of this tree, where its .git does not say."""
    return {
        "command": command,
        "made_at": timestamp(),
        "git_commit": commit or git_commit(),
        "versions": versions(),
    }


def timestamp() -> str:
    """Now, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def git_commit() -> str | None:
    """Commit of this checkout, with "-dirty" when files differ; None outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5)
        return answer.stdout.strip() or None
    return None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect results."""
    found = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "transformers", "numpy", "tokenizers"):
        # Native strategies run without DeepSpeed.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@functools.cache
def code() -> dict[str, str]:
    """CRC-32 of each Python file of the package and of the strategies."""
    files = [*ROOT.glob("distributed_training/**/*.py"), *ROOT.glob("strategies/*/*.py")]
    return {str(file.relative_to(ROOT)): f"CRC-32 {crc32(file):08x}" for file in sorted(files)}
