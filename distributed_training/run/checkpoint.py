"""Checkpoints: published whole, the last k kept, resumed under any layout.

    <run>/checkpoints/step-00000120/
        meta.json               step, the work, how it was spread, every file with its checksum
        rank-00000.safetensors  the part that a rank held of weights and moments, under the model's
                                names, and its random numbers' state

The sampler needs no file: its position is the step. plan/resume.py finds and checks checkpoints.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.engines.base import Engine
from distributed_training.parallel.tensor_files import (
    SUFFIX,
    Part,
    TensorFiles,
    part_of,
    write_parts,
)
from distributed_training.plan import resume
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology
from distributed_training.records.record import write_json
from distributed_training.run import assemble
from distributed_training.settings.errors import UserError


def save_checkpoint(
    engine: Engine, plan: Plan, topology: Topology, *, step: int, data_fingerprint: str
) -> Path:
    """Write a checkpoint aside, publish it by one rename once it is on the disk, delete all but the
    last. Collective."""
    parent = plan.run_dir / resume.CHECKPOINTS
    writing, final = parent / f".writing-{step:08d}", parent / f"step-{step:08d}"
    if topology.rank == 0:
        for unfinished in parent.glob(".writing-*"):
            shutil.rmtree(unfinished)
        writing.mkdir(parents=True)
    dist.barrier()
    name = f"rank-{topology.rank:05d}{SUFFIX}"
    parts = [*engine.state_parts(), *own_parts(engine, topology), *_random_numbers(topology)]
    written: Any
    try:
        written = write_parts(writing / name, parts)
    except OSError as error:  # a full disk, most often: all ranks end with what the first one met
        written = error
    files = dict(assemble.gather((name, written)))
    for found in files.values():
        if isinstance(found, OSError):
            raise found
    if topology.rank == 0:
        meta = resume.Meta(
            step=step,
            work=plan.work,
            spread=plan.spread,
            data_fingerprint=data_fingerprint,
            counters=engine.counters(),
            files={file: size for file, (size, _) in files.items()},
            checksums={file: checksum for file, (_, checksum) in files.items()},
        )
        write_json(writing / resume.META_FILE, meta)
        _sync(writing / resume.META_FILE)
        _sync(writing)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(writing, final)
        _sync(parent)
        # What is newer was damaged or passed over by whoever resumed here: this run does it again.
        found = resume.list_checkpoints(plan.run_dir)
        kept = [other for other in found if other <= final][-plan.config.keep_checkpoints :]
        for other in set(found).difference(kept):
            shutil.rmtree(other)
    dist.barrier()
    return final


def load_checkpoint(
    engine: Engine, plan: Plan, topology: Topology, *, data_fingerprint: str
) -> int:
    """Restore engine and random numbers from the plan's checkpoint; return the step. Raises
    UserError, also for one that was made on other tokens than the run would go on with. Collective.
    """
    folder = plan.checkpoint
    assert folder is not None
    meta = resume.read_meta(folder)
    if meta.data_fingerprint != data_fingerprint:
        what = f"the text is not what {folder} was trained on"
        why = "a file of the dataset has changed, or this is another Python's embedded corpus"
        raise UserError(what, why, "restore it, or set resume to None")
    try:
        saved = TensorFiles(folder / name for name in meta.files)
        engine.load(saved, meta.counters)
        if meta.spread == plan.spread:
            for part in _random_numbers(topology):
                part.set(saved.read(part))
            load_own(engine, saved, topology)
        else:  # other ranks draw other masks; never those of the run's first steps again
            assemble.seed_dropout(plan, topology, meta.step)
    except Exception as error:  # each library raises its own
        what, first_line = f"checkpoint {folder} cannot be loaded", str(error).partition("\n")[0]
        raise UserError(what, f"{type(error).__name__}: {first_line}", resume.INSTEAD) from error
    return meta.step


def own_parts(engine: Engine, topology: Topology) -> Iterator[Part]:
    """This rank's own state."""
    for name, tensor in engine.own_state().items():
        yield part_of(f"own/{topology.rank}/{name}", tensor, tensor.shape, (0,) * tensor.dim())


def load_own(engine: Engine, saved: TensorFiles, topology: Topology) -> None:
    """Restore this rank's own state."""
    own = f"own/{topology.rank}/"
    names = [name for name in saved.stored if name.startswith(own)]
    engine.load_own({name.removeprefix(own): saved.whole(name) for name in names})


def _random_numbers(topology: Topology) -> Iterator[Part]:
    """The states of this rank's generators."""
    states = {"cpu": (torch.get_rng_state(), torch.set_rng_state)}
    if topology.device_type == "cuda":
        states["cuda"] = (torch.cuda.get_rng_state(), torch.cuda.set_rng_state)
    for device, (state, restore) in states.items():
        name = f"random/{device}/{topology.rank}"
        yield replace(part_of(name, state, state.shape, (0,)), set=restore)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
