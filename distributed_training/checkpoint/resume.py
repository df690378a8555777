"""Which checkpoint a run goes on from; a wrong one is refused before processes start. No torch.
A checkpoint's files are described in saver.py, which writes them."""

import contextlib
import logging
import os
import socket
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from distributed_training.plan.plan import Plan
from distributed_training.records.folder import CHECKPOINTS, META_FILE, name_of, named_checkpoint
from distributed_training.records.record import LAST, RECORD_FILE, Record, load_record, write_json
from distributed_training.settings.config import AUTO, KEYS
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import (
    crc32,
    crc32_of,
    obstacle_to_writing,
    parse_as,
    parse_json,
    read_small,
    require_writable,
    shown,
)
from distributed_training.supervise import claims

CHECKSUM = "checksum"  # in it, of the rest
FORMAT = 5
INSTEAD = "remove that folder to fall back to the one before, or set resume to None"
TOGETHER = (
    "resume with shared_disk=False and the same layout on the same nodes in their order, or copy "
    "the run's folders of all nodes into one, to every node: then any layout resumes"
)
logger = logging.getLogger(__name__)


class ElsewhereError(UserError):
    """What is needed of a run is on other nodes."""


class Meta(BaseModel, strict=True):
    """A checkpoint's meta.json."""

    format: int = FORMAT
    step: Annotated[int, Field(ge=0)]
    work: dict[str, Any]  # `Plan.work` of the run that wrote it
    spread: dict[str, Any]  # `Plan.spread`
    data_fingerprint: str = ""
    base_fingerprint: int = 0  # of the weights that adapters belong to (Engine)
    sources: dict[str, str] = {}  # `Plan.sources` of the run
    counters: dict[str, float]  # of the engine (engines/base.py)
    files: dict[Annotated[str, Field(pattern=r"^rank-[0-9]{5,}\.safetensors$")], int]  # bytes
    checksums: dict[str, int]  # CRC-32 of each
    hosts: dict[str, str] = {}  # without a shared disk: which has each file


def write_meta(folder: Path, meta: Meta) -> None:
    """A checkpoint's meta.json, with a checksum of all that it says."""
    values = meta.model_dump(mode="json")
    write_json(folder / META_FILE, {**values, CHECKSUM: crc32_of(values)})


def read_meta(folder: Path) -> Meta:
    """A checkpoint's meta.json; raises UserError for a folder that is no checkpoint, and where it
    does not say what was written or is another folder's."""
    try:
        values = parse_json(read_small(folder / META_FILE).decode())
        form = values.get("format")
    except (OSError, ValueError, AttributeError):
        raise UserError(f"{folder} is not a checkpoint of this suite", fix=INSTEAD) from None
    if isinstance(form, int) and form != FORMAT:
        age = "an earlier" if form < FORMAT else "a later"
        what = f"checkpoint {folder} is of {age} release (format {form} instead of {FORMAT})"
        raise UserError(what, fix="start from its run's hf/ with weights=<run>/hf, or afresh")
    whole = values.pop(CHECKSUM, None) == crc32_of(values)
    meta = parse_as(Meta, values, f"checkpoint {folder}: {META_FILE}", INSTEAD) if whole else None
    if meta is None or folder.name != name_of(meta.step):
        why = f"{META_FILE} has other contents than were written, or the folder another name"
        raise UserError(f"checkpoint {folder} is damaged", why, INSTEAD)
    return meta


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def files_to_read(folder: Path, meta: Meta, plan: Plan | None = None, rank: int = 0) -> list[str]:
    """All files of a checkpoint or, where it lies on several disks, those of `rank`'s node, which
    suffice under the same layout. Raises ElsewhereError where other hosts have what is needed."""

    def absent() -> list[str]:
        return [name for name in (*names, META_FILE) if not (folder / name).is_file()]

    names = list(meta.files)
    if plan is not None and plan.own_disks and meta.spread == plan.spread and absent():
        first = rank // plan.processes_here * plan.processes_here
        names = [file_of(each) for each in range(first, first + plan.processes_here)]
    if meta.hosts and (lacking := absent()):
        hosts = sorted({meta.hosts[name] for name in lacking if name in meta.hosts})
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        what = f"checkpoint {folder} is not whole on {socket.gethostname()}"
        missing = f"it lacks {', '.join(lacking[:3])}{more}"
        why = f"; written on {', '.join(hosts)}, without a shared disk" if hosts else ""
        raise ElsewhereError(what, missing + why, TOGETHER)
    return names


