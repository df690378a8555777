"""Checkpoints: published whole, the last k kept, resumed exactly.

    <run>/checkpoints/step-00000120/
        meta.json       step, what the run was, every file with its size
        rng-rank<r>.pt  random number generators of one rank
        ...             what the engine wrote

The sampler needs no file: its position is the step. plan/resume.py finds and checks checkpoints.
"""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

from distributed_training.engines.base import Engine
from distributed_training.plan import resume
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology
from distributed_training.records.record import write_json
from distributed_training.settings.errors import UserError

CHECKED_BYTES = 16 * 2**20  # larger files are checked by size alone: reading them takes long


def save_checkpoint(
    engine: Engine, plan: Plan, topology: Topology, *, step: int, data_fingerprint: str
) -> Path:
    """Write a checkpoint aside, publish it by one rename, delete all but the last. Collective."""
    parent = plan.run_dir / resume.CHECKPOINTS
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
        files = [path for path in sorted(writing.rglob("*")) if path.is_file()]
        sizes = {str(path.relative_to(writing)): path.stat().st_size for path in files}
        small = [name for name, size in sizes.items() if size <= CHECKED_BYTES]
        sums = {name: zlib.crc32((writing / name).read_bytes()) for name in small}
        run = dict[str, Any](step=step, identity=plan.identity, data_fingerprint=data_fingerprint)
        write_json(writing / resume.META_FILE, resume.Meta(**run, files=sizes, checksums=sums))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(writing, final)
        # What is newer was damaged or passed over by whoever resumed here: this run does it again.
        found = resume.list_checkpoints(plan.run_dir)
        kept = [other for other in found if other <= final][-plan.config.keep_checkpoints :]
        for other in set(found).difference(kept):
            shutil.rmtree(other)
    dist.barrier()
    return final


def load_checkpoint(
    engine: Engine, folder: Path, topology: Topology, *, data_fingerprint: str
) -> int:
    """Restore engine and random numbers; return the step. Raises UserError, also for a checkpoint
    that was made on other tokens than the run would go on with. Collective."""
    meta = resume.read_meta(folder)
    if meta.data_fingerprint != data_fingerprint:
        what = f"the text is not what {folder} was trained on"
        why = "a file of the dataset has changed, or this is another Python's embedded corpus"
        raise UserError(what, why, "restore it, or set resume to None")
    try:
        engine.load(folder)
        generators = torch.load(folder / f"rng-rank{topology.rank}.pt")
    except (Exception, CheckpointException) as error:  # each library raises its own
        what, first_line = f"checkpoint {folder} cannot be loaded", str(error).partition("\n")[0]
        raise UserError(what, f"{type(error).__name__}: {first_line}", resume.INSTEAD) from error
    torch.set_rng_state(generators["cpu"])
    if topology.device_type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"], topology.device)
    return meta.step
