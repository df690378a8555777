"""Which checkpoint a run goes on from; a wrong one is refused before processes start. No torch.

A checkpoint's files are described in run/checkpoint.py, which writes them.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed_training.records.record import RECORD_FILE, is_alive, load_state
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown, user_path

CHECKPOINTS = "checkpoints"
META_FILE = "meta.json"
META_TYPES = {"step": int, "identity": dict, "files": dict, "checksums": dict}
FORMAT = 3
logger = logging.getLogger(__name__)


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
    what, why = f"{folder} is not a checkpoint of this suite", ""
    meta = _parse_meta(folder)
    if meta.get("format", FORMAT) != FORMAT:
        what = f"{folder} has checkpoint format {shown(meta['format'])}"
    elif {key: type(meta.get(key)) for key in META_TYPES} == META_TYPES:
        what, why = f"checkpoint {folder} is damaged", _damage(folder, meta)
        if not why:
            return meta
    fix = "remove that folder to fall back to the one before, or set resume to None"
    raise UserError(what, why, fix)


def _parse_meta(folder: Path) -> dict[str, Any]:
    """What meta.json holds; {} where that is not an object."""
    try:
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


def _damage(folder: Path, meta: Mapping[str, Any]) -> str:
    for name, size in meta["files"].items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        actual = file.stat().st_size
        if actual != size:
            return f"{name} is {actual} bytes long instead of {shown(size)}"
        checksum = meta["checksums"].get(name)
        if checksum is not None and zlib.crc32(file.read_bytes()) != checksum:
            return f"{name} has other contents"
    return ""


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
            if list_checkpoints(run_dir) and (run_dir / RECORD_FILE).is_file():
                state = load_state(run_dir)
                if state.status != "ok" and not is_alive(state):
                    checkpoint = _newest_readable(run_dir, identity)
                    if checkpoint is not None:
                        return run_dir, checkpoint
        except (UserError, OSError) as error:
            logger.warning("resume='auto' passes over %s: %s", run_dir, error)
    return None


def _newest_readable(run_dir: Path, identity: Mapping[str, Any]) -> Path | None:
    """The newest checkpoint that can be read, if it is of this identity."""
    for checkpoint in reversed(list_checkpoints(run_dir)):
        try:
            return None if _differences(read_meta(checkpoint), identity) else checkpoint
        except UserError as error:
            logger.warning("resume='auto' falls back to what is older: %s", error)
    return None


def _named_resume(resume: str, identity: Mapping[str, Any]) -> tuple[Path, Path]:
    # Absolute, so that a checkpoint named from where one stands has the folders above it.
    folder = Path(os.path.abspath(user_path("resume", resume)))
    checkpoint = [folder, *list_checkpoints(folder)][-1]
    if not (checkpoint / META_FILE).is_file():
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
    load_state(run_dir)  # the run goes on with its record
    return run_dir, checkpoint


def _differences(meta: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    saved = meta["identity"]
    return [
        f"{key} was {shown(saved.get(key))} and is {shown(identity.get(key))}"
        for key in {**saved, **identity}
        if saved.get(key) != identity.get(key)
    ]
