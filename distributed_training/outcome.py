"""What a record says of a run before its first step and after its last; and what to say when
memory runs out.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.data import Data, Sampler
from distributed_training.layout_rules import SCHEDULE_RULES
from distributed_training.metrics import disk_bytes, summarise_performance
from distributed_training.plan import Plan
from distributed_training.strategy import estimate_state_bytes
from distributed_training.topology import Topology
from distributed_training.train import Trainer

# What a resumed run takes over from the record of the steps before it.
_HISTORY: dict[str, Any] = {
    "step": 0,
    "loss_curve": [],
    "evaluations": [],
    "epochs": [],
    "skipped_steps": [],
    "num_skipped_steps": 0,
}


def describe_run(
    plan: Plan,
    topology: Topology,
    sampler: Sampler,
    num_steps: int,
    data: Data,
    history: dict[str, Any] | None,
) -> dict[str, Any]:
    """What the record says before the first step."""
    config = plan.config
    return {
        "command": shlex.join(["python", *sys.argv]),
        "config": config.to_user_words(),
        "config_requested": plan.requested.to_user_words(),
        "deepspeed_json": plan.deepspeed_json,
        "strategy": {
            "name": plan.strategy.name,
            "engine": plan.strategy.engine,
            "sharding": plan.strategy.describe_sharding(),
        },
        "work": {**plan.work, "data_fingerprint": data.fingerprint},
        "notes": list(plan.resolved.notes),
        "run_dir": str(plan.run_dir),
        "resumed_from": str(plan.checkpoint) if plan.checkpoint else None,
        "world_size": topology.world_size,
        "topology": topology.axes,
        "pipeline": _describe_pipeline(plan, topology),
        "machine": asdict(plan.machine),
        "cuda": torch.version.cuda if topology.device_type == "cuda" else None,
        "num_parameters": plan.size.num_parameters,
        "dtypes": None,  # known when the engine is built
        "estimated_state_bytes": estimate_state_bytes(
            plan.strategy,
            num_parameters=plan.layout.num_parameters,
            precision=config.precision,
            dp_size=topology.dp_size,
        ),
        "batch": {
            "global_batch_size": sampler.global_batch_size,
            "micro_batch_size": config.micro_batch_size,
            "grad_accum_steps": config.grad_accum_steps,
            "dp_size": topology.dp_size,
        },
        "data": {
            "num_train_samples": len(data.train),
            "num_validation_samples": len(data.validation),
            "real_token_share": data.train.real_share,
            "steps_per_epoch": sampler.steps_per_epoch,
        },
        "num_steps": num_steps,
        **{key: (history or {}).get(key, empty) for key, empty in _HISTORY.items()},
    }


def _describe_pipeline(plan: Plan, topology: Topology) -> dict[str, Any] | None:
    """Schedule and cut; None where there is no pipeline."""
    if topology.pp == 1:
        return None
    return {
        "schedule": plan.config.pipeline_schedule,
        "num_microbatches": plan.config.grad_accum_steps,
        "blocks_per_stage": [len(blocks) for blocks in plan.layout.stages],
        "stage_ranks": list(plan.layout.ranks),
        "ideal_bubble": SCHEDULE_RULES[plan.config.pipeline_schedule].bubble(
            topology.pp, plan.config.grad_accum_steps
        ),
    }


def collect_results(
    plan: Plan, topology: Topology, trainer: Trainer, disk_before: dict[str, int] | None
) -> dict[str, Any]:
    """Performance, memory of every rank and disk traffic. Collective."""
    disk_after = disk_bytes()
    disk = None
    if disk_before is not None and disk_after is not None:
        disk = {name: disk_after[name] - disk_before[name] for name in disk_after}
    mine = {"rank": topology.rank, **trainer.memory.as_dict(), "disk": disk}
    ranks: list[Any] = [None] * topology.world_size
    dist.all_gather_object(ranks, mine)
    durations = trainer.timer.durations_s()
    config = plan.config
    # Steps that the data fill: the last of an epoch takes as long with fewer tokens.
    first = trainer.step - len(durations)
    full = [t for i, t in enumerate(durations) if trainer.sampler.is_full(first + i)]
    samples = min(trainer.sampler.global_batch_size, trainer.sampler.num_samples)
    tokens = samples * config.seq_len * trainer.data.train.real_share
    disks = [rank["disk"] for rank in ranks]
    steps = max(1, len(durations))
    return {
        "step": trainer.step,
        "loss_curve": trainer.loss_curve,
        "evaluations": trainer.evaluations,
        "epochs": trainer.epochs,
        "skipped_steps": trainer.skipped_steps,
        "num_skipped_steps": len(trainer.skipped_steps),
        "performance": summarise_performance(
            full or durations,
            tokens_per_step=tokens,
            flops_per_token=plan.size.flops_per_token(config.seq_len),
            world_size=topology.world_size,
            device_name=plan.machine.gpu_name,
        ),
        "memory": {
            **{
                name: None if ranks[0][name] is None else max(rank[name] for rank in ranks)
                for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")
            },
            "by_rank": ranks,
        },
        # Of the whole training phase, checkpoints included, summed over ranks.
        "disk": None
        if any(entry is None for entry in disks)
        else {name: sum(entry[name] for entry in disks) for name in ("read_bytes", "write_bytes")}
        | {"num_steps": steps},
    }


def explain_out_of_memory(plan: Plan, topology: Topology, detail: str) -> str:
    """Where the memory went and what helps, most effective first."""
    config = plan.config
    state = estimate_state_bytes(
        plan.strategy,
        num_parameters=plan.layout.num_parameters,
        precision=config.precision,
        dp_size=topology.dp_size,
    )
    held = state["parameters"] + state["gradients"] + state["optimizer"]
    peak = torch.cuda.max_memory_allocated(topology.device)
    fixes = []
    if config.micro_batch_size > 1:
        half = config.micro_batch_size // 2
        fixes.append(
            f"batch_size={half} with grad_accum_steps={config.grad_accum_steps * 2} (same work)"
        )
    if config.activation_checkpointing != "full":
        fixes.append("activation_checkpointing=full")
    if config.seq_len > 128:
        fixes.append(f"max_length={config.seq_len // 2}")
    if not plan.strategy.divides_parameters and topology.world_size > 1:
        fixes.append("strategy=zero3 or fsdp (they divide the state; activations stay)")
    if not plan.strategy.needs_cpu_adam:
        fixes.append("strategy=offload")
    return (
        f"out of GPU memory on rank {topology.rank}: {detail}\n"
        f"  {peak / 2**30:.1f} GiB were in use at the peak; the state of {config.model} under "
        f"{plan.strategy.name} takes {held / 2**30:.1f} GiB of them, activations and buffers the "
        f"rest\n  in this order, try --set " + "; --set ".join(fixes)
    )
