"""Perform many training runs in one process group, one after another.

    with open_group() as group:
        for name, results in each_run(group, {"dp": {...}, "fsdp": {...}}, train_a_little):
            ...

Sharing a group saves time, because starting processes takes longer than the few training steps of a
comparison or test."""

import contextlib
import dataclasses
import functools
import gc
import os
import shutil
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distributed_training.data.samples import Data, Sampler, StepBatch
from distributed_training.engines.base import Engine
from distributed_training.parallel.agree import broadcast_from_rank_0, gather
from distributed_training.parallel.mesh import Topology, process_group, set_nccl_variables
from distributed_training.plan.plan import Plan
from distributed_training.plan.samples import load_data
from distributed_training.settings.config import RENDEZVOUS_S, Request
from distributed_training.settings.errors import UserError, print_stderr
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import MESH_AXES, load_strategy
from distributed_training.start import launch, worker
from distributed_training.start.launched import agree_on_plan
from distributed_training.start.ranks import current_process, single_process
from distributed_training.supervise.process import Process
from distributed_training.train.reference import add_reference
from distributed_training.train.run import build_engine, build_sampler, build_topology


@dataclass(kw_only=True, slots=True)
class Run:
    """The objects that make up one training run on this rank."""

    plan: Plan
    topology: Topology
    data: Data
    sampler: Sampler
    engine: Engine

    def batch(self, step: int) -> StepBatch:
        """Return this rank's samples for one step."""
        return self.sampler.step_batch(self.data.train, step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Process group that all runs share, and this process's rank in it."""

    process: Process
    device: torch.device
    # Folder shared by all ranks and runs, so that each dataset is tokenized only once. The folder
    # is removed at the end.
    folder: Path


@contextlib.contextmanager
def open_group() -> Iterator[Group]:
    """Join the process group that the launcher describes, and create a temporary folder that all
    ranks share. Without a launcher, the group contains only this process."""
    process = current_process() or single_process()
    launch.prepare_environment(process.local_world_size)
    device = worker.prepare_device(torch.cuda.device_count(), process)
    store = worker.open_store(process, RENDEZVOUS_S)
    # The limit is only three minutes, because another rank may have failed.
    with process_group(device, store, timeout_s=180):
        rank = process.rank
        folder = Path(broadcast_from_rank_0(tempfile.mkdtemp() if rank == 0 else None))
        try:
            yield Group(process=process, device=device, folder=folder)
        finally:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)


def open_group_for(runs: Mapping[str, Mapping[str, Any]]) -> AbstractContextManager[Group]:
    """Set NCCL's environment variables for these `runs`, and return the result of
    `open_group()`."""
    for run in runs.values():  # plans may have keys that are not CONFIG's
        mesh_keys = {key: run[key] for key in ("strategy", *MESH_AXES) if key in run}
        strategy = load_strategy(build_config(mesh_keys))
        set_nccl_variables(has_pipeline=strategy.mesh["pp"] != 1)
    return open_group()


class CachedTopology(Topology):
    """Topology that creates each communicator only once."""

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        return Topology.build_mesh(self)

    @functools.cached_property
    def _pipeline_group(self) -> dist.ProcessGroup:
        return Topology.new_pipeline_group(self)

    def build_mesh(self) -> DeviceMesh:
        return self._mesh

    def new_pipeline_group(self) -> dist.ProcessGroup:
        return self._pipeline_group


class RunCache:
    """Cache of communicators by mesh, which are slow to create and which runs share."""

    def __init__(self) -> None:
        self._topologies: dict[Topology, CachedTopology] = {}

    def topology(self, topology: Topology) -> Topology:
        """Return a topology that equals `topology`. Calls with equal topologies return the same
        object, so its communicators are reused."""
        if topology not in self._topologies:
            self._topologies[topology] = CachedTopology(**dataclasses.asdict(topology))
        return self._topologies[topology]


def each_run(
    group: Group,
    runs: Mapping[str, Mapping[str, Any] | Request],
    use: Callable[[Run], Any],
    *,
    deadline_s: float = float("inf"),
    run_cache: RunCache | None = None,
) -> Iterator[tuple[str, list[Any] | str]]:
    """Build each run, call `use` with it, free its memory, and yield its name and results.

    A run is defined by some CONFIG values or by a complete CONFIG. The results are a list of the
    values that `use` returned, one per rank, or the error message if the run is rejected. The
    values must be JSON-serializable. After `deadline_s` seconds, no further run starts on any rank.
    `run_cache` holds objects that runs share. If a run fails, this process exits, because the other
    ranks wait in a collective that cannot complete. All ranks must iterate over this
    generator."""
    start = time.monotonic()
    for name, values in runs.items():
        if broadcast_from_rank_0(time.monotonic() - start > deadline_s):
            return
        try:
            results = _do_run(values, group, use, run_cache)
        except BaseException:
            print_stderr(f"{name}: rank {group.process.rank} failed")
            traceback.print_exc()
            sys.stderr.flush()
            shutil.rmtree(group.folder, ignore_errors=True)
            os._exit(1)
        torch.compiler.reset()  # Otherwise, a few runs would reach the recompilation limit.
        gc.collect()
        if group.device.type == "cuda":
            torch.cuda.empty_cache()
        yield name, results


def each_accepted_run(
    group: Group, runs: Mapping[str, Mapping[str, Any]], use: Callable[[Run], Any]
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the results of `each_run`, but exit if a run is rejected. All ranks must iterate over
    this generator."""
    for name, results in each_run(group, runs, use):
        if isinstance(results, str):
            raise SystemExit(f"{name}: {results}")
        yield name, results


def _do_run(
    values: Mapping[str, Any] | Request,
    group: Group,
    use: Callable[[Run], Any],
    run_cache: RunCache | None,
) -> list[Any] | str:
    """Build the plan, data, sampler and engine as in a training run, then call `use`. Return a
    list of the values that `use` returned, one per rank. If the run is rejected, return the error
    message. All ranks must call this function."""
    try:
        if isinstance(values, Request):
            config = values
        else:
            settings = {"output_dir": str(group.folder), **values}
            config = build_config(settings)
        plan = agree_on_plan(config, group.process, gather)
        topology = build_topology(plan, group.process, group.device)
        if run_cache is not None:
            topology = run_cache.topology(topology)
        data = load_data(plan)
        sampler = build_sampler(plan, data, topology)
        engine = build_engine(plan, topology)
        if plan.config.has_reference:
            data = add_reference(data, engine, sampler, group.folder / f"{uuid.uuid4()}.json")
        run = Run(plan=plan, topology=topology, data=data, sampler=sampler, engine=engine)
    except UserError as error:  # every rank raises it
        return str(error)
    result = use(run)
    run.engine.close()  # not the variable `engine`, because `use` may have replaced the engine
    return gather(result)
