"""What a run leaves behind: what its record says before the first step and after the last, a
sample of text, the weights."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.data.sampler import Sampler
from distributed_training.data.samples import Data
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.engines.base import Engine
from distributed_training.plan.plan import Plan
from distributed_training.records.metrics import disk_bytes, summarise_performance
from distributed_training.run.journal import History
from distributed_training.run.loop import Trainer


def describe_run(
    plan: Plan, sampler: Sampler, num_steps: int, data: Data, history: History | None = None
) -> dict[str, Any]:
    """What the record says before the first step; records/schema.py describes it."""
    config, strategy, layout, pp = plan.config, plan.strategy, plan.layout, plan.mesh["pp"]
    pipeline = {
        "schedule": config.pipeline_schedule,
        "num_microbatches": plan.batch.num_microbatches,
        "blocks_per_stage": list(layout.blocks_per_stage),
        "stage_ranks": list(layout.ranks),
        "ideal_bubble": plan.schedule.bubble(pp, plan.batch.num_microbatches),
    }
    sharding = strategy.describe_sharding()
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
        "dtypes": None,  # known when the engine is built
        "estimated_state_bytes": asdict(plan.state),
        "estimated_activation_bytes": plan.activation_bytes,
        "batch": asdict(plan.batch),
        "data": {
            "num_train_samples": len(data.train),
            "num_validation_samples": len(data.validation),
            "real_token_share": data.train.real_share,
            "steps_per_epoch": sampler.steps_per_epoch,
        },
        "num_steps": num_steps,
        **vars(history or History()),
    }


def collect_results(trainer: Trainer) -> dict[str, Any]:
    """History, performance, memory by rank, disk traffic with checkpoints. Collective."""
    plan, sampler, durations = trainer.plan, trainer.sampler, trainer.timer.durations_s()
    # Steps that the data fill: the last of an epoch takes as long with fewer tokens.
    steps = enumerate(durations, trainer.step - len(durations))
    full = [seconds for step, seconds in steps if sampler.is_full(step)]
    samples = min(sampler.global_batch_size, sampler.num_samples)
    performance = summarise_performance(
        full or durations,
        tokens_per_step=samples * plan.config.max_length * trainer.data.train.real_share,
        flops_per_token=plan.size.flops_per_token(plan.config.max_length),
        world_size=plan.num_processes,
        device_name=plan.machine.gpu_name,
    )
    trainer.memory.end()
    peaks, before, after = trainer.memory.as_dict(), trainer.disk_before, disk_bytes()
    disk = {name: after[name] - before[name] for name in after} if before and after else None
    ranks: list[Any] = [None] * plan.num_processes
    dist.all_gather_object(ranks, {"rank": trainer.topology.rank, **peaks, "disk": disk})
    highest = {
        name: None if mine is None else max(rank[name] for rank in ranks)
        for name, mine in peaks.items()
    }
    total = None
    if disk and all(rank["disk"] for rank in ranks):
        total = {name: sum(rank["disk"][name] for rank in ranks) for name in disk}
        total["num_steps"] = max(1, len(durations))
    return {
        **vars(trainer.journal.history),
        "performance": performance,
        "memory": {**highest, "by_rank": ranks},
        "disk": total,
    }


def sample_and_export(trainer: Trainer, tokenizer: Tokenizer) -> str | None:
    """Generate the sample and write <run>/hf, as far as CONFIG asks; the sample. Collective."""
    engine, plan, display = trainer.engine, trainer.plan, trainer.journal.display
    config, tp, eos_id, sample = plan.config, plan.mesh["tp"], tokenizer.eos_id, None
    if config.generate is not None:
        prompt = tokenizer.encode_batch([config.generate])[0].tolist() or [eos_id]
        # The split of a window over tp may append tokens, which need positions, too.
        context = plan.size.num_positions // tp * tp
        ids = generate(engine, prompt, num_tokens=60, context=context, eos_id=eos_id,
                       seed=config.seed)  # fmt: skip
        sample = tokenizer.decode(ids)
        display.say(f"sample: {sample!r}")
    if config.export:
        state = engine.full_state()
        if state is not None:
            folder = plan.run_dir / "hf"
            plan.model.save(state, folder, eos_token_id=eos_id)
            tokenizer.save(folder)
            display.say(f"exported {folder} (Hugging Face format)")
        dist.barrier()
    return sample


@torch.no_grad()
def generate(
    engine: Engine, prompt_ids: list[int], *, num_tokens: int, context: int, eos_id: int, seed: int
) -> list[int]:
    """Continue `prompt_ids` by sampling from the 40 likeliest tokens. Collective.

    Rank 0 chooses: sharded engines gather parameters at each step, so all must take one path.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        window = torch.tensor([ids[-context:]])
        logits = engine.logits(window)[0, -1].float().cpu()
        values, candidates = torch.topk(logits, min(40, len(logits)))
        choice = candidates[torch.multinomial(values.softmax(0), 1, generator=generator)]
        dist.broadcast(choice, src=0)
        ids.append(int(choice))
        if ids[-1] == eos_id:
            break
    return ids
