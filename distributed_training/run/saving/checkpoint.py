"""Checkpoints: published whole, the last k kept, resumed under any layout. Training does not wait
until they are written.

    <run>/checkpoints/step-00000120/
        meta.json               step, the work, how it was spread, every file with its checksum
        rank-00000.safetensors  the part that a rank held of weights and moments, under the model's
                                names, and its random numbers' state
        copies-00001.safetensors  without a shared disk: what this node's ranks hold of that, too,
                                but ranks of other nodes write

Without a shared disk each node has the files of its own ranks, and meta.json.
The sampler needs no file: its position is the step. resume.py finds and checks checkpoints.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.engines.base import Engine
from distributed_training.parallel.agree import gather
from distributed_training.parallel.tensor_files import (
    HostMemory,
    Part,
    TensorFiles,
    bytes_to_copy,
    part_of,
    write_parts,
)
from distributed_training.plan.machine import available_ram_bytes
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology
from distributed_training.records.record import write_json
from distributed_training.run.saving import disks, resume
from distributed_training.settings.errors import UserError

ROOM = 1.3  # of what a copy takes, must be free


class Saver:
    """Saves a run while it trains on: from a copy in host memory, in a thread, one at a time."""

    def __init__(
        self, plan: Plan, topology: Topology, saved: Callable[[Path, dict[str, Any]], None]
    ) -> None:
        """`saved` is called with a checkpoint's folder and its row of the record's `saves`."""
        self.plan = plan
        self.topology = topology
        self.saved = saved
        self._group: dist.ProcessGroup | None = None  # the thread's own, for its exchanges
        self._memory: HostMemory | None = None
        # Where the state itself is in host memory, that may grow scarce.
        self._keeps = topology.device_type == "cuda" and not plan.strategy.steps_on_host
        self._ending: Future[Path] | None = None
        self._row: dict[str, Any] = {}

    def prepare(self, engine: Engine) -> None:
        """Begin to find memory, once all of the state is there, for the first save. Collective."""
        if self._keeps and self.plan.config.checkpoint_every != 0:
            self._find_memory(_parts_to_write(engine, self.plan, self.topology))

    def begin(self, engine: Engine, *, step: int, data_fingerprint: str) -> None:
        """Copy the state, which later steps change, and begin to write it, once what is being
        written has ended. Where memory is too small for a copy training waits. Collective."""
        self.finish()
        began = time.monotonic()
        writing = _make_folder(self.plan, self.topology, step)
        parts = _parts_to_write(engine, self.plan, self.topology)
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        self._find_memory(parts)
        if self._memory is not None:
            parts = self._memory.copy(parts)
        meta = _describe(engine, self.plan, step, data_fingerprint)
        self._row = {"step": step, "copied": (memory := self._memory) is not None}
        self._row["page_locked"] = bool(memory and memory.page_locked)
        ending = self._ending = Future()
        arguments = (parts, writing, meta, self.plan, self.topology, self._group)
        if self._memory is not None:
            threading.Thread(target=self._run, args=(ending, *arguments), daemon=True).start()
        else:
            self._run(ending, *arguments)
        self._row["stall_s"] = time.monotonic() - began

    def _find_memory(self, parts: list[Part]) -> None:
        """See to memory for a copy of them, where all ranks have room for theirs. Collective."""
        needed = bytes_to_copy(parts)
        held = self._memory
        if all(gather(held is not None and len(held.memory) >= needed)):
            return
        if held is not None:  # freed before more is asked for
            held.wait()
        self._memory = held = None
        if all(gather(_has_room(needed, self.plan))):
            self._memory = HostMemory(needed, self.topology.device if self._keeps else None)

    def under_way(self) -> bool:
        """Whether `finish` has something to do."""
        return self._ending is not None

    def has_ended(self) -> bool:
        """Whether `finish` will not wait."""
        return self._ending is not None and self._ending.done()

    def finish(self) -> None:
        """Wait until nothing is being written. Raises what failed on any rank, OSError for one."""
        if self._ending is None:
            return
        ending = self._ending
        self._ending = None
        began = time.monotonic()
        try:
            folder = ending.result()
        finally:
            if not self._keeps:
                self._memory = None
        self._row["stall_s"] += time.monotonic() - began
        self.saved(folder, self._row)

    def _run(self, ending: Future[Path], *arguments: Any) -> None:
        began = time.monotonic()
        try:
            folder, size = _write(*arguments)
        except BaseException as error:
            ending.set_exception(error)
        else:
            self._row |= {"write_s": time.monotonic() - began, "bytes": size}
            ending.set_result(folder)


def _leads(plan: Plan, topology: Topology) -> bool:
    """Whether this process makes and removes folders, on its node's disk or for all nodes."""
    return topology.local_rank == 0 if plan.own_disks else topology.rank == 0


def _make_folder(plan: Plan, topology: Topology, step: int) -> Path:
    """The folder to write a checkpoint into, on every disk that has its own. Collective."""
    parent = plan.run_dir / resume.CHECKPOINTS
    writing = parent / f".writing-{step:08d}"
    if _leads(plan, topology):
        for unfinished in parent.glob(".writing-*"):
            shutil.rmtree(unfinished)
        writing.mkdir(parents=True)
    dist.barrier()
    return writing


