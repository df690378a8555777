"""Save checkpoints in the background while training continues, and load them under any layout.

    <run>/checkpoints/step-00000120/
        meta.json               step, work, layout, checksums of all files
        rank-00000.safetensors  one rank's shards of weights and Adam moments, named as in the
                                model, and that rank's random number generator states

A checkpoint appears under its final name only when it is complete. Only the last `keep_checkpoints`
checkpoints are kept. Without a shared disk, each node stores meta.json and the files of that node's
ranks, which contain every shard that the node's ranks hold. The sampler needs no file, because the
step number determines its position. resume.py finds and checks checkpoints."""

import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.checkpoint import resume
from distributed_training.data.samples import Data
from distributed_training.engines.base import Engine
from distributed_training.parallel.agree import DAY_S, gather, raise_on_all_ranks
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.tensor_files import (
    HostMemory,
    Part,
    TensorFiles,
    build_part,
    bytes_to_copy,
    write_parts,
)
from distributed_training.plan.plan import Plan
from distributed_training.records.folder import (
    CHECKPOINTS,
    META_FILE,
    list_checkpoints,
    remove_unfinished,
)
from distributed_training.records.record import write_json
from distributed_training.settings.detect import available_ram_bytes
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import publish
from distributed_training.supervise import claims

MEMORY_MARGIN = 1.3  # free memory that a copy requires, relative to the size of the copy


class Saver:
    """Background writer of checkpoints. If the host has enough free memory, the state is first
    copied to host memory, and a thread writes the copy while training continues. Only one save runs
    at a time."""

    def __init__(self, plan: Plan, topology: Topology) -> None:
        self.plan = plan
        self.topology = topology
        self.memory: HostMemory | None = None  # memory for the copy; None if the copy does not fit
        # Keep the memory between saves, unless the training state itself is in host memory.
        self._keeps_memory = topology.device_type == "cuda" and not plan.strategy.steps_on_host
        # One rank per disk creates and removes folders.
        self._is_disk_leader = topology.rank == plan.ranks_on_disk(topology.rank)[0]
        self._group: Any = None  # for collectives of the writing thread
        self._pool = ThreadPoolExecutor(1)
        self.pending_write: Future[Path] | None = None  # the current save; None between saves
        self._save_row: dict[str, Any] = {}

    def begin(self, engine: Engine, *, step: int, data_fingerprint: str) -> None:
        """Start writing the state to disk. The previous save must have finished. If all hosts have
        enough free memory, a copy is written while training continues. Otherwise, the state itself
        is written, and training must wait for `finish`. All ranks must call this method."""
        start = time.monotonic()
        partial_folder = self.plan.run_dir / CHECKPOINTS / f".writing-{step:08d}"
        if self._is_disk_leader:
            remove_unfinished(self.plan.run_dir)
            # If a user has removed the run's folder, mkdir fails instead of creating it again.
            partial_folder.parent.mkdir(exist_ok=True)
            partial_folder.mkdir()
        dist.barrier()
        parts = self._parts_to_write(engine)
        if self._group is None:
            # A disk may be slow. `wait_for_disk` in train/loop.py finds a writer that hangs.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DAY_S))
        self._allocate_memory(parts)
        if self.memory is not None:
            parts = self.memory.copy(parts)
        meta = resume.Meta(
            step=step,
            attempt_id=self.plan.attempt_id,
            work=self.plan.work,
            spread=self.plan.layout_fingerprint,
            data_fingerprint=data_fingerprint,
            base_fingerprint=engine.base_fingerprint,
            counters=engine.counters(),
            files={},
            checksums={},
        )
        self._save_row = {"step": step, "copied": self.memory is not None}
        self.pending_write = self._pool.submit(self._write, partial_folder, parts, meta)
        self._save_row["stall_s"] = time.monotonic() - start

    def _parts_to_write(self, engine: Engine) -> list[Part]:
        """Return the shards of the state that this rank writes."""
        parts = (*engine.state_parts(), *rank_local_parts(engine, self.topology))
        return [part for part in parts if part.written_here and all(part.size)]

    def _allocate_memory(self, parts: list[Part]) -> None:
        """Ensure that `memory` can hold a copy of `parts`. If any rank lacks free memory, set
        `memory` to None. All ranks must call this method."""
        needed_bytes = bytes_to_copy(parts)
        is_enough = self.memory is not None and len(self.memory.memory) >= needed_bytes
        if all(gather(is_enough)):
            return
        self.memory = None  # free the old memory before allocating more
        fits = available_ram_bytes() > MEMORY_MARGIN * needed_bytes * self.plan.processes_here
        # A strategy that swaps to disk leaves no free memory.
        if all(gather(fits and not self.plan.strategy.swaps_to_disk)):
            gpu = self.topology.device if self._keeps_memory else None
            self.memory = HostMemory(needed_bytes, gpu)

    def finish(
        self, wait: Callable[[Future[Path]], object] = Future.exception
    ) -> tuple[Path, dict[str, Any]]:
        """Wait for the current save with `wait`. Return the folder of the checkpoint and the
        statistics of the save, which the run's record stores in `saves`. If any rank fails, for
        example with OSError, the error is raised on all ranks. Raises FloatingPointError, without
        saving, if the state is not finite."""
        assert self.pending_write is not None
        start = time.monotonic()
        try:
            wait(self.pending_write)
            folder = self.pending_write.result()
        finally:
            self.pending_write = None
            if not self._keeps_memory:
                self.memory = None
        self._save_row["stall_s"] += time.monotonic() - start
        return folder, self._save_row

    def _write(self, partial_folder: Path, parts: list[Part], meta: resume.Meta) -> Path:
        """Write this rank's file. When the files of all ranks are on disk, publish them with one
        rename per disk, and delete old checkpoints. Return the new checkpoint's folder. The writing
        threads of all ranks must call this method."""
        start = time.monotonic()
        is_rank_0 = self.topology.rank == 0
        final_folder = partial_folder.with_name(f"step-{meta.step:08d}")
        file = partial_folder / resume.rank_file_name(self.topology.rank)
        gather_values = partial(gather, group=self._group)
        with raise_on_all_ranks(gather_values):
            file_info = (socket.gethostname(), *write_parts(file, parts))
            if is_rank_0:
                claims.check(self.plan.run_dir, self.plan.run_id)
        for rank, (host, size, checksum) in enumerate(gather_values(file_info)):
            name = resume.rank_file_name(rank)
            meta.files[name] = size
            meta.checksums[name] = checksum
            if self.plan.has_node_local_files:
                meta.hosts[name] = host
        # Rank 0 publishes last, so that every checkpoint on rank 0's node also exists on all other
        # nodes.
        for has_turn in (not is_rank_0, is_rank_0):
            with raise_on_all_ranks(gather_values):
                if self._is_disk_leader and has_turn:
                    write_json(partial_folder / META_FILE, meta.model_dump())
                    publish(partial_folder, final_folder)
        # Also delete newer checkpoints. They were damaged or not chosen when this run was resumed,
        # and this run repeats their steps.
        with raise_on_all_ranks(gather_values):
            checkpoints = list_checkpoints(self.plan.run_dir) if self._is_disk_leader else []
            older = [checkpoint for checkpoint in checkpoints if checkpoint <= final_folder]
            kept = older[-self.plan.config.keep_checkpoints :]
            for checkpoint in set(checkpoints) - set(kept):
                # A process that dies meanwhile leaves no half of a checkpoint under this name.
                unfinished = checkpoint.with_name(f".writing-{checkpoint.name}")
                shutil.rmtree(checkpoint.rename(unfinished))
        self._save_row |= {"write_s": time.monotonic() - start, "bytes": sum(meta.files.values())}
        return final_folder


