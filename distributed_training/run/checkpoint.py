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
        checksums = {name: zlib.crc32((writing / name).read_bytes()) for name in small}
        meta = {
            "format": resume.FORMAT,
            "step": step,
            "identity": plan.identity,
            "data_fingerprint": data_fingerprint,
            "files": sizes,
            "checksums": checksums,
        }
        write_json(writing / resume.META_FILE, meta)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(writing, final)
        # What is newer was damaged or passed over by whoever resumed here: this run does it again.
        found = resume.list_checkpoints(plan.run_dir)
        kept = [other for other in found if other <= final][-plan.config.keep_checkpoints :]
        for other in set(found).difference(kept):
            shutil.rmtree(other)
    dist.barrier()
    return final


def load_checkpoint(engine: Engine, folder: Path, topology: Topology) -> int:
    """Restore engine and random numbers; return the step. Raises UserError. Collective."""
    step = resume.read_meta(folder).step
    try:
        engine.load(folder)
        generators = torch.load(folder / f"rng-rank{topology.rank}.pt")
    except (Exception, CheckpointException) as error:  # each library raises its own
        raise UserError(
            f"checkpoint {folder} cannot be loaded",
            f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            "remove that folder to fall back to the one before, or set resume to None",
        ) from error
    torch.set_rng_state(generators["cpu"])
    if topology.device_type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"], topology.device)
    return step
