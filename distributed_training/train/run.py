"""Execute a training run on one rank, from loading the data to the finished record."""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.checkpoint import resume
from distributed_training.checkpoint.export import push_folder, write_card
from distributed_training.data.samples import Data, Sampler
from distributed_training.parallel import agree
from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan
from distributed_training.planner.data import load_planned_data
from distributed_training.predict.memory import estimate_state
from distributed_training.records import metrics
from distributed_training.records import record as records
from distributed_training.records.display import Display, header_rows, pasteable, short_path
from distributed_training.records.results import summary_rows
from distributed_training.settings.errors import UserError, print_stderr
from distributed_training.supervise import claims, commands
from distributed_training.supervise.process import END_ACTIVITY, Startup
from distributed_training.train.build import build_engine, build_extensions, build_sampler
from distributed_training.train.loop import Trainer


def train(
    plan: Plan,
    topology: Topology,
    set_activity: Callable[..., None],
    gather_values: agree.Gather,
    startup: Startup,
) -> int:
    """Execute a training run on this rank, from loading the data to the finished record. Return the
    exit code. All ranks must call this function."""
    is_rank_0 = topology.rank == 0
    display = Display(enabled=is_rank_0)
    for note in plan.notes:
        display.note(note)
    data = load_planned_data(plan)
    # Machines may have different files under the same name. Machines may also have different
    # versions of Python, and the dataset "embedded" is Python's source code.
    agree.check_ranks_agree({"training data": data.fingerprint}, gather_values)
    build_extensions(plan, topology, display)
    startup.end("data")
    sampler = build_sampler(plan, data, topology)
    history = records.History()
    record = None
    resumed_step = 0
    if is_rank_0:
        if plan.checkpoint is None:  # Remove rows from an attempt that saved no checkpoint.
            records.truncate_metrics(plan.run_dir, 0)
        else:
            meta = resume.read_meta(plan.checkpoint)
            resumed_step = meta.step
            state = resume.load_run_record(plan.checkpoint, meta)
            history = records.History(**state.model_dump())
        record_values = describe_run(plan, sampler, data) | vars(history)
        record = records.start_record(plan.run_dir, **record_values)
    run_info = {**plan.work, "strategy": plan.strategy.name, "processes": plan.num_processes}
    log_to = plan.config.log_to if is_rank_0 else None
    tracker = metrics.build_tracker(log_to, plan.run_dir, run_info, resumed_step)
    history = records.History(**agree.broadcast_from_rank_0(vars(history)))
    engine = build_engine(plan, topology)
    if record is not None:
        record.update(dtypes=engine.describe_dtypes())
        display.table(header_rows(records.Record.model_validate(record.values)))
    trainer = Trainer(
        engine=engine,
        plan=plan,
        topology=topology,
        data=data,
        sampler=sampler,
        display=display,
        history=history,
        record=record,
        tracker=tracker,
        set_activity=set_activity,
        startup=startup,
    )
    if plan.checkpoint is not None:
        trainer.restore(plan.checkpoint)
        display.say(f"resumed from {short_path(plan.checkpoint)}")
    startup.end("model")
    signum = trainer.run()
    set_activity(END_ACTIVITY)
    results = collect_results(trainer)
    if record is not None:
        claims.check(plan.run_dir, plan.run_id)
        status = "interrupted" if signum else "ok"
        record.update(**results, status=status, finished_at=records.timestamp())
        finished_record = records.Record.model_validate(record.values)
        if not signum:
            display.table(summary_rows(finished_record))
            display.suggest(commands.suggest_commands(plan, finished_record))
        for folder in (plan.run_dir / records.LAST, plan.run_dir / records.BEST):
            if folder.is_dir():
                write_card(folder, finished_record)
        tracker.close(finished_record)
    if signum:
        saves_checkpoints = plan.config.checkpoint_every != 0
        what = f"Interrupted at step {trainer.step} of {trainer.num_steps}."
        if saves_checkpoints:
            sentence, command = commands.build_continue_command(plan)
            display.say(f"{what} {sentence}\n{pasteable(command)}")
        else:
            display.say(f"{what} Nothing was saved, because checkpoint_every=0.")
    engine.close()
    dist.barrier()
    if is_rank_0:
        claims.release(plan.run_dir)
    if plan.offload_dir is not None and topology.local_rank == 0:
        shutil.rmtree(plan.offload_dir, ignore_errors=True)
    return 128 + signum if signum else 0


