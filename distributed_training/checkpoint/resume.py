"""Find and check the checkpoint that a run resumes from, before the ranks start. This module does
not import torch. saver.py writes checkpoints and documents the files in them."""

import contextlib
import os
import re
import shlex
import socket
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from distributed_training.models.size import differing_value
from distributed_training.plan.plan import Plan, is_copy, load_plan
from distributed_training.records.folder import META_FILE, list_checkpoints, named_checkpoint
from distributed_training.records.record import (
    LAST,
    RECORD_FILE,
    Record,
    find_record,
    is_alive,
    load_record,
)
from distributed_training.settings.config import AUTO
from distributed_training.settings.errors import FinishedError, UserError
from distributed_training.settings.files import JsonObject, crc32, load_object, parse_as, shown
from distributed_training.supervise import claims

FORMAT = 7
# Keys of the work that a named resume may change: larger values of STEPS extend the run,
# and the model's folder may have been moved. `load_checkpoint` compares the weights.
STEPS = {"max_steps", "epochs"}
CHANGEABLE = {*STEPS, "model", "weights"}
MERGE_ADVICE = (
    "resume with shared_disk=False and the same layout on the same nodes in the same order. To "
    "use another layout, merge the run's folders of all nodes and copy the result to every node"
)


class FilesOnOtherNodesError(UserError):
    """Raised if this node lacks files that are on other nodes."""


class Meta(BaseModel, strict=True):
    """Contents of a checkpoint's meta.json."""

    format: int = FORMAT
    step: Annotated[int, Field(ge=0)]
    attempt_id: str = ""  # `Plan.attempt_id`
    work: dict[str, Any]  # `Plan.work` of the run that wrote the checkpoint
    spread: dict[str, Any]  # `Plan.layout_fingerprint`
    data_fingerprint: str = ""
    base_fingerprint: int = 0  # `Engine.base_fingerprint`; 0 without base weights
    counters: dict[str, float]  # `Engine.counters`
    files: dict[str, int]  # file -> bytes
    checksums: dict[str, int]  # file -> CRC-32
    hosts: dict[str, str] = {}  # file -> host; only without a shared disk


def resume_advice(checkpoint: Path) -> str:
    """Return advice for a user whose checkpoint is damaged."""
    return f"set resume to another folder in {checkpoint.parent}, or train again without resume"


def read_meta(folder: Path) -> Meta:
    """Read a checkpoint's meta.json. Raises UserError if the folder is not a checkpoint in this
    format, or if meta.json is damaged or of another step."""
    try:
        values = load_object(folder / META_FILE, "checkpoint")
    except UserError:
        raise UserError(f"{folder} is not a checkpoint", fix=resume_advice(folder)) from None
    saved_format = values.get("format")
    if saved_format != FORMAT:
        what = f"Checkpoint {folder} has the format {saved_format} of another version, not {FORMAT}"
        raise UserError(what, fix="start a new run with weights=<run>/hf, or set resume to None")
    meta = parse_as(Meta, values, f"Checkpoint {folder}", resume_advice(folder))
    if re.fullmatch(r"step-\d+", folder.name) and int(folder.name[5:]) != meta.step:
        why = f"its meta.json is that of step {meta.step}"
        raise UserError(f"Checkpoint {folder} is damaged", why, resume_advice(folder))
    return meta


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
    Append a note to `notes` if the state must be resharded, or if the run's record is lost."""
    checkpoint = find_checkpoint(plan, notes)
    if checkpoint is None:
        return None
    meta = read_meta(checkpoint)
    run_dir = checkpoint.parents[1]
    saved_plan = None
    with contextlib.suppress(UserError):  # the file may be lost
        saved_plan = load_plan(run_dir)
    if saved_plan and (difference := differing_value(saved_plan.model.size, plan.model.size)):
        key, old, new = difference
        what = f"Cannot resume {run_dir.name}, because its model's config.json has changed"
        fix = "restore the file, or add --resume None to start a new run"
        raise UserError(what, f"{key} was {old} and is now {new}", fix)
    if find_record(run_dir) is None:
        what = f"{run_dir / RECORD_FILE} was lost or damaged, so the run's new record has no losses"
        notes.append(f"{what} and evaluations up to step {meta.step}")
    new = plan.layout_fingerprint
    changes = [
        f"{key} was {old} and is now {new.get(key)}"
        for key, old in meta.spread.items()
        if old != new.get(key)
    ]
    if changes:
        notes.append(f"the checkpoint is resharded, because {', '.join(changes[:3])}")
    return checkpoint


