"""Which checkpoint a run goes on from; a wrong one is refused before processes start. No torch.

A checkpoint's files are described in run/checkpoint.py, which writes them.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from distributed_training.plan import claims
from distributed_training.records.record import is_alive, load_state
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown, user_path

CHECKPOINTS = "checkpoints"
META_FILE = "meta.json"
FORMAT = 3
INSTEAD = "remove that folder to fall back to the one before, or set resume to None"
logger = logging.getLogger(__name__)


class Meta(BaseModel, strict=True):
    """A checkpoint's meta.json."""

    format: int = FORMAT
    step: int
    identity: dict[str, Any]  # `Plan.identity` of the run that wrote it
    data_fingerprint: str = ""
    files: dict[str, int]  # name -> bytes
    checksums: dict[str, int]  # CRC-32 of the small ones


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted((run_dir / CHECKPOINTS).glob("step-*"))


def read_meta(folder: Path) -> Meta:
    """A checkpoint's meta.json, after checking that every file is there at its full size,
    and the small ones with their contents.

    Raises UserError for a folder that is no checkpoint, or a damaged one.
    """
    try:
        meta = Meta.model_validate_json((folder / META_FILE).read_bytes())
    except (OSError, ValueError):
        raise UserError(f"{folder} is not a checkpoint of this suite", fix=INSTEAD) from None
    if meta.format != FORMAT:
        raise UserError(f"{folder} has checkpoint format {meta.format}", fix=INSTEAD)
    for name, size in meta.files.items():
        file, checksum = folder / name, meta.checksums.get(name)
        if not file.is_file():
            why = f"{name} is missing"
        elif file.stat().st_size != size:
            why = f"{name} is {file.stat().st_size} bytes long instead of {size}"
        elif checksum is not None and zlib.crc32(file.read_bytes()) != checksum:
            why = f"{name} has other contents"
        else:
            continue
        raise UserError(f"checkpoint {folder} is damaged", why, INSTEAD)
    return meta


def find_resume(
    resume: str | None, output_dir: Path, identity: Mapping[str, Any]
) -> tuple[Path, Path] | None:
    """(run folder, checkpoint) to continue from, or None to start afresh.

    "auto" takes the newest unfinished run of the same identity, at its newest checkpoint that can
    be read, and warns of what it passes over. A path names a run (its newest checkpoint) or a
    checkpoint; raises UserError when it is missing, damaged, without its run's record, or of
    another strategy, world size or work. Either way raises UserError for a run that is going on.
    """
    if resume is None:
        return None
    if resume != "auto":
        folder = user_path("resume", resume).resolve()
        checkpoint = [folder, *list_checkpoints(folder)][-1]
        if not (checkpoint / META_FILE).is_file():
            fix = "give a folder under runs/ with checkpoints/ in it, or auto, or None"
            raise UserError(f"resume={shown(resume)} holds no checkpoint", fix=fix)
        if differences := _differences(checkpoint, identity):
            fix = "set these back, or start from its hf/ folder with weights=<run>/hf"
            raise UserError(f"resume={shown(resume)} is of another run", differences, fix)
        load_state(checkpoint.parents[1])  # the run goes on with its record
        claims.refuse_held(checkpoint.parents[1])
        return checkpoint.parents[1], checkpoint
    claims.refuse_doubling(output_dir, identity)
    for checkpoint in sorted(output_dir.glob(f"*/{CHECKPOINTS}/step-*"), reverse=True):
        if checkpoint.parents[1].is_symlink():  # latest
            continue
        try:
            state = load_state(checkpoint.parents[1])
            if state.status == "ok" or _differences(checkpoint, identity):
                continue
        except (UserError, OSError) as error:
            logger.warning("resume='auto' passes over %s: %s", checkpoint, error)
            continue
        if is_alive(state):  # as for some seconds after its launcher was killed
            raise claims.going_on(checkpoint.parents[1], state.pid, state.hostname)
        return checkpoint.parents[1], checkpoint
    return None


def _differences(checkpoint: Path, identity: Mapping[str, Any]) -> str:
    saved = read_meta(checkpoint).identity
    return "; ".join(
        f"{key} was {shown(saved.get(key))} and is {shown(identity.get(key))}"
        for key in {**saved, **identity}
        if saved.get(key) != identity.get(key)
    )