def check_files(folder: Path, meta: Meta, plan: Plan | None = None, rank: int = 0) -> list[str]:
    """`files_to_read`; raises UserError unless all their bytes are as they were written."""
    names = files_to_read(folder, meta, plan, rank)

    def find_damage(name: str) -> str:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if crc32(folder / name) != meta.checksums.get(name):
            return f"{name} has other contents than were written"
        return ""

    with ThreadPoolExecutor(8) as pool:
        for damage in filter(None, pool.map(find_damage, names)):
            raise UserError(f"checkpoint {folder} is damaged", damage, INSTEAD)
    return names


def at_checkpoint(plan: Plan) -> Plan:
    """The plan as it goes on from an earlier run, where `resume` says so and there is one."""
    notes: list[str] = []
    found = find_resume(plan, notes)
    if found is None:
        return replace(plan, notes=(*plan.notes, *notes)) if notes else plan
    checkpoint, meta = found
    saved = meta.spread
    now = plan.spread
    before, after = (
        f"{spread.get('strategy')} x {spread.get('num_processes')}" for spread in (saved, now)
    )
    others = [key for key in saved if saved[key] != now.get(key)]
    if before != after:
        change = f"-> resuming {after}: resharding; the folder keeps its name"
        notes.append(f"saved {before} {change}")
    elif others:
        change = f"{others[0]} {saved[others[0]]} -> resuming with {now.get(others[0])}"
        notes.append(f"saved {before} with {change}: resharding")
    notes = [*plan.notes, *notes]
    return replace(plan, run_dir=checkpoint.parents[1], checkpoint=checkpoint, notes=tuple(notes))


def find_resume(plan: Plan, notes: list[str]) -> tuple[Path, Meta] | None:
    """The checkpoint to continue from, and what it says of itself; None to start afresh. "auto"
    takes the newest unfinished run of the same work (before all, of the same strategy), at its
    newest checkpoint that can be read; what it passes over is a warning, and why it finds none a
    note. Raises UserError where the run is going on or has files on other nodes, and where one that
    is named is missing, damaged, without its run's record, or of another work."""
    resume = plan.config.resume
    if resume is None:
        return None
    if resume == AUTO:
        return _newest(plan, notes)
    checkpoint = named_checkpoint(resume)
    meta = read_meta(checkpoint)
    longer = _typed_longer(meta, plan)
    if differences := _differences(meta, plan, longer):
        fix = f"set these back, or start a new run from its weights: {_start_from(checkpoint)}"
        if "global_batch_size" in differences:
            fix += "; global_batch_size is batch_size x grad_accum_steps x processes"
        raise UserError(f"resume={shown(resume)} is of another run", differences, fix)
    check_files(checkpoint, meta, plan)
    run = state_of(checkpoint, meta)
    run_dir = checkpoint.parents[1]
    claims.refuse_held(run_dir)
    fix = f"start a new run from its weights: {_start_from(checkpoint)}"
    require_writable(run_dir, fix, RECORD_FILE, claims.OWNER_FILE)
    for key in sorted(longer):
        change = f"{key} was {shown(meta.work.get(key))} and is {shown(plan.work[key])}"
        schedule = f"schedule of {plan.num_steps} steps" if plan.num_steps else "longer schedule"
        rate = f"the learning rate follows the {schedule} from there"
        notes.append(f"{change}: training continues after step {meta.step}, and {rate}")
    if run.status == "ok" and run.step > meta.step:
        steps = f"steps {meta.step + 1} to {run.step}"
        notes.append(f"{run_dir.name} has finished: its {steps} are done again")
    return checkpoint, meta


def _start_from(checkpoint: Path) -> str:
    """Return what to type for a new run that begins with a checkpoint's weights."""
    run_dir = os.path.relpath(checkpoint.parents[1])
    option = f"--weights {os.path.join(run_dir, LAST)}"
    return option if Path(run_dir, LAST).is_dir() else f"type export {run_dir}, then {option}"


