"""The parts of a run, on every rank: its samples, its random numbers, its engine."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.config import RunConfig
from distributed_training.data import Data, Sampler
from distributed_training.display import Display
from distributed_training.engines.base import COMPUTE_DTYPES, Engine
from distributed_training.errors import UserError
from distributed_training.hf_checkpoint import load_hf_weights
from distributed_training.model import build_model
from distributed_training.plan import Plan
from distributed_training.preflight import needed_extensions
from distributed_training.topology import Topology


def check_ranks_agree(data: Data, topology: Topology) -> None:
    """Machines may hold other files under the same name, or another Python, whose sources are the
    embedded corpus: ranks would train on different texts and nothing would show it. Collective.

    Raises UserError, the same on every rank.
    """
    mine = {
        "host": socket.gethostname(),
        "training data": data.fingerprint,
        "torch": torch.__version__,
    }
    ranks: list[Any] = [None] * topology.world_size
    dist.all_gather_object(ranks, mine)
    for rank, other in enumerate(ranks):
        for what in ("torch", "training data"):
            if other[what] != ranks[0][what]:
                raise UserError(
                    f"rank {rank} on {other['host']} has another {what} than rank 0 on "
                    f"{ranks[0]['host']}",
                    f"{other[what]} and {ranks[0][what]}",
                    "use one environment on all machines, and a dataset that all of them see as "
                    "the same file (the embedded corpus is that of each machine's Python)",
                )


def build_sampler(config: RunConfig, data: Data, topology: Topology) -> Sampler:
    """The order in which this rank sees the training samples."""
    return Sampler(
        num_samples=len(data.train),
        micro_batch_size=config.micro_batch_size,
        grad_accum_steps=config.grad_accum_steps,
        dp_size=topology.dp_size,
        dp_rank=topology.dp_rank,
        seed=config.seed,
    )


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
    model = build_model(plan.size, dropout=config.dropout, seed=config.seed)
    model.compute_dtype = COMPUTE_DTYPES[config.precision]
    if plan.resolved.weights_dir is not None:
        load_hf_weights(model, plan.resolved.weights_dir)
    if model.compute_dtype is not None:
        # DeepSpeed makes its fp32 master copy from weights already rounded: so do all.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(model.compute_dtype).float()
    if plan.deepspeed_json is not None and topology.pp > 1:
        from distributed_training.engines.deepspeed_pipeline import DeepSpeedPipelineEngine

        return DeepSpeedPipelineEngine(
            model, config, plan.strategy, topology, plan.deepspeed_json, plan.layout
        )
    if plan.deepspeed_json is not None:
        from distributed_training.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(model, config, plan.strategy, topology, plan.deepspeed_json)
    from distributed_training.engines.native import NativeEngine

    return NativeEngine(model, config, topology, plan.layout)


def build_extensions(plan: Plan, topology: Topology, display: Display) -> None:
    """Compile DeepSpeed's extensions before the run, one process a machine, and say so."""
    names = needed_extensions(plan.strategy)
    if names and topology.local_rank == 0:
        from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

        builders = {"cpu_adam": CPUAdamBuilder, "async_io": AsyncIOBuilder}
        for name in names:
            display.say(f"DeepSpeed extension {name}: loading (the first time it is compiled, "
                        "which takes a minute or two) ...")  # fmt: skip
            builders[name]().load(verbose=False)
    dist.barrier()
