"""Find and check the checkpoint that a run resumes from, before the ranks start. This module does
not import torch. saver.py writes checkpoints and documents the files in them."""

import contextlib
import logging
import os
import socket
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from distributed_training.plan.plan import Plan
from distributed_training.records.folder import META_FILE, list_checkpoints, named_checkpoint
from distributed_training.records.record import (
    LAST,
    RECORD_FILE,
    Record,
    is_alive,
    load_record,
    write_json,
)
from distributed_training.settings.config import AUTO
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import crc32, crc32_of, load_object, parse_as, shown
from distributed_training.supervise import claims

CHECKSUM = "checksum"  # key in meta.json for the checksum of all other values
FORMAT = 6
MERGE_ADVICE = (
    "resume with shared_disk=False and the same layout on the same nodes in the same order. To "
    "use another layout, merge the run's folders of all nodes and copy the result to every node"
)
logger = logging.getLogger(__name__)


class FilesOnOtherNodesError(UserError):
    """Raised if this node lacks files that are on other nodes."""


class Meta(BaseModel, strict=True):
    """Contents of a checkpoint's meta.json, without the checksum."""

    format: int = FORMAT
    step: Annotated[int, Field(ge=0)]
    work: dict[str, Any]  # `Plan.work` of the run that wrote the checkpoint
    spread: dict[str, Any]  # `Plan.layout_fingerprint`
    data_fingerprint: str = ""
    base_fingerprint: int = 0  # `Engine.base_fingerprint`
    counters: dict[str, float]  # `Engine.counters`
    files: dict[str, int]  # file -> bytes
    checksums: dict[str, int]  # file -> CRC-32
    hosts: dict[str, str] = {}  # file -> host; only without a shared disk


def resume_advice(checkpoint: Path) -> str:
    """Return advice for a user whose checkpoint is damaged."""
    return f"set resume to another folder in {checkpoint.parent}, or train again without resume"


def write_meta(folder: Path, meta: Meta) -> None:
    """Write a checkpoint's meta.json with a checksum of its values."""
    values = meta.model_dump(mode="json")
    write_json(folder / META_FILE, {**values, CHECKSUM: crc32_of(values)})


def read_meta(folder: Path) -> Meta:
    """Read a checkpoint's meta.json. Raises UserError if the folder is not a checkpoint in this
    format, or if meta.json is damaged."""
    try:
        values = load_object(folder / META_FILE, "checkpoint")
    except UserError:
        raise UserError(f"{folder} is not a checkpoint", fix=resume_advice(folder)) from None
    if (saved_format := values.get("format")) != FORMAT:
        what = f"Checkpoint {folder} has the format {saved_format} of another version, not {FORMAT}"
        raise UserError(what, fix="start a new run with weights=<run>/hf, or set resume to None")
    if values.pop(CHECKSUM, None) != crc32_of(values):
        why = f"{META_FILE} has changed since it was written"
        raise UserError(f"Checkpoint {folder} is damaged", why, resume_advice(folder))
    return parse_as(Meta, values, f"Checkpoint {folder}", resume_advice(folder))


def rank_file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def files_to_read(folder: Path, meta: Meta, plan: Plan | None, rank: int) -> list[str]:
    """Return the names of the files that `rank` needs to load a checkpoint. Raises UserError if a
    needed file is missing, or FilesOnOtherNodesError if the file is on another node.

    Usually, a rank needs all files. If its node lacks some of them, the nodes have no shared disk
    and the layout is unchanged, the rank needs only the files written on its node."""
    names = list(meta.files)
    missing = [name for name in names if not (folder / name).is_file()]
    if (
        missing
        and plan is not None
        and plan.has_node_local_files
        and meta.spread == plan.layout_fingerprint
    ):
        names = [rank_file_name(other) for other in plan.ranks_on_disk(rank)]
        missing = [name for name in missing if name in names]
    if missing and meta.hosts:
        hosts = ", ".join(sorted({meta.hosts[name] for name in missing}))
        what = f"Checkpoint {folder} is not complete on {socket.gethostname()}"
        why = f"it lacks {len(missing)} files, such as {missing[0]}, of the nodes {hosts}"
        raise FilesOnOtherNodesError(what, why, MERGE_ADVICE)
    if missing:
        why = f"{missing[0]} is missing"
        raise UserError(f"Checkpoint {folder} is damaged", why, resume_advice(folder))
    return names


def check_files(folder: Path, meta: Meta, plan: Plan | None = None, rank: int = 0) -> list[str]:
    """Check the files that `files_to_read` returns for `rank`, and return their names. Raises
    UserError if a file is missing or damaged."""
    names = files_to_read(folder, meta, plan, rank)
    with ThreadPoolExecutor(8) as pool:
        checksums = pool.map(crc32, [folder / name for name in names])
        for name, checksum in zip(names, checksums, strict=True):
            if checksum != meta.checksums.get(name):
                why = f"{name} has changed since it was written"
                raise UserError(f"Checkpoint {folder} is damaged", why, resume_advice(folder))
    return names


def choose_checkpoint(plan: Plan, notes: list[str]) -> Path | None:
    """Return the checkpoint that the `resume` setting requests, or None if a new run should start.
    Append a note to `notes` if the state must be resharded."""
    checkpoint = find_checkpoint(plan, notes)
    if checkpoint is None:
        return None
    new = plan.layout_fingerprint
    changes = [
        f"{key} was {old} and is now {new.get(key)}"
        for key, old in read_meta(checkpoint).spread.items()
        if old != new.get(key)
    ]
    if changes:
        notes.append(f"the checkpoint is resharded, because {', '.join(changes[:3])}")
    return checkpoint