def push(run_dir: Path, name: str) -> int:
    """Upload a finished run's model to the Hub and return the exit code."""
    try:
        print(f"Uploaded the model to {push_folder(run_dir / records.LAST, name)}", flush=True)
    except UserError as error:  # The run is finished, even if its model cannot be uploaded.
        print_stderr(error.terminal_text)
        return 1
    return 0


def describe_run(plan: Plan, sampler: Sampler, data: Data) -> dict[str, Any]:
    """Return the entries that a record contains before the first step. `Record` documents most of
    these entries."""
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
        "command": plan.command,
        "config": plan.settings,
        "config_requested": plan.requested.to_key_values(),
        "from_strategy_defaults": list(plan.from_defaults),
        "engine_options": plan.engine_options,
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
        "num_learning": plan.size.num_trained_parameters(config.lora_rank, config.lora_targets),
        "dtypes": None,  # set once the engine is built
        "estimated_state_bytes": estimate_state(plan),
        "prediction": plan.prediction,
        "batch": plan.batch.model_dump(),
        "data": {
            "form": data.form,
            "num_train_samples": len(data.train),
            "num_validation_samples": len(data.validation),
            "real_token_share": data.train.real_share,
            # With packing, a sample contains several records.
            "num_train_records": len(data.train.starts) if plan.packing else None,
            "num_validation_records": len(data.validation.starts) if plan.packing else None,
            "mean_document_tokens": plan.packing and plan.packing.mean_length,
            "steps_per_epoch": sampler.steps_per_epoch,
        },
        "num_steps": plan.num_steps,
    }


def collect_results(trainer: Trainer) -> dict[str, Any]:
    """Return the values that are added to a record at the end of a run: history, profile,
    performance, memory per rank, disk traffic including checkpoints, and sample. All ranks must
    call this function."""
    plan = trainer.plan
    config = plan.config
    sampler = trainer.sampler
    step_times = trainer.step_times
    # Use only the times of full steps without profiling. The last step of an epoch may have fewer
    # tokens but take just as long.
    slowed_steps = trainer.profile.slowed_steps if trainer.profile else ()
    full_steps_s = [
        s for step, s in step_times if sampler.is_full(step - 1) and step not in slowed_steps
    ]
    samples = min(sampler.global_batch_size, sampler.num_samples)
    performance = metrics.summarize_performance(
        full_steps_s or [seconds for _, seconds in step_times],
        tokens_per_step=samples * config.max_length * trainer.data.train.real_share,
        flops_per_token=plan.size.flops_per_token(plan.attention_span, frozen=config.lora_rank > 0),
        world_size=plan.num_processes,
        device_name=plan.machine.gpu_name,
    )
    peaks = trainer.peak_memory.as_dict()
    ranks = agree.gather({"rank": trainer.topology.rank, **peaks, "disk": trainer.disk_traffic})
    memory: dict[str, Any] = {
        name: None if mine is None else max(rank[name] for rank in ranks)
        for name, mine in peaks.items()
    }
    total = {name: sum(rank["disk"][name] for rank in ranks) for name in trainer.disk_traffic}
    return {
        **vars(trainer.history),
        "profile": trainer.profile and trainer.profile.record,
        "performance": performance,
        "memory": memory | {"by_rank": ranks},
        "disk": total | {"num_steps": max(1, len(step_times))} if total else None,
        "sample": trainer.sample,
    }
