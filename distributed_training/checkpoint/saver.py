"""Checkpoints: published whole, the last k kept, resumed under any layout. Training does not wait
until they are written.

    <run>/checkpoints/step-00000120/
        meta.json               step, the work, how it was spread, checksums of itself and others
        record.json             the run's record as it was then
        rank-00000.safetensors  the part that a rank held of weights and moments, under the model's
                                names, and its random numbers' state

Without a shared disk each node has the files of its own ranks, and meta.json. What its ranks hold
but those of other nodes write is in them, too, under COPY and its name: the node reads that.
The sampler needs no file: its position is the step. resume.py finds and checks checkpoints."""

import shutil
import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.checkpoint import resume
from distributed_training.engines.base import Engine
from distributed_training.parallel.agree import failing_together, gather
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.tensor_files import (
    COPY,
    HostMemory,
    Part,
    TensorFiles,
    bytes_to_copy,
    part_of,
    write_parts,
)
from distributed_training.plan.plan import Plan
from distributed_training.records.folder import list_checkpoints, name_of, remove_unfinished
from distributed_training.records.record import RECORD_FILE
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import publish, remove_folder
from distributed_training.settings.machine import available_ram_bytes
from distributed_training.supervise import claims

ROOM = 1.3  # of what a copy takes, must be free


class Saver:
    """Saves a run while it trains on: from a copy in host memory, in a thread, one at a time."""

    def __init__(self, plan: Plan, topology: Topology) -> None:
        self.plan = plan
        self.topology = topology
        self.memory: HostMemory | None = None  # of the copy; None: there was no room
        self.step = 0  # of the last save
        self._copies: list[Part] = []  # in that memory
        # Where the state itself is in host memory, that may grow scarce.
        self._keeps = topology.device_type == "cuda" and not plan.strategy.steps_on_host
        # Who makes and removes folders, on a node's disk or for all nodes.
        self._leads = (topology.local_rank if plan.own_disks else topology.rank) == 0
        self._group: dist.ProcessGroup | None = None  # the thread's own, for its exchanges
        self._pool = ThreadPoolExecutor(1)
        self.thread = self._pool.submit(threading.get_ident).result()  # that writes
        self.ending: Future[Path] | None = None  # of what is being written, for `finish`
        self._row: dict[str, Any] = {}

    def prepare(self, engine: Engine) -> None:
        """Begin to find memory, once all of the state is there, for the first save. Collective."""
        if self._keeps and self.plan.config.checkpoint_every not in (0, "signal"):
            self._find_memory(self._parts_to_write(engine))

    def begin(self, engine: Engine, *, step: int, data_fingerprint: str) -> None:
        """Begin to write the state, where nothing else is being written: a copy, which later steps
        do not change; or itself, without `memory` for one: training waits then. Collective."""
        began = time.monotonic()
        self.step = step
        writing = self.plan.run_dir / resume.CHECKPOINTS / f".writing-{step:08d}"
        if self._leads:
            remove_unfinished(self.plan.run_dir)
            writing.mkdir(parents=True)
        dist.barrier()
        parts = self._parts_to_write(engine)
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        self._copies = []  # of an earlier step, whose memory they would keep
        self._find_memory(parts)
        if self.memory is not None:
            parts = self._copies = self.memory.copy(parts)
        meta = resume.Meta(
            step=step, work=self.plan.work, spread=self.plan.spread,
            data_fingerprint=data_fingerprint, base_fingerprint=engine.base_fingerprint,
            counters=engine.counters(), files={}, checksums={},
            sources=self.plan.sources,
        )  # fmt: skip
        self._row = {"step": step, "copied": self.memory is not None}
        self.ending = self._pool.submit(self._write, writing, parts, meta)
        self._row["stall_s"] = time.monotonic() - began

    def _parts_to_write(self, engine: Engine) -> list[Part]:
        """What this rank writes of the state. Collective."""
        parts = (*engine.state_parts(), *own_parts(engine, self.topology))
        held = [part for part in parts if all(part.size)]
        copies = _copies_here(held, self.topology) if self.plan.own_disks else []
        return [part for part in held if part.writes] + copies

    def _find_memory(self, parts: list[Part]) -> None:
        """See to memory for a copy of them, where all ranks have room for theirs. Collective."""
        needed = bytes_to_copy(parts)
        if all(gather(self.memory is not None and len(self.memory.memory) >= needed)):
            return
        if self.memory is not None:  # freed before more is asked for
            self.memory.finding.join()
            self.memory = None
        room = available_ram_bytes() > ROOM * needed * self.plan.processes_here
        # What swaps to the disk has no memory for it.
        if all(gather(room and not self.plan.strategy.swaps_to_disk)):
            self.memory = HostMemory(needed, self.topology.device if self._keeps else None)

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        """All weights after `step`, under the model's names, from the copy in host memory; nothing
        where that does not hold them."""
        if self.step != step or self.topology.world_size > 1:
            return {}
        found = [part for part in self._copies if part.name.startswith("weight/")]
        return {part.name.removeprefix("weight/"): part.get().view(part.shape) for part in found}

    def finish(self) -> tuple[Path, dict[str, Any]]:
        """Wait for what is being written: the checkpoint, and its row of the record's `saves`.
        Raises what failed on any rank: OSError, say, or FloatingPointError where the state is not
        finite and so was not saved."""
        assert self.ending is not None
        began = time.monotonic()
        try:
            folder = self.ending.result()
        finally:
            self.ending = None
            if not self._keeps:
                self.memory = None
        self._row["stall_s"] += time.monotonic() - began
        return folder, self._row

    def _write(self, writing: Path, parts: list[Part], meta: resume.Meta) -> Path:
        """Write this rank's files; once all are on the disk publish them by one rename a disk, and
        delete all checkpoints but the last. The new one. Collective in the thread's group."""
        began = time.monotonic()
        first = self.topology.rank == 0
        final = writing.with_name(name_of(meta.step))
        own = writing / resume.file_of(self.topology.rank)
        with failing_together(self._group):
            mine = (socket.gethostname(), *write_parts(own, parts))
        for rank, (host, size, checksum) in enumerate(gather(mine, self._group)):
            name = resume.file_of(rank)
            meta.files[name] = size
            meta.checksums[name] = checksum
            if self.plan.own_disks:
                meta.hosts[name] = host
        # Rank 0's node comes last and all nodes then drop older ones: what it has, all have.
        for its_turn in (not first, first):
            with failing_together(self._group):
                if self._leads and its_turn:
                    _publish(writing, final, meta)
        # What is newer was damaged or passed over by whoever resumed here: this run does it again.
        with failing_together(self._group):
            found = list_checkpoints(self.plan.run_dir) if self._leads else []
            older = [other for other in found if other <= final]
            for other in set(found).difference(older[-self.plan.config.keep_checkpoints :]):
                remove_folder(other)
        self._row |= {"write_s": time.monotonic() - began, "bytes": sum(meta.files.values())}
        return final