def _parts_to_write(engine: Engine, plan: Plan, topology: Topology) -> list[Part]:
    """What this rank writes of the state; what only its node needs once more has `writes` False.
    Collective."""
    parts = (*engine.state_parts(), *own_parts(engine, topology), *_random_numbers(topology))
    held = [part for part in parts if all(part.size)]
    copies = disks.copies_here(held, topology) if plan.own_disks else []
    return [part for part in held if part.writes] + copies


def _describe(engine: Engine, plan: Plan, step: int, data_fingerprint: str) -> resume.Meta:
    """What a checkpoint says about itself, but for its files."""
    return resume.Meta(
        step=step, work=plan.work, spread=plan.spread, data_fingerprint=data_fingerprint,
        counters=engine.counters(), files={}, checksums={},
    )  # fmt: skip


def _has_room(num_bytes: int, plan: Plan) -> bool:
    """Whether this machine's memory holds so many for each of its processes, and some more."""
    if plan.strategy.swaps_to_disk:  # memory is not there for it
        return False
    return ROOM * num_bytes * plan.processes_here < available_ram_bytes()


def _write(
    parts: list[Part],
    writing: Path,
    meta: resume.Meta,
    plan: Plan,
    topology: Topology,
    group: dist.ProcessGroup | None,
) -> tuple[Path, int]:
    """Write this rank's files; once all are on the disk publish them by one rename a disk, and
    delete all checkpoints but the last. (Folder, bytes of all files.) Collective in `group`."""
    written = _or_error(_write_files, writing, parts, topology.rank)
    ranks = _agree((socket.gethostname(), written), group)
    for host, found in ranks:
        for name, (size, checksum) in found.items():
            of = meta.copies if name.startswith("copies") else meta.files
            of[name] = size
            meta.checksums[name] = checksum
            if plan.own_disks:
                meta.hosts[name] = host
    leads = _leads(plan, topology)
    first = topology.rank == 0
    # Rank 0's node comes last and all nodes then drop older ones: what it has, all have.
    for turn in (leads and not first, first) if plan.own_disks else (first,):
        _agree(("", _or_error(_publish, writing, meta) if turn else None), group)
    _agree(("", _or_error(_remove_others, writing, meta, plan) if leads else None), group)
    return _final(writing, meta), sum(meta.files.values()) + sum(meta.copies.values())


def _write_files(writing: Path, parts: list[Part], rank: int) -> dict[str, tuple[int, int]]:
    """Of each file that this rank has written: its bytes and CRC-32."""
    own = [part for part in parts if part.writes]
    copies = [replace(part, writes=True) for part in parts if not part.writes]
    files = zip(resume.files_of(rank), (own, copies), strict=True)
    return {name: write_parts(writing / name, each) for name, each in files if each or each is own}


def _final(writing: Path, meta: resume.Meta) -> Path:
    return writing.with_name(f"step-{meta.step:08d}")


def _publish(writing: Path, meta: resume.Meta) -> None:
    final = _final(writing, meta)
    write_json(writing / resume.META_FILE, meta)
    _sync(writing / resume.META_FILE)
    _sync(writing)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(writing, final)
    _sync(final.parent)


def _remove_others(writing: Path, meta: resume.Meta, plan: Plan) -> None:
    # What is newer was damaged or passed over by whoever resumed here: this run does it again.
    final = _final(writing, meta)
    found = resume.list_checkpoints(plan.run_dir)
    kept = [other for other in found if other <= final][-plan.config.keep_checkpoints :]
    for other in set(found).difference(kept):
        shutil.rmtree(other)


def _or_error(do: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns or, most often on a full disk, the error that it raised."""
    try:
        return do(*arguments)
    except OSError as error:
        return error


def _agree(mine: tuple[str, Any], group: dist.ProcessGroup | None) -> list[tuple[str, Any]]:
    """Every rank's; raises the first error among them on all ranks. Collective in `group`."""
    host, found = mine
    failure = [found.errno, str(found.strerror or found)] if isinstance(found, OSError) else None
    ranks = gather((host, None if failure else found, failure), group)
    for _, _, failure in ranks:
        if failure:
            raise OSError(*failure)
    return [(host, found) for host, found, _ in ranks]


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
        ranks = plan.ranks_beside(topology.rank)
        names = resume.files_to_read(folder, meta, plan.spread, ranks)
        saved = TensorFiles(folder / name for name in names)
        engine.load(saved, meta.counters)
        if meta.spread == plan.spread:
            for part in _random_numbers(topology):
                part.set(saved.read(part))
            load_own(engine, saved, topology)
        else:  # other ranks draw other masks; never those of the run's first steps again
            seed_dropout(plan, topology, meta.step)
    except Exception as error:  # each library raises its own
        what = f"checkpoint {folder} cannot be loaded"
        first_line = str(error).partition("\n")[0]
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


def seed_dropout(plan: Plan, topology: Topology, step: int) -> None:
    """Start the random numbers of dropout, for a run that begins, or goes on, after `step`."""
    # Ranks that compute the same draw the same masks: those along tp without sequence parallelism,
    # outside of attention.
    alike = 1 if plan.config.sequence_parallel else topology.tp
    first = plan.config.seed + 1000 + step * topology.world_size
    torch.manual_seed(first + topology.rank // alike)


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
