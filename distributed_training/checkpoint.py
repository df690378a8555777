"""Checkpoints: published whole, the last k kept, resumed exactly.

    <run>/checkpoints/step-00000120/
        meta.json       step, what the run was, every file with its size
        rng-rank<r>.pt  random number generators of one rank
        ...             what the engine wrote

The sampler needs no file: its position is the step. Finding and checking a checkpoint imports
no torch, so that a wrong one is refused before processes start.
"""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.errors import UserError
from distributed_training.files import parse_json, shown, user_path
from distributed_training.record import RECORD_FILE, is_alive, load_record, write_json

if TYPE_CHECKING:
    from distributed_training.engines.base import Engine
    from distributed_training.topology import Topology

CHECKPOINTS = "checkpoints"
META_FILE = "meta.json"
META_TYPES = {"step": int, "identity": dict, "files": dict, "checksums": dict}
FORMAT = 2
CHECKED_BYTES = 16 * 2**20  # larger files are checked by size alone: reading them takes long
logger = logging.getLogger(__name__)


def save_checkpoint(
    engine: Engine,
    run_dir: Path,
    topology: Topology,
    *,
    step: int,
    keep: int,
    identity: Mapping[str, Any],
    data_fingerprint: str,
) -> Path:
    """Write a checkpoint aside, publish it by one rename, delete all but the last `keep` up to it.

    Collective. `identity` (strategy, world size, work) is compared when it is loaded.
    """
    import torch
    import torch.distributed as dist

    parent = run_dir / CHECKPOINTS
    writing, final = parent / f".writing-{step:08d}", parent / f"step-{step:08d}"
    if topology.rank == 0:
        for unfinished in parent.glob(".writing-*"):
            shutil.rmtree(unfinished)
        writing.mkdir(parents=True)
    dist.barrier()
    engine.save(writing)
    generators = {"cpu": torch.get_rng_state()}
    if topology.device_type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(topology.device)
    torch.save(generators, writing / f"rng-rank{topology.rank}.pt")
    dist.barrier()
    if topology.rank == 0:
        paths = [path for path in sorted(writing.rglob("*")) if path.is_file()]
        meta = {
            "format": FORMAT,
            "step": step,
            "identity": dict(identity),
            "data_fingerprint": data_fingerprint,
            "files": {str(path.relative_to(writing)): path.stat().st_size for path in paths},
            "checksums": {
                str(path.relative_to(writing)): zlib.crc32(path.read_bytes())
                for path in paths
                if path.stat().st_size <= CHECKED_BYTES
            },
        }
        write_json(writing / META_FILE, meta)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(writing, final)
        # What is newer was damaged or passed over by whoever resumed here: this run does it again.
        kept = [other for other in list_checkpoints(run_dir) if other <= final][-keep:]
        for other in list_checkpoints(run_dir):
            if other not in kept:
                shutil.rmtree(other)
    dist.barrier()
    return final


def load_checkpoint(engine: Engine, folder: Path, topology: Topology) -> int:
    """Restore engine and random number generators; return the step. Collective.

    Raises UserError when a file that is there cannot be read.
    """
    import torch
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    step = read_meta(folder)["step"]
    try:
        engine.load(folder)
        generators = torch.load(folder / f"rng-rank{topology.rank}.pt")
    except (Exception, CheckpointException) as error:  # each library raises its own
        raise UserError(
            f"checkpoint {folder} cannot be loaded",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "remove that folder to fall back to the one before, or set resume to None",
        ) from error
    torch.set_rng_state(generators["cpu"])
    if topology.device_type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"], topology.device)
    return int(step)


def check_same_data(folder: Path, data_fingerprint: str) -> None:
    """Raise UserError when a checkpoint was made on other tokens than the run would go on with."""
    if read_meta(folder).get("data_fingerprint") != data_fingerprint:
        raise UserError(
            f"the text is not what {folder} was trained on",
            "a file of the dataset has changed, or this is another Python's embedded corpus",
            "restore it, or set resume to None",
        )


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted((run_dir / CHECKPOINTS).glob("step-*"))