def _newest(plan: Plan, notes: list[str]) -> tuple[Path, Meta] | None:
    claims.refuse_doubling(plan.output_dir, identity(plan))
    found = dict[Path, Meta]()
    obstacle = ""
    for checkpoint in sorted(plan.output_dir.glob(f"*/{CHECKPOINTS}/step-*"), reverse=True):
        run_dir = checkpoint.parents[1]
        if run_dir.is_symlink():  # latest
            continue
        why = "is damaged"
        with _passing_over(checkpoint):
            meta = read_meta(checkpoint)
            if differences := _differences(meta, plan):
                named = os.path.relpath(run_dir)
                why = f"is of other work: {differences}; to go on with that, --resume {named}"
            else:
                why = "has finished" if state_of(checkpoint, meta).status == "ok" else ""
            if not why:
                why = obstacle_to_writing(run_dir, RECORD_FILE, claims.OWNER_FILE)
        if why:
            obstacle = obstacle or f"{run_dir.name}, the newest with a checkpoint, {why}"
        elif not claims.is_locked(run_dir):
            found[checkpoint] = meta
    # Of the same strategy before others: runs that are compared go on each for itself.
    strategy = plan.strategy.name
    for checkpoint in sorted(found, key=lambda at: found[at].spread.get("strategy") != strategy):
        with _passing_over(checkpoint):
            check_files(checkpoint, found[checkpoint], plan)
            return checkpoint, found[checkpoint]
    if found:
        obstacle = "every checkpoint of this work is damaged"
    obstacle = obstacle or f"no run in {shown(str(plan.output_dir))} has a checkpoint"
    notes.append(f"resume=auto starts a new run: {obstacle}")
    return None


@contextlib.contextmanager
def _passing_over(checkpoint: Path) -> Iterator[None]:
    """Warn of what is wrong with a checkpoint, unless other nodes have what it lacks."""
    try:
        yield
    except ElsewhereError:
        raise
    except (UserError, OSError) as error:
        logger.warning("resume='auto' passes over %s: %s", checkpoint, error)


def state_of(checkpoint: Path, meta: Meta) -> Record:
    """Its run's record or, where that is damaged or gone, what the checkpoint has of it. Raises
    ElsewhereError where another node has the record."""
    run_dir = checkpoint.parents[1]
    if meta.hosts and not (run_dir / RECORD_FILE).is_file():
        what = f"{RECORD_FILE} of {run_dir} is not on {socket.gethostname()}"
        first = meta.hosts.get(file_of(0))
        raise ElsewhereError(what, f"the run's first node was {first}", TOGETHER)
    try:
        return load_record(run_dir)
    except UserError:
        if (checkpoint / RECORD_FILE).is_file():
            return load_record(checkpoint)
        raise


def identity(plan: Plan) -> dict[str, Any]:
    """What two runs have in common that must not go on at a time under `resume=auto`."""
    return {**plan.work, "strategy": plan.strategy.name}


def _typed_longer(meta: Meta, plan: Plan) -> set[str]:
    """Return the typed keys by which a run that is named is trained further than before."""
    keys = {key for key in ("max_steps", "epochs") if plan.requested.is_set(key)}
    keys = {key for key in keys if meta.work.get(key) != plan.work.get(key)}
    return keys if keys and (plan.num_steps is None or plan.num_steps > meta.step) else set()


def _differences(meta: Meta, plan: Plan, allowed: Collection[str] = ()) -> str:
    # A run of an earlier release did without the keys that have been added since.
    work = plan.work
    saved = {name: key.default for name, key in KEYS.items() if name in work} | meta.work
    before = meta.spread.get("strategy")
    now = plan.strategy.name
    found = list[str]()
    names = list(saved | work)
    if before != now and saved.keys() != work.keys():  # keys of an engine's own
        found = [f"strategy was {before} and is {now}, which computes something else"]
        names = [name for name in work if name in saved]
    names = [name for name in names if saved.get(name) != work.get(name) and name not in allowed]
    same = _same_contents(meta, plan) if names else set()
    names = [name for name in names if name not in same]
    # What follows from keys that were typed, as the number of samples from a text, is no news.
    asked = plan.requested
    typed = [name for name in names if asked.is_set(name)]
    if "global_batch_size" in names and asked.is_set("batch_size", "grad_accum_steps"):
        typed.append("global_batch_size")
    for key in typed or names:
        found.append(f"{key} was {shown(saved.get(key))} and is {shown(work.get(key))}")
    return "; ".join(found)


def _same_contents(meta: Meta, plan: Plan) -> set[str]:
    """Return the keys that name, elsewhere or in another spelling, the same texts, tokenizer,
    weights or model as in the run that saved the checkpoint."""
    same = {key for key, known in meta.sources.items() if plan.sources.get(key) == known}
    if meta.data_fingerprint and meta.data_fingerprint == plan.data_fingerprint:
        same |= {"dataset", "validation_dataset", "tokenizer"}
    return same
