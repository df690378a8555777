"""Find checkpoints in a run's folder. This module does not import torch."""

import contextlib
import glob
import os
import re
import shutil
from pathlib import Path

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import REPLACED, restore_replaced, shown

CHECKPOINTS = "checkpoints"
META_FILE = "meta.json"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints, oldest first. Other files and folders, such as a user's copy of a
    checkpoint, are ignored."""
    return sorted(
        folder
        for folder in (run_dir / CHECKPOINTS).glob("step-*")
        if re.fullmatch(r"step-\d{8,}", folder.name) and os.path.isdir(folder)
    )


def remove_unfinished(run_dir: Path) -> None:
    """Remove checkpoints and exports that were incomplete when a process died, and restore those
    that it was replacing."""
    for folder in (run_dir, run_dir / CHECKPOINTS):
        for replaced in folder.glob(f"{REPLACED}*"):
            restore_replaced(folder / replaced.name.removeprefix(REPLACED))
        for unfinished in folder.glob(".writing-*"):
            shutil.rmtree(unfinished, ignore_errors=True)


def stamp_unfinished(run_dir: Path) -> set[tuple[int, int, int]]:
    """Return values that change while checkpoints and exports are being written."""
    stamps = set()
    for folder in (run_dir, run_dir / CHECKPOINTS):
        # Unlike pathlib's, this function ignores folders that are published meanwhile.
        for name in glob.glob(".writing-*/*", root_dir=folder):
            with contextlib.suppress(FileNotFoundError):
                status = (folder / name).lstat()
                stamps.add((status.st_ino, status.st_size, status.st_mtime_ns))
    return stamps


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a run's folder, or `folder` itself if it is a checkpoint.
    Return None if there is no checkpoint. The checkpoint may be damaged."""
    if checkpoints := list_checkpoints(folder):
        return checkpoints[-1]
    return folder if (folder / META_FILE).is_file() else None


def named_checkpoint(resume: str) -> Path:
    """Return the newest checkpoint in the folder `resume`, or the folder itself if it is a
    checkpoint. Raises UserError if there is no checkpoint."""
    checkpoint = newest_checkpoint(Path(resume).resolve())
    if checkpoint is None:
        fix = "set resume to the folder of a run that has checkpoints/, to auto, or to None"
        raise UserError(f"resume={shown(resume)} is not a folder with a checkpoint", fix=fix)
    return checkpoint