def read_meta(folder: Path) -> dict[str, Any]:
    """A checkpoint's meta.json, after checking that every file is there at its full size,
    and the small ones with their contents.

    Raises UserError for a folder that is no checkpoint, or a damaged one.
    """
    fix = "remove that folder to fall back to the one before, or set resume to None"
    try:
        meta = parse_json((folder / META_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        meta = None
    if not isinstance(meta, dict) or "format" not in meta:
        raise UserError(f"{folder} is not a checkpoint of this suite", fix=fix)
    if meta["format"] != FORMAT:
        raise UserError(f"{folder} has checkpoint format {shown(meta['format'])}", fix=fix)
    if {key: type(meta.get(key)) for key in META_TYPES} != META_TYPES:
        raise UserError(f"{folder} is not a checkpoint of this suite", fix=fix)
    for name, size in meta["files"].items():
        actual = _size(folder / name)
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes long instead of {shown(size)}"
            raise UserError(f"checkpoint {folder} is damaged", f"{name} is {state}", fix)
    for name, checksum in meta["checksums"].items():
        if name in meta["files"] and zlib.crc32((folder / name).read_bytes()) != checksum:
            raise UserError(f"checkpoint {folder} is damaged", f"{name} has other contents", fix)
    return meta


def _size(file: Path) -> int | None:
    """Bytes of a file; None when it is not to be had."""
    try:
        return file.stat().st_size
    except (OSError, ValueError):  # ValueError: no name of a file at all
        return None


def find_resume(
    resume: str | None, output_dir: Path, identity: Mapping[str, Any]
) -> tuple[Path, Path] | None:
    """(run folder, checkpoint) to continue from, or None to start afresh.

    "auto" takes the newest unfinished run of the same identity, at its newest checkpoint that can
    be read, and warns of what it passes over. A path names a run (its newest checkpoint) or a
    checkpoint; raises UserError when it is missing, damaged, without its run's record, or of
    another strategy, world size or work.
    """
    if resume is None:
        return None
    if resume != "auto":
        return _named_resume(resume, identity)
    for run_dir in sorted(output_dir.glob("*/"), reverse=True):
        try:
            checkpoint = _newest_checkpoint(run_dir, identity)
        except (UserError, OSError) as error:
            logger.warning("resume='auto' passes over %s: %s", run_dir, error)
            continue
        if checkpoint is not None:
            return run_dir, checkpoint
    return None


def _newest_checkpoint(run_dir: Path, identity: Mapping[str, Any]) -> Path | None:
    """The newest checkpoint that can be read of an unfinished run of this identity, if it is one
    (a run that is still going is not).

    Raises UserError when its record cannot be read.
    """
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints or not (run_dir / RECORD_FILE).is_file():
        return None
    record = load_record(run_dir)
    if record.get("status") == "ok" or is_alive(record):
        return None
    for checkpoint in reversed(checkpoints):
        try:
            meta = read_meta(checkpoint)
        except UserError as error:
            logger.warning("resume='auto' falls back to what is older: %s", error)
            continue
        return None if _differences(meta, identity) else checkpoint
    return None


def _named_resume(resume: str, identity: Mapping[str, Any]) -> tuple[Path, Path]:
    # Absolute, so that a checkpoint named from where one stands has the folders above it.
    folder = Path(os.path.abspath(user_path("resume", resume)))
    checkpoints = list_checkpoints(folder)
    checkpoint = checkpoints[-1] if checkpoints else folder
    if _size(checkpoint / META_FILE) is None:
        raise UserError(
            f"resume={shown(resume)} holds no checkpoint",
            fix="give a folder under runs/ with checkpoints/ in it, or auto, or None",
        )
    differences = _differences(read_meta(checkpoint), identity)
    if differences:
        raise UserError(
            f"resume={shown(resume)} is of another run",
            "; ".join(differences),
            "set these back, or start from its hf/ folder with weights=<run>/hf",
        )
    run_dir = checkpoint.parent.parent
    load_record(run_dir)  # what came before the checkpoint is needed, too
    return run_dir, checkpoint


def _differences(meta: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    saved = meta["identity"]
    return [
        f"{key} was {shown(saved.get(key))} and is {shown(identity.get(key))}"
        for key in dict.fromkeys([*saved, *identity])
        if saved.get(key) != identity.get(key)
    ]
