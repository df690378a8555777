"""What lies in a run's folder beside its record: the checkpoints. No torch."""

import shutil
from pathlib import Path

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

CHECKPOINTS = "checkpoints"

META_FILE = "meta.json"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted((run_dir / CHECKPOINTS).glob("step-*"))


def remove_unfinished(run_dir: Path) -> None:
    """What was being written; published checkpoints and exports stay."""
    for folder in (run_dir, run_dir / CHECKPOINTS):
        for unfinished in folder.glob(".writing-*"):
            shutil.rmtree(unfinished, ignore_errors=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """A run's newest checkpoint, or the folder itself if it is one."""
    checkpoint = [folder, *list_checkpoints(folder)][-1]
    return checkpoint if (checkpoint / META_FILE).is_file() else None


def named_checkpoint(resume: str) -> Path:
    """The checkpoint that the key's value names; UserError where there is none."""
    checkpoint = newest_checkpoint(Path(resume).resolve())
    if checkpoint is None:
        fix = "give a folder under runs/ with checkpoints/ in it, or auto, or None"
        raise UserError(f"resume={shown(resume)} holds no checkpoint", fix=fix)
    return checkpoint