def load_checkpoint(
    folder: Path, engine: Engine, plan: Plan, topology: Topology, data: Data
) -> int:
    """Restore the engine from a checkpoint and return the checkpoint's step. If the layout is
    unchanged, also restore the random number generators; otherwise seed them. Raises UserError if
    the checkpoint's run used different tokens or base weights. All ranks must call this
    function."""
    meta = resume.read_meta(folder)
    if meta.data_fingerprint != data.fingerprint:
        what = f"The dataset differs from the one used to train {folder}"
        why = "its files, or the Python version with the embedded corpus, have changed"
        raise UserError(what, why, "restore the dataset, or set resume to None")
    if meta.base_fingerprint != engine.base_fingerprint and (
        plan.config.lora_rank or resume.changed_keys(meta, plan) & {"model", "weights"}
    ):
        what = f"The run of {folder} did not start from the weights {plan.config.weights}"
        why = "these weights have other values"
        raise UserError(what, why, "set model to the folder of its weights, or resume to None")
    names = resume.files_to_read(folder, meta, plan, topology.rank)
    saved = TensorFiles(folder / name for name in names)
    engine.load(saved, meta.counters)
    if meta.spread == plan.layout_fingerprint:
        load_rank_local_parts(engine, saved, topology)
    # Under another layout, seed dropout so that the run draws masks that it has not drawn before.
    else:
        seed_dropout(plan, topology, meta.step)
    return meta.step


def rank_local_parts(engine: Engine, topology: Topology) -> list[Part]:
    """Return the state that only this rank has: engine-private tensors and the states of the random
    number generators."""
    rank = topology.rank
    tensors = {f"own/{rank}/{name}": tensor for name, tensor in engine.local_state().items()}
    tensors[f"random/cpu/{rank}"] = torch.get_rng_state()
    if topology.device_type == "cuda":
        tensors[f"random/cuda/{rank}"] = torch.cuda.get_rng_state()
    return [
        build_part(name, tensor, tensor.shape, (0,) * tensor.dim())
        for name, tensor in tensors.items()
    ]


def load_rank_local_parts(engine: Engine, saved: TensorFiles, topology: Topology) -> None:
    """Restore random number generators and engine-private state in place."""
    torch.set_rng_state(saved.read_whole(f"random/cpu/{topology.rank}"))
    if topology.device_type == "cuda":
        torch.cuda.set_rng_state(saved.read_whole(f"random/cuda/{topology.rank}"))
    prefix = f"own/{topology.rank}/"
    state = {}
    for name in saved.stored_parts:
        if name.startswith(prefix):
            state[name.removeprefix(prefix)] = saved.read_whole(name)
    engine.load_local_state(state)


def seed_dropout(plan: Plan, topology: Topology, step: int) -> None:
    """Seed the random number generators that dropout uses. `step` is the step from which the run
    resumes, or 0 for a new run."""
    first_seed = plan.config.seed + 1000 + step * topology.world_size
    torch.manual_seed(first_seed + topology.rank)