def _publish(writing: Path, final: Path, meta: resume.Meta) -> None:
    run_dir = final.parents[1]
    claims.renew(run_dir)  # raises where it is not this run's any more
    record = run_dir / RECORD_FILE
    if record.is_file():  # on rank 0's disk
        shutil.copy(record, writing)
    resume.write_meta(writing, meta)
    publish(writing, final)


def load_checkpoint(
    folder: Path, engine: Engine, plan: Plan, topology: Topology, data_fingerprint: str
) -> int:
    """Restore engine and random numbers from a checkpoint; return the step. Raises UserError, also
    for one that was made on other tokens than the run would go on with. Collective."""
    meta = resume.read_meta(folder)
    if meta.data_fingerprint != data_fingerprint:
        what = f"the text is not what {folder} was trained on"
        why = "a file of the dataset has changed, or this is another Python's embedded corpus"
        raise UserError(what, why, "restore it, or set resume to None")
    if meta.base_fingerprint != engine.base_fingerprint:
        what = f"the adapters of {folder} do not belong to the weights {plan.config.weights}"
        raise UserError(what, "these have changed", "restore them, or set resume to None")
    try:
        names = resume.files_to_read(folder, meta, plan, topology.rank)
        saved = TensorFiles(folder / name for name in names)
        engine.load(saved, meta.counters)
        if meta.spread == plan.spread:
            load_own(engine, saved, topology)
        else:  # other ranks draw other masks; never those of the run's first steps again
            seed_dropout(plan, topology, meta.step)
    except Exception as error:  # each library raises its own
        what = f"checkpoint {folder} cannot be loaded"
        first_line = str(error).partition("\n")[0]
        raise UserError(what, f"{type(error).__name__}: {first_line}", resume.INSTEAD) from error
    return meta.step


def _copies_here(held: Iterable[Part], topology: Topology) -> list[Part]:
    """This rank's share of what the ranks of its node hold and none of them writes, to be written
    under other names. Collective."""
    own: dict[str, Part] = {}
    for part in held:  # both ends of a V hold the tied embedding
        key = f"{part.name} {part.start} {part.size}"
        own[key] = part if part.writes else own.get(key, part)
    node = topology.rank - topology.local_rank
    ranks = gather((node, {key: part.writes for key, part in own.items()}))
    here = {rank: found for rank, (its, found) in enumerate(ranks) if its == node}
    written = {key for found in here.values() for key, writes in found.items() if writes}
    lacking = dict.fromkeys(key for found in here.values() for key in found if key not in written)
    mine = []
    for number, key in enumerate(lacking):
        holders = [rank for rank, found in here.items() if key in found]
        if holders[number % len(holders)] == topology.rank:
            mine.append(replace(own[key], name=COPY + own[key].name, writes=True))
    return mine


def own_parts(engine: Engine, topology: Topology) -> list[Part]:
    """What only this rank has: its random numbers' state, and what its engine keeps to itself."""
    rank = topology.rank
    own = {f"own/{rank}/{name}": tensor for name, tensor in engine.own_state().items()}
    own[f"random/cpu/{rank}"] = torch.get_rng_state()
    if topology.device_type == "cuda":
        own[f"random/cuda/{rank}"] = torch.cuda.get_rng_state()
    return [part_of(name, each, each.shape, (0,) * each.dim()) for name, each in own.items()]


def load_own(engine: Engine, saved: TensorFiles, topology: Topology) -> None:
    """The same, into where it was."""
    torch.set_rng_state(saved.whole(f"random/cpu/{topology.rank}"))
    if topology.device_type == "cuda":
        torch.cuda.set_rng_state(saved.whole(f"random/cuda/{topology.rank}"))
    own = f"own/{topology.rank}/"
    names = [name for name in saved.stored if name.startswith(own)]
    engine.load_own({name.removeprefix(own): saved.whole(name) for name in names})


def seed_dropout(plan: Plan, topology: Topology, step: int) -> None:
    """Start the random numbers of dropout, for a run that begins, or goes on, after `step`."""
    # Ranks that compute the same draw the same masks: those along tp without sequence parallelism,
    # outside of attention.
    alike = 1 if plan.config.sequence_parallel else topology.tp
    torch.manual_seed(plan.config.seed + 1000 + step * topology.world_size + topology.rank // alike)
