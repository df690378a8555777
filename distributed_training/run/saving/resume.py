"""Which checkpoint a run goes on from; a wrong one is refused before processes start. No torch.

A checkpoint's files are described in checkpoint.py, which writes them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from distributed_training.records.record import RECORD_FILE, RunState, is_alive, load_state
from distributed_training.run.saving import claims
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown, user_path

CHECKPOINTS = "checkpoints"
META_FILE = "meta.json"
FORMAT = 4
INSTEAD = "remove that folder to fall back to the one before, or set resume to None"
CHUNK_BYTES = 16 * 2**20
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
    step: int
    work: dict[str, Any]  # `Plan.work` of the run that wrote it
    spread: dict[str, Any]  # `Plan.spread`
    data_fingerprint: str = ""
    counters: dict[str, float]  # of the engine (engines/base.py)
    files: dict[str, int]  # name -> bytes
    checksums: dict[str, int]  # CRC-32 of each, and of copies
    # Without a shared disk: what a node reads of other nodes' files under the same layout, once
    # more in files of its own, and the host that has each file.
    copies: dict[str, int] = {}
    hosts: dict[str, str] = {}


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted((run_dir / CHECKPOINTS).glob("step-*"))


def read_meta(folder: Path) -> Meta:
    """A checkpoint's meta.json; raises UserError for a folder that is no checkpoint."""
    try:
        text = (folder / META_FILE).read_bytes()
        form = json.loads(text).get("format")
        if isinstance(form, int) and form != FORMAT:
            age = "an earlier" if form < FORMAT else "a later"
            what = f"checkpoint {folder} is of {age} release (format {form} instead of {FORMAT})"
            raise UserError(what, fix="start from its run's hf/ with weights=<run>/hf, or afresh")
        return Meta.model_validate_json(text)
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder} is not a checkpoint of this suite", fix=INSTEAD) from None


def files_of(rank: int) -> tuple[str, str]:
    """Names of what a process writes: its file, and that of the copies for its node."""
    return f"rank-{rank:05d}.safetensors", f"copies-{rank:05d}.safetensors"


def files_to_read(
    folder: Path, meta: Meta, spread: Mapping[str, Any], ranks: Iterable[int] | None
) -> list[str]:
    """All files of a checkpoint; where it lies on several disks, those of the processes `ranks`
    suffice them under the same layout. `ranks`: of this node, None where a disk is shared.

    Raises ElsewhereError where other hosts have what is needed.
    """
    names = list(meta.files)
    absent = _absent(folder, [*names, META_FILE])
    if absent and ranks is not None and meta.spread == spread:
        known = {**meta.files, **meta.copies}
        names = [name for rank in ranks for name in files_of(rank) if name in known]
        absent = _absent(folder, [*names, META_FILE])
    if absent and meta.hosts:
        hosts = sorted({meta.hosts[name] for name in absent if name in meta.hosts})
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        missing = f"{', '.join(absent[:3])}{more}"
        what = f"checkpoint {folder} is not whole on {socket.gethostname()}; it lacks {missing}"
        why = f"written on {', '.join(hosts)}, without a shared disk" if hosts else ""
        raise ElsewhereError(what, why, TOGETHER)
    return names


def _absent(folder: Path, names: Iterable[str]) -> list[str]:
    return [name for name in names if not (folder / name).is_file()]


def check_files(folder: Path, meta: Meta, names: Sequence[str] | None = None) -> None:
    """Raise UserError unless these files of a checkpoint (None: all but copies) are there with all
    their bytes as written."""
    names = list(meta.files if names is None else names)
    sizes = {**meta.files, **meta.copies}
    for name in names:
        file = folder / name
        size = sizes[name]
        why = ""
        if not file.is_file():
            why = f"{name} is missing"
        elif file.stat().st_size != size:
            why = f"{name} is {file.stat().st_size} bytes long instead of {size}"
        if why:
            raise UserError(f"checkpoint {folder} is damaged", why, INSTEAD)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _checksum(folder / name), names)
        for name, checksum in zip(names, found, strict=True):
            if checksum != meta.checksums.get(name):
                why = f"{name} has other contents than were written"
                raise UserError(f"checkpoint {folder} is damaged", why, INSTEAD)


def _checksum(file: Path) -> int:
    checksum = 0
    chunk = bytearray(CHUNK_BYTES)
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(chunk):
            checksum = zlib.crc32(memoryview(chunk)[:count], checksum)
    return checksum


def newest_checkpoint(folder: Path) -> Path | None:
    """A run's newest checkpoint, or the folder itself if it is one."""
    checkpoint = [folder, *list_checkpoints(folder)][-1]
    return checkpoint if (checkpoint / META_FILE).is_file() else None