def find_checkpoint(plan: Plan, notes: list[str]) -> Path | None:
    """Return the checkpoint to resume from, or None if a new run should start.

    If `resume` is "auto", use the newest intact checkpoint of the newest unfinished run with the
    same `work` as `plan`. A run with the strategy of `plan` is preferred to a newer run with
    another strategy. Log a warning for each damaged checkpoint. Append a note to `notes` if there
    is no usable checkpoint.

    Raises UserError if the run has files on other nodes. Also raises UserError if a named
    checkpoint is missing or damaged, has no record of its run, or is from a run with a different
    `work`."""
    resume = plan.config.resume
    if resume is None:
        return None
    if resume == AUTO:
        return _find_newest(plan, notes)
    checkpoint = named_checkpoint(resume)
    meta = read_meta(checkpoint)
    # Keys that the user set to a new value, if the run then trains beyond the checkpoint
    extended_keys = {
        key
        for key in ("max_steps", "epochs")
        if plan.requested.is_set(key) and meta.work.get(key) != plan.work.get(key)
    }
    if plan.num_steps is not None and plan.num_steps <= meta.step:
        extended_keys = set()
    if differences := _differences(meta, plan, extended_keys):
        fix = "restore these settings, or start a new run from that run's weights: --weights "
        fix += f"{checkpoint.parents[1] / LAST}. The export command writes this folder"
        if "global_batch_size" in differences:
            differences += ". global_batch_size is batch_size x grad_accum_steps x processes"
        what = f"Cannot resume {shown(resume)}, because that run used different settings"
        raise UserError(f"{what}: {differences}", fix=fix)
    check_files(checkpoint, meta, plan)
    run = load_run_record(checkpoint, meta)
    for key in sorted(extended_keys):
        change = f"{key} was {meta.work.get(key)} and is now {plan.work[key]}"
        notes.append(f"{change}. The learning rate follows the new schedule from step {meta.step}")
    if run.status == "ok" and run.step > meta.step:
        steps = f"Steps {meta.step + 1} to {run.step}"
        notes.append(f"{checkpoint.parents[1].name} has finished. {steps} will be repeated.")
    return checkpoint


def _find_newest(plan: Plan, notes: list[str]) -> Path | None:
    runs = {}
    obstacle = ""
    # A link may lead to a run on another disk, and `latest` leads to one of the runs.
    for run_dir in {folder.resolve() for folder in plan.output_dir.glob("*")}:
        checkpoints = list_checkpoints(run_dir)
        if checkpoints and (why := claims.find_foreign_file(run_dir)):
            logger.warning("resume='auto' skips %s: %s", run_dir, why)
            continue
        for checkpoint in checkpoints:
            with _skip_damaged(checkpoint):
                meta = read_meta(checkpoint)
                run = load_run_record(checkpoint, meta)
                # Prefer runs with the same strategy, so that a user who compares strategies resumes
                # each strategy's own run.
                is_same = meta.spread.get("strategy") == plan.strategy.name
                runs[is_same, run.started_at, checkpoint] = meta, run
    for is_same, started_at, checkpoint in sorted(runs, reverse=True):
        meta, run = runs[is_same, started_at, checkpoint]
        if run.status == "ok":
            why = "has finished"
        elif differences := _differences(meta, plan):
            command = f"--resume {os.path.relpath(checkpoint.parents[1])}"
            why = f"used different settings: {differences}. To continue that run, restore these "
            why += f"settings and use {command}"
        elif not is_same and is_alive(run):
            why = "is in use"
        else:
            why = "is damaged"
            with _skip_damaged(checkpoint):
                check_files(checkpoint, meta, plan)
                return checkpoint
        obstacle = obstacle or f"{checkpoint.parents[1].name} {why}"
    obstacle = obstacle or f"no run in {shown(str(plan.output_dir))} has a usable checkpoint"
    notes.append(f"resume=auto starts a new run, because {obstacle}")
    return None


@contextlib.contextmanager
def _skip_damaged(checkpoint: Path) -> Iterator[None]:
    """Within the `with` block, log a warning instead of raising an error if the checkpoint is
    damaged. Raises FilesOnOtherNodesError if some of the checkpoint's files are on other nodes."""
    try:
        yield
    except FilesOnOtherNodesError:
        raise
    except (UserError, OSError) as error:
        logger.warning("resume='auto' skips %s: %s", checkpoint, error)


def load_run_record(checkpoint: Path, meta: Meta) -> Record:
    """Return the record of the checkpoint's run. Raises FilesOnOtherNodesError if the record is on
    another node, and UserError if it cannot be read."""
    run_dir = checkpoint.parents[1]
    if meta.hosts and not (run_dir / RECORD_FILE).is_file():
        what = f"{RECORD_FILE} of {run_dir} is not on {socket.gethostname()}"
        why = f"it is on the run's first node, {meta.hosts.get(rank_file_name(0))}"
        raise FilesOnOtherNodesError(what, why, MERGE_ADVICE)
    return load_record(run_dir)


def _differences(meta: Meta, plan: Plan, allowed: Collection[str] = ()) -> str:
    """Describe the keys of the work, except those in `allowed`, that differ from the checkpoint's
    run. The text may have moved, if its tokens are the same."""
    old, new = meta.work, plan.work
    ignored = {*allowed}
    if meta.data_fingerprint and meta.data_fingerprint == plan.data_fingerprint:
        ignored |= {"dataset", "validation_dataset", "tokenizer"}
    return ", ".join(
        f"{key} was {shown(old.get(key))} and is now {shown(new.get(key))}"
        for key in old | new
        if old.get(key) != new.get(key) and key not in ignored
    )
