"""Checkpoints: published whole, the last k kept, resumed exactly.

    <run>/checkpoints/step-00000120/
        meta.json       step, what the run was, every file with its size
        rng-rank<r>.pt  random number generators of one rank
        ...             what the engine wrote

The sampler needs no file: its position is the step. Finding and checking a checkpoint imports
no torch, so that a wrong one is refused before processes start.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.errors import UserError
from distributed_training.record import RECORD_FILE, load_record, write_json

if TYPE_CHECKING:
    from distributed_training.engines.base import Engine
    from distributed_training.topology import Topology

CHECKPOINTS = "checkpoints"
FORMAT = 1


def save_checkpoint(
    engine: Engine,
    run_dir: Path,
    topology: Topology,
    *,
    step: int,
    keep: int,
    identity: Mapping[str, Any],
) -> Path:
    """Write a checkpoint aside, publish it by one rename, delete all but the last `keep`.

    Collective. `identity` (strategy, world size, work) is compared when it is loaded.
    """
    import torch
    import torch.distributed as dist

    parent = run_dir / CHECKPOINTS
    writing, final = parent / f".writing-{step:08d}", parent / f"step-{step:08d}"
    if topology.rank == 0:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    dist.barrier()
    engine.save(writing)
    generators = {"cpu": torch.get_rng_state()}
    if topology.device_type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(topology.device)
    torch.save(generators, writing / f"rng-rank{topology.rank}.pt")
    dist.barrier()
    if topology.rank == 0:
        files = {
            str(path.relative_to(writing)): path.stat().st_size
            for path in sorted(writing.rglob("*"))
            if path.is_file()
        }
        meta = {"format": FORMAT, "step": step, "identity": dict(identity), "files": files}
        write_json(writing / "meta.json", meta)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(writing, final)
        for old in list_checkpoints(run_dir)[:-keep]:
            shutil.rmtree(old)
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
    except (Exception, CheckpointException) as error:  # torch, DCP and DeepSpeed each raise their own
        raise UserError(
            f"checkpoint {folder} cannot be loaded",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "remove that folder to fall back to the one before, or set resume to None",
        ) from error
    torch.set_rng_state(generators["cpu"])
    if topology.device_type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"], topology.device)
    return int(step)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted((run_dir / CHECKPOINTS).glob("step-*"))


def read_meta(folder: Path) -> dict[str, Any]:
    """A checkpoint's meta.json, after checking that every file is there at its full size.

    Raises UserError for a folder that is no checkpoint, or a damaged one.
    """
    file = folder / "meta.json"
    fix = "remove that folder to fall back to the one before, or set resume to None"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        step, files, _ = meta["step"], dict(meta["files"]), dict(meta["identity"])
        known = meta["format"] == FORMAT and isinstance(step, int)
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder} is not a checkpoint of this suite", fix=fix) from None
    if not known:
        raise UserError(f"{folder} has checkpoint format {meta['format']}", fix=fix)
    for name, size in files.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes long instead of {size}"
            raise UserError(f"checkpoint {folder} is damaged", f"{name} is {state}", fix)
    return dict(meta)


def find_resume(
    resume: str | None, output_dir: Path, identity: Mapping[str, Any]
) -> tuple[Path, Path] | None:
    """(run folder, checkpoint) to continue from, or None to start afresh.

    "auto" takes the newest unfinished run of the same identity; a path names a run (its newest
    checkpoint) or a checkpoint. Raises UserError when a named one is missing, damaged or of
    another strategy, world size or work.
    """
    if resume is None:
        return None
    if resume == "auto":
        for run_dir in sorted(output_dir.glob("*/"), reverse=True):
            if (run_dir / RECORD_FILE).is_file() and list_checkpoints(run_dir):
                checkpoint = list_checkpoints(run_dir)[-1]
                unfinished = load_record(run_dir)["status"] != "ok"
                if unfinished and not _differences(read_meta(checkpoint), identity):
                    return run_dir, checkpoint
        return None
    folder = Path(resume).expanduser()
    checkpoints = list_checkpoints(folder)
    checkpoint = checkpoints[-1] if checkpoints else folder
    if not folder.is_dir() or not (checkpoint / "meta.json").is_file():
        raise UserError(
            f"resume={resume!r} holds no checkpoint",
            fix="give a folder under runs/ with checkpoints/ in it, or auto, or None",
        )
    differences = _differences(read_meta(checkpoint), identity)
    if differences:
        raise UserError(
            f"resume={resume!r} is of another run",
            "; ".join(differences),
            "set these back, or start from its hf/ folder with weights=<run>/hf",
        )
    return checkpoint.parent.parent, checkpoint


def _differences(meta: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    saved = meta["identity"]
    return [
        f"{key} was {saved.get(key)!r} and is {identity.get(key)!r}"
        for key in dict.fromkeys([*saved, *identity])
        if saved.get(key) != identity.get(key)
    ]
