"""The parts of a run, on every rank: its samples, its random numbers, its engine."""

from __future__ import annotations

import itertools
import socket
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.data.sampler import Sampler
from distributed_training.data.samples import Data
from distributed_training.engines.base import COMPUTE_DTYPES, Engine
from distributed_training.plan.extensions import needed_extensions
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology
from distributed_training.records.display import Display
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError


def check_ranks_agree(data: Data, topology: Topology) -> None:
    """Machines may hold other files under the same name, or another Python, whose sources are the
    embedded corpus: ranks would train on different texts and nothing would show it. Collective.

    Raises UserError, the same on every rank.
    """
    mine = {"torch": torch.__version__, "training data": data.fingerprint}
    ranks: list[Any] = [None] * topology.world_size
    dist.all_gather_object(ranks, (socket.gethostname(), mine))
    first_host, first = ranks[0]
    for (rank, (host, other)), what in itertools.product(enumerate(ranks), mine):
        if other[what] != first[what]:
            raise UserError(
                f"rank {rank} on {host} has another {what} than rank 0 on {first_host}",
                f"{other[what]} and {first[what]}",
                "use one environment on all machines, and a dataset that all of them see as the "
                "same file (the embedded corpus is that of each machine's Python)",
            )


def build_sampler(plan: Plan, data: Data, topology: Topology) -> Sampler:
    """The order in which this rank sees the training samples."""
    batch, seed = asdict(plan.batch), plan.config.seed
    return Sampler(num_samples=len(data.train), **batch, replica=topology.dp_rank, seed=seed)


def seed_dropout(config: RunConfig, topology: Topology) -> None:
    """Start this rank's stream of random numbers: ranks that compute the same draw the same masks.

    Those are the ranks along tp without sequence parallelism, outside of attention. All others
    hold other samples, tokens or layers, and other masks.
    """
    alike = 1 if config.sequence_parallel else topology.tp
    torch.manual_seed(config.seed + 1000 + topology.rank // alike)


def build_engine(plan: Plan, topology: Topology) -> Engine:
    """Initial weights (equal on every rank and under every strategy) into the right engine."""
    config = plan.config
    model = plan.model.build(dropout=config.dropout, seed=config.seed)
    model.compute_dtype = COMPUTE_DTYPES[config.precision]
    if plan.weights_dir is not None:
        plan.model.load(model, plan.weights_dir)
    if model.compute_dtype is not None:
        # DeepSpeed makes its fp32 master copy from weights already rounded: so do all.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(model.compute_dtype).float()
    engine_class = plan.strategy.traits.load()
    return engine_class(model, plan, topology)


def build_extensions(plan: Plan, topology: Topology, display: Display) -> None:
    """Compile DeepSpeed's extensions before the run, one process a machine, and say so."""
    for name in needed_extensions(plan.strategy) if topology.local_rank == 0 else ():
        from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

        first = "(the first time it is compiled, which takes a minute or two)"
        display.say(f"DeepSpeed extension {name}: loading {first} ...")
        {"cpu_adam": CPUAdamBuilder, "async_io": AsyncIOBuilder}[name]().load(verbose=False)
    dist.barrier()
