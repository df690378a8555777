"""The parts of a run, on every rank, and what its record says before the first step."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.advise.checks import built_extensions
from distributed_training.data.samples import Data, Sampler
from distributed_training.engines.base import COMPUTE_DTYPES, Engine
from distributed_training.models.decoder import Decoder
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology
from distributed_training.predict.memory import estimate_state
from distributed_training.records.display import Display
from distributed_training.run.process import Process
from distributed_training.run.saving.checkpoint import seed_dropout


def build_topology(plan: Plan, process: Process, device: torch.device) -> Topology:
    """This process's place in the plan's mesh."""
    place = {name: getattr(process, name) for name in ("world_size", "rank", "local_rank")}
    return Topology(**place, **plan.mesh, device_type=device.type)


def build_sampler(plan: Plan, data: Data, topology: Topology) -> Sampler:
    """The order in which this rank sees the training samples."""
    own = {"replica": topology.dp_rank, "seed": plan.config.seed}
    return Sampler(num_samples=len(data.train), **plan.batch.model_dump(), **own)


def build_engine(plan: Plan, topology: Topology, model: Decoder | None = None) -> Engine:
    """Initial weights (equal on every rank and under every strategy) into the right engine; then
    the random numbers of dropout start. `model`: with these weights drawn already. Collective."""
    config = plan.config
    if model is None:
        # A stage, and DeepSpeed's parts, take less of a GPU than the model.
        whole = plan.strategy.traits.uses_ddp_and_fsdp and topology.pp == 1
        device = topology.device if whole and not config.lora_rank else torch.device("cpu")
        with device:
            model = plan.model.build(dropout=config.dropout, seed=config.seed)
    model.compute_dtype = COMPUTE_DTYPES[config.precision]
    if plan.weights_dir is not None:
        plan.model.load(model, plan.weights_dir)
    fingerprint = model.fingerprint() if config.lora_rank else 0
    if model.compute_dtype is not None:
        # DeepSpeed makes its fp32 master copy from weights already rounded: so do all.
        for parameter in model.parameters():
            rounded = parameter.data.to(model.compute_dtype)
            parameter.data = rounded if config.lora_rank else rounded.float()
    engine = plan.strategy.traits.load()(model, plan, topology)
    engine.base_fingerprint = fingerprint
    seed_dropout(plan, topology, 0)
    return engine


def build_extensions(plan: Plan, topology: Topology, display: Display) -> None:
    """Compile DeepSpeed's extensions before the run, one process a machine, and say so."""
    names = built_extensions(plan.strategy, plan.machine) if topology.local_rank == 0 else ()
    for name in names:
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        began = time.monotonic()
        display.say(f"DeepSpeed extension {name}: loading (compiling takes a minute or more) ...")
        ALL_OPS[name].load(verbose=False)
        display.say(f"DeepSpeed extension {name}: loaded in {time.monotonic() - began:.1f} s")
    dist.barrier()


def describe_run(plan: Plan, sampler: Sampler, data: Data) -> dict[str, Any]:
    """What the record says before the first step; records/record.py describes it."""
    config = plan.config
    strategy = plan.strategy
    pp = plan.mesh["pp"]
    pipeline = {
        "schedule": config.pipeline_schedule,
        "num_microbatches": plan.batch.num_microbatches,
        "blocks_per_stage": list(plan.layout.blocks_per_stage),
        "stage_ranks": list(plan.layout.ranks),
        "ideal_bubble": plan.schedule.bubble(pp, plan.batch.num_microbatches),
    }
    sharding = strategy.sharding
    return {
        "command": shlex.join(["python", *sys.argv]),
        "config": config.to_user_words(),
        "config_requested": plan.requested.to_user_words(),
        "from_strategy_defaults": list(config.from_defaults),
        "engine_options": config.engine_options,
        "deepspeed_json": plan.deepspeed_json,
        "strategy": {"name": strategy.name, "engine": strategy.engine, "sharding": sharding},
        "work": {**plan.work, "data_fingerprint": data.fingerprint},
        "notes": plan.notes,
        "run_dir": str(plan.run_dir),
        "resumed_from": str(plan.checkpoint) if plan.checkpoint else None,
        "world_size": plan.num_processes,
        "mesh": plan.mesh,
        "pipeline": pipeline if pp > 1 else None,
        "machine": asdict(plan.machine),
        "cuda": torch.version.cuda if plan.machine.num_gpus else None,
        "num_parameters": plan.size.num_parameters,
        "num_learning": plan.size.num_learning(config.lora_rank, config.lora_targets),
        "dtypes": None,  # known when the engine is built
        "estimated_state_bytes": estimate_state(plan),
        "prediction": plan.prediction,
        "batch": plan.batch.model_dump(),
        "data": {
            "form": data.form,
            "num_train_samples": len(data.train),
            "num_validation_samples": len(data.validation),
            "real_token_share": data.train.real_share,
            "steps_per_epoch": sampler.steps_per_epoch,
        },
        "num_steps": plan.num_steps,
    }