def find_resume(
    resume: str | None,
    output_dir: Path,
    work: Mapping[str, Any],
    spread: Mapping[str, Any],
    ranks: Iterable[int] | None = None,
) -> tuple[Path, Path] | None:
    """(run folder, checkpoint) to continue from, or None to start afresh.

    "auto" takes the newest unfinished run of the same work (before all, of the same strategy), at
    its newest checkpoint that can be read, and warns of what it passes over. A path names a run
    (its newest checkpoint) or a checkpoint; raises UserError when it is missing, damaged, without
    its run's record, or of another work. Strategy and processes may be others: `describe_change`.
    Either way raises UserError for a run that is going on, or whose files are on other nodes
    (`ranks` as in `files_to_read`).
    """
    if resume is None:
        return None
    if resume == "auto":
        return _newest(output_dir, work, spread, ranks)
    return _named(resume, work, spread, ranks)


def _named(
    resume: str, work: Mapping[str, Any], spread: Mapping[str, Any], ranks: Iterable[int] | None
) -> tuple[Path, Path]:
    folder = user_path("resume", resume).resolve()
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        fix = "give a folder under runs/ with checkpoints/ in it, or auto, or None"
        raise UserError(f"resume={shown(resume)} holds no checkpoint", fix=fix)
    meta = read_meta(checkpoint)
    if differences := _differences(meta, work):
        fix = "set these back, or start from its hf/ folder with weights=<run>/hf"
        if "global_batch_size" in differences:
            fix += "; global_batch_size is batch_size x grad_accum_steps x processes"
        raise UserError(f"resume={shown(resume)} is of another run", differences, fix)
    check_files(checkpoint, meta, files_to_read(checkpoint, meta, spread, ranks))
    _load_state(checkpoint, meta)  # the run goes on with its record
    claims.refuse_held(checkpoint.parents[1])
    return checkpoint.parents[1], checkpoint


def _newest(
    output_dir: Path,
    work: Mapping[str, Any],
    spread: Mapping[str, Any],
    ranks: Iterable[int] | None,
) -> tuple[Path, Path] | None:
    claims.refuse_doubling(output_dir, identity(work, spread))
    same = list[tuple[Path, Meta]]()
    others = list[tuple[Path, Meta]]()
    for checkpoint in sorted(output_dir.glob(f"*/{CHECKPOINTS}/step-*"), reverse=True):
        run_dir = checkpoint.parents[1]
        if run_dir.is_symlink():  # latest
            continue
        try:
            meta = read_meta(checkpoint)
            if _differences(meta, work) or (state := _load_state(checkpoint, meta)).status == "ok":
                continue
        except ElsewhereError:
            raise
        except (UserError, OSError) as error:
            _warn(checkpoint, error)
            continue
        alike = meta.spread.get("strategy") == spread["strategy"]
        if not is_alive(state):
            (same if alike else others).append((checkpoint, meta))
        elif alike:  # as for some seconds after its launcher was killed
            raise claims.going_on(run_dir, state.pid, state.hostname)
    # Of the same strategy before others: runs that are compared go on each for itself.
    for checkpoint, meta in [*same, *others]:
        try:
            check_files(checkpoint, meta, files_to_read(checkpoint, meta, spread, ranks))
            return checkpoint.parents[1], checkpoint
        except ElsewhereError:
            raise
        except (UserError, OSError) as error:
            _warn(checkpoint, error)
    return None


def _load_state(checkpoint: Path, meta: Meta) -> RunState:
    run_dir = checkpoint.parents[1]
    host = socket.gethostname()
    if meta.hosts and not (run_dir / RECORD_FILE).is_file():
        what = f"{RECORD_FILE} of {run_dir} is not on {host}"
        first = meta.hosts[files_of(0)[0]]
        raise ElsewhereError(what, f"the run's first node was {first}", TOGETHER)
    return load_state(run_dir)


def _warn(checkpoint: Path, error: Exception) -> None:
    logger.warning("resume='auto' passes over %s: %s", checkpoint, error)


def identity(work: Mapping[str, Any], spread: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs have in common that must not go on at a time under `resume=auto`."""
    return {**work, "strategy": spread["strategy"]}


def describe_change(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """ "saved zero2 x 8 -> resuming fsdp x 4: resharding", or None where the layout is the same."""
    if saved == now:
        return None
    names = [f"{spread['strategy']} x {spread['num_processes']}" for spread in (saved, now)]
    if names[0] == names[1]:
        key = next(key for key in saved if saved[key] != now.get(key))
        names = [f"{names[0]} ({key} {spread.get(key)})" for spread in (saved, now)]
    return f"saved {names[0]} -> resuming {names[1]}: resharding"


def _differences(meta: Meta, work: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{key} was {shown(meta.work.get(key))} and is {shown(work.get(key))}"
        for key in {**meta.work, **work}
        if meta.work.get(key) != work.get(key)
    )
