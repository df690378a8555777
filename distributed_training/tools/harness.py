"""Many runs in one process group, one after the other.

    with open_group() as group:
        for name, found in each_run(group, {"dp": {...}, "fsdp": {...}}, train_a_little):
            ...

Starting processes takes longer than the few steps that a comparison or a test needs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distributed_training.data.samples import Data, Sampler, StepBatch
from distributed_training.engines.base import Engine
from distributed_training.models import ModelSpec
from distributed_training.models.decoder import Decoder
from distributed_training.parallel.agree import from_rank_0, gather
from distributed_training.plan.data import load_plan_data
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology, p2p_channels, process_group
from distributed_training.run import assemble, launch, rendezvous, worker
from distributed_training.run.process import Process, current_process, single_process
from distributed_training.settings.config import RENDEZVOUS_S, build_config
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import strategy_defaults, strategy_options


class KeptTopology(Topology):
    """The next run with the same mesh has its communicators again."""

    build_mesh = functools.cache(Topology.build_mesh)
    new_pipeline_group = functools.cache(Topology.new_pipeline_group)


@functools.lru_cache(maxsize=1)
def _draw(model: ModelSpec, dropout: float, seed: int) -> Decoder:
    """Initial weights, which take long to draw."""
    return model.build(dropout=dropout, seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The processes that all runs share."""

    process: Process
    device: torch.device
    folder: Path  # of all ranks and runs, so that a text is tokenised once; removed at the end
    keep: bool  # communicators and initial weights, from one run to the next


@dataclass(kw_only=True, slots=True)
class Run:
    """The parts of one run on this rank."""

    plan: Plan
    topology: Topology
    data: Data
    sampler: Sampler
    engine: Engine

    def batch(self, step: int) -> StepBatch:
        """This rank's samples of one step."""
        return self.sampler.step_batch(self.data.train, step)


@contextlib.contextmanager
def open_group(
    runs: Mapping[str, Mapping[str, Any]] | None = None, *, keep: bool = False
) -> Iterator[Group]:
    """Join the process group that the launcher describes (a group of one without a launcher), with
    as many of NCCL's channels for messages as trainings of `runs` have, or as it likes. `keep`:
    runs share communicators and initial weights, which take long to make."""
    process = current_process(os.environ) or single_process()
    launch.prepare_environment(process.local_world_size)
    device = worker.prepare(torch.cuda.device_count(), process)
    store = rendezvous.meet(process, RENDEZVOUS_S)
    compressions = [run.get("gradient_compression", "none") for run in (runs or {}).values()]
    channels = p2p_channels(*compressions) if runs else None
    # Three minutes: another rank may have failed.
    with process_group(device, store, minutes=3, p2p_channels=channels):
        folder = Path(from_rank_0(tempfile.mkdtemp() if process.rank == 0 else None))
        try:
            yield Group(process=process, device=device, folder=folder, keep=keep)
        finally:
            KeptTopology.build_mesh.cache_clear()
            KeptTopology.new_pipeline_group.cache_clear()
            if process.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)


def each_run(
    group: Group,
    runs: Mapping[str, Mapping[str, Any]],
    use: Callable[[Run], Any],
    *,
    deadline_s: float = float("inf"),
) -> Iterator[tuple[str, list[Any] | str]]:
    """Build each run from its CONFIG values, call `use`, free its memory; yield the name and what
    `use` returned, by rank (JSON can say it), or why the run was refused.

    After `deadline_s` no further run starts, on any rank. A failure ends the process: other ranks
    wait in a collective that cannot complete, and NCCL would wait for them. Collective.
    """
    began = time.monotonic()
    for name, values in runs.items():
        if from_rank_0(time.monotonic() - began > deadline_s):
            return
        try:
            found = _do_run(values, group, use)
        except BaseException:
            print(f"{name}: rank {group.process.rank} failed", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            shutil.rmtree(group.folder, ignore_errors=True)
            os._exit(1)
        torch.compiler.reset()  # a few variants of a block exhaust the limit of recompilations
        gc.collect()
        if group.device.type == "cuda":
            torch.cuda.empty_cache()
        yield name, found


def every_run(
    group: Group,
    runs: Mapping[str, Mapping[str, Any]],
    use: Callable[[Run], Any],
    *,
    deadline_s: float = float("inf"),
) -> Iterator[tuple[str, list[Any]]]:
    """As `each_run`, where none may be refused: the reason ends the process. Collective."""
    for name, ranks in each_run(group, runs, use, deadline_s=deadline_s):
        if isinstance(ranks, str):
            raise SystemExit(f"{name}: {ranks}")
        yield name, ranks


def _do_run(values: Mapping[str, Any], group: Group, use: Callable[[Run], Any]) -> list[Any] | str:
    """Plan, data, sampler and engine as a training builds them, then `use`. Collective."""
    values = {"output_dir": str(group.folder), **values}
    try:
        config = build_config(values, defaults=strategy_defaults, options=strategy_options)
        plan = worker.agree_on_plan(config, group.process)
        topology = assemble.build_topology(plan, group.process, group.device)
        model = None
        if group.keep:
            topology = KeptTopology(**dataclasses.asdict(topology))
            model = copy.deepcopy(_draw(plan.model, plan.config.dropout, plan.config.seed))
        data, _ = load_plan_data(plan)
        sampler = assemble.build_sampler(plan, data, topology)
        engine = assemble.build_engine(plan, topology, model)
        run = Run(plan=plan, topology=topology, data=data, sampler=sampler, engine=engine)
    except UserError as error:  # on every rank
        return str(error)
    mine = use(run)
    run.engine.close()  # `use` may have put another one there
    return gather(mine)