def find_checkpoint(plan: Plan, notes: list[str]) -> Path | None:
    """Return the checkpoint to resume from, or None if a new run should start.

    If `resume` is "auto", use the intact checkpoint with the most steps among the unfinished runs
    with the same `work` as `plan`. A run with the strategy of `plan` is preferred to a run with
    another strategy. Append a note to `notes` for each damaged checkpoint, and if there is no
    usable checkpoint. Raises FinishedError if a run with this strategy has done the work, and
    UserError instead of starting a new run if only an obstacle prevents a run from continuing.

    Raises UserError if the run has files on other nodes. Also raises UserError if a named
    checkpoint is missing or damaged, or is from a run with a different `work`. Its model may have
    been moved."""
    resume = plan.config.resume
    if resume is None:
        return None
    if resume == AUTO:
        return _find_newest(plan, notes)
    checkpoint = named_checkpoint(resume)
    meta = read_meta(checkpoint)
    changed = changed_keys(meta, plan)
    max_steps = plan.work.get("max_steps")
    if changed & STEPS == {"epochs"} and plan.num_steps == max_steps:
        what = f"epochs={plan.work['epochs']} has no effect, because {max_steps=} decides"
        raise UserError(what, fix="set max_steps to a larger number, or to -1 to train for epochs")
    if plan.num_steps is not None and plan.num_steps <= meta.step:
        changed -= STEPS
    if "model" in changed:
        saved_plan = load_plan(checkpoint.parents[1])
        if saved_plan.model.size != plan.model.size:
            changed.remove("model")
    if differences := _differences(meta.work, meta.data_fingerprint, plan, changed):
        fix = "restore these settings, or start a new run from that run's weights: --weights "
        fix += f"{checkpoint.parents[1] / LAST}. The export command writes this folder"
        if "global_batch_size" in differences:
            differences += ". global_batch_size is batch_size x grad_accum_steps x processes"
        what = f"Cannot resume {shown(resume)}, because that run used different settings"
        raise UserError(f"{what}: {differences}", fix=fix)
    check_files(checkpoint, meta, plan)
    run = load_run_record(checkpoint, meta)
    for key in sorted(changed & STEPS):
        change = f"{key} was {meta.work.get(key)} and is now {plan.work[key]}"
        notes.append(f"{change}. The learning rate follows the new schedule from step {meta.step}")
    if run and run.status == "ok" and run.step > meta.step:
        steps = f"Steps {meta.step + 1} to {run.step}"
        notes.append(f"{checkpoint.parents[1].name} has finished. {steps} will be repeated.")
    return checkpoint


def changed_keys(meta: Meta, plan: Plan) -> set[str]:
    """Return the keys in CHANGEABLE that differ from the checkpoint's run."""
    return {key for key in CHANGEABLE if meta.work.get(key) != plan.work.get(key)}


