"""Find checkpoints in a run's folder. This module does not import torch."""

import shutil
from pathlib import Path

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

CHECKPOINTS = "checkpoints"
META_FILE = "meta.json"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted((run_dir / CHECKPOINTS).glob("step-*"))


def remove_unfinished(run_dir: Path) -> None:
    """Remove checkpoints and exports that were incomplete when a process died."""
    for folder in (run_dir, run_dir / CHECKPOINTS):
        for unfinished in folder.glob(".writing-*"):
            shutil.rmtree(unfinished, ignore_errors=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a run's folder, or `folder` itself if it is a checkpoint.
    Return None if there is none."""
    checkpoint = [folder, *list_checkpoints(folder)][-1]
    return checkpoint if (checkpoint / META_FILE).is_file() else None


def named_checkpoint(resume: str) -> Path:
    """Return the checkpoint that the key `resume` names. Raises UserError if there is none."""
    checkpoint = newest_checkpoint(Path(resume).resolve())
    if checkpoint is None:
        fix = "set resume to a folder under runs/ that has checkpoints/, to auto, or to None"
        raise UserError(f"resume={shown(resume)} is not a folder with a checkpoint", fix=fix)
    return checkpoint