def _find_newest(plan: Plan, notes: list[str]) -> Path | None:
    candidates = []
    obstacle = ""
    problems: list[str] = []
    # A link may lead to a run on another disk, and `latest` leads to one of the runs.
    for run_dir in {folder.resolve() for folder in plan.output_dir.glob("*")}:
        _check_unfinished(run_dir, plan)
        for checkpoint in list_checkpoints(run_dir):
            with _skip_damaged(checkpoint, notes):
                meta = read_meta(checkpoint)
                # Prefer runs with the same strategy, so that a user who compares strategies resumes
                # each strategy's own run. A copy beside its run is a backup.
                is_same = meta.spread.get("strategy") == plan.strategy.name
                candidates.append((is_same, not is_copy(run_dir), meta.step, checkpoint, meta))
    for is_same, _, _, checkpoint, meta in sorted(candidates, reverse=True):
        run_dir = checkpoint.parents[1]
        if differences := _differences(meta.work, meta.data_fingerprint, plan):
            why = f"used different settings: {differences}. To continue that run with its own "
            why += "settings, or with a larger max_steps or epochs, use --resume "
            why += shlex.quote(os.path.relpath(run_dir))
        else:
            why = "has finished"
            with _skip_damaged(checkpoint, problems):
                run = load_run_record(checkpoint, meta)
                if not is_same and is_alive(run_dir):
                    why = "is in use"
                elif run is None or run.status != "ok":
                    claims.check_foreign_files(run_dir)
                    check_files(checkpoint, meta, plan)
                    notes += problems
                    return checkpoint
        obstacle = obstacle or f"{run_dir.name} {why}"
    if problems:
        raise UserError(problems[0], fix="to start a new run, add --resume None")
    obstacle = obstacle or f"no run in {shown(str(plan.output_dir))} has a usable checkpoint"
    notes.append(f"resume=auto starts a new run, because {obstacle}")
    return None


def _check_unfinished(run_dir: Path, plan: Plan) -> None:
    """Raise FinishedError if a run with the strategy and data of `plan` has done its work."""
    try:
        run = load_record(run_dir)
    except UserError:  # not a run
        return
    data_fingerprint = run.work.pop("data_fingerprint", "")
    is_same_data = plan.data_fingerprint in ("", data_fingerprint)
    is_same = is_same_data and run.strategy.get("name") == plan.strategy.name
    if run.status == "ok" and is_same and not _differences(run.work, data_fingerprint, plan):
        name = shlex.quote(os.path.relpath(run_dir))
        fix = "to train again, add --resume None. To train longer, add "
        fix += f"--resume {name} and a larger --max_steps or --epochs"
        raise FinishedError(f"{name} has finished this work after {run.step} steps", fix=fix)


@contextlib.contextmanager
def _skip_damaged(checkpoint: Path, problems: list[str]) -> Iterator[None]:
    """Within the `with` block, append a note to `problems` instead of raising an error if the
    checkpoint cannot be used. Raises FilesOnOtherNodesError if some of its files are on other
    nodes."""
    try:
        yield
    except FilesOnOtherNodesError:
        raise
    except (UserError, OSError) as error:
        problems.append(f"resume=auto cannot use {checkpoint}: {error}")


def load_run_record(checkpoint: Path, meta: Meta) -> Record | None:
    """Return the record of the checkpoint's run, as `find_record` does. Raises
    FilesOnOtherNodesError if the record is on another node."""
    run_dir = checkpoint.parents[1]
    if meta.hosts and not (run_dir / RECORD_FILE).is_file():
        what = f"{RECORD_FILE} of {run_dir} is not on {socket.gethostname()}"
        why = f"it is on the run's first node, {meta.hosts.get(rank_file_name(0))}"
        raise FilesOnOtherNodesError(what, why, MERGE_ADVICE)
    return find_record(run_dir)


def _differences(
    old: JsonObject, data_fingerprint: str, plan: Plan, allowed: Collection[str] = ()
) -> str:
    """Describe the keys of the work, except those in `allowed`, that differ from the work `old` of
    a run with this data. The text may have moved, if its tokens are the same."""
    new = plan.work
    ignored = {*allowed}
    if data_fingerprint and data_fingerprint == plan.data_fingerprint:
        ignored |= {"dataset", "validation_dataset", "tokenizer"}
    return ", ".join(
        f"{key} was {shown(old.get(key))} and is now {shown(new.get(key))}"
        for key in old | new
        if old.get(key) != new.get(key) and key not in ignored
    )
