"""Execute a training run on one rank, from loading the data to the finished record. `train` builds
the parts of the run with the functions below it."""

import contextlib
import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist

from distributed_training.checkpoint.saver import seed_dropout
from distributed_training.checkpoint.trained import base_source
from distributed_training.data.samples import Data, Sampler
from distributed_training.engines.base import Engine
from distributed_training.models import peft
from distributed_training.models.decoder import COMPUTE_DTYPES, Decoder
from distributed_training.models.initial_weights import InitialWeights, weights_checksum
from distributed_training.models.preference import pair_loss
from distributed_training.models.quantized import quantize_matrices
from distributed_training.parallel import agree
from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan
from distributed_training.plan.samples import load_data
from distributed_training.records import metrics
from distributed_training.records import record as records
from distributed_training.records.display import Display, fold, header_rows, short_path
from distributed_training.records.results import summary_rows
from distributed_training.supervise import claims
from distributed_training.supervise.ending import explain_continuing
from distributed_training.supervise.process import END_ACTIVITY, Process
from distributed_training.train.around_steps import Recorder
from distributed_training.train.loop import Trainer
from distributed_training.train.profiling import build_profiler
from distributed_training.train.reference import REFERENCE_FILE, add_reference

FORGETTING = (
    "the validation loss does not tell what the model has forgotten. Ask it general questions too. "
    "If it lost more than it learned, mix general-chats into dataset, or train fewer epochs"
)


def train(
    plan: Plan, topology: Topology, set_activity: Callable[[str], None], gather_values: agree.Gather
) -> int:
    """Execute a training run on this rank, from loading the data to the finished record. Return the
    exit code. All ranks must call this function."""
    display = Display(enabled=topology.rank == 0)
    data = load_data(plan)
    # Machines may have different files under the same name. Machines may also have different
    # versions of Python, and the dataset "embedded" is Python's source code.
    agree.check_ranks_agree({"training data": data.fingerprint}, gather_values)
    build_extensions(plan, topology, display)
    sampler = build_sampler(plan, data, topology)
    record, history = start_record(plan, sampler, data, topology)
    recorder = Recorder(record, start_tracker(plan, history, topology))
    engine = build_engine(plan, topology)
    if record is not None:
        display.say(fold(plan.verdict))
        display.table(header_rows(records.Record.model_validate(record.values)))
    for note in plan.notes:
        display.note(note)
    trainer = Trainer(
        engine=engine,
        plan=plan,
        topology=topology,
        data=data,
        sampler=sampler,
        display=display,
        recorder=recorder,
        history=history,
        set_activity=set_activity,
    )
    if plan.config.profile:
        trainer.profiler = build_profiler(plan, history.step, topology.rank, display)
    if plan.config.has_reference:
        display.say("computing the log-probabilities of the answers before training")
        file = plan.run_dir / REFERENCE_FILE
        trainer.data = add_reference(data, engine, sampler, file, set_activity)
    if plan.checkpoint is not None:
        trainer.checkpoints.restore(trainer, plan.checkpoint)
        gather_values(None)  # a slow disk may delay one rank for longer than collectives wait
    signum = trainer.run()
    set_activity(END_ACTIVITY)
    results = recorder.collect_results(trainer)
    if record is not None:
        finish_record(record, results, trainer, signum)
    recorder.tracker.end()
    if signum:
        what = f"Interrupted at step {trainer.step} of {trainer.num_steps}."
        display.say(f"{what} {explain_continuing(plan)}")
    engine.close()
    dist.barrier()
    if record is not None:
        claims.release(plan.run_dir)
    if plan.offload_dir is not None and topology.local_rank == 0:
        shutil.rmtree(plan.offload_dir, ignore_errors=True)
    return 128 + signum if signum else 0


def start_record(
    plan: Plan, sampler: Sampler, data: Data, topology: Topology
) -> tuple[records.RunRecord | None, records.History]:
    """Write the record's first entries on rank 0. Return the record, which is None on other ranks,
    and the history up to the checkpoint. All ranks must call this function."""
    record = None
    history = records.History()
    if topology.rank == 0:
        if plan.checkpoint is None:  # Remove rows from an attempt that saved no checkpoint.
            records.truncate_metrics(plan.run_dir, 0)
        else:
            if state := records.find_record(plan.run_dir):
                history = records.History(**state.model_dump())
            if not (plan.run_dir / records.BEST).is_dir():  # deleted, or on a lost machine
                history.best = None
        entries = describe_run(plan, sampler, data) | vars(history)
        record = records.start_record(plan.run_dir, **entries)
    return record, records.History(**agree.broadcast_from_rank_0(vars(history)))


def start_tracker(plan: Plan, history: records.History, topology: Topology) -> metrics.Tracker:
    """Return rank 0's tracker. Other ranks get one that does nothing."""
    if topology.rank or plan.config.log_to is None:
        return metrics.Tracker()
    run_info = {**plan.work, "strategy": plan.strategy.name, "processes": plan.num_processes}
    return metrics.build_tracker(plan.config.log_to, plan.run_dir, run_info, history.step)


def finish_record(
    record: records.RunRecord, results: dict[str, Any], trainer: Trainer, signum: int
) -> None:
    """Write a run's results to its record. Unless a signal stopped the run, print them."""
    plan = trainer.plan
    claims.check(plan.run_dir, plan.run_id)
    status = "interrupted" if signum else "ok"
    record.update(**results, status=status, finished_at=records.timestamp())
    finished_record = records.Record.model_validate(record.values)
    if signum:
        return
    trainer.display.table(summary_rows(finished_record))
    if trainer.data.is_chat and plan.weights_dir is not None:
        trainer.display.note(FORGETTING)
    if plan.config.export:
        script = shlex.split(plan.command)[1]
        command = shlex.join(["python", script, "generate", short_path(plan.run_dir)])
        trainer.display.say(f"To use the model, run:\n  {command}")


def build_topology(plan: Plan, process: Process, device: torch.device) -> Topology:
    """Return this process's position in the plan's mesh."""
    return Topology(
        world_size=process.world_size,
        rank=process.rank,
        local_rank=process.local_rank,
        **plan.mesh,
        device_type=device.type,
    )


def build_sampler(plan: Plan, data: Data, topology: Topology) -> Sampler:
    """Return a sampler that selects this rank's training samples for each step."""
    return Sampler(
        num_samples=len(data.train),
        **plan.batch.model_dump(),
        replica=topology.dp_rank,
        seed=plan.config.seed,
    )


def build_extensions(plan: Plan, topology: Topology, display: Display) -> None:
    """Compile and load the DeepSpeed extensions that the plan's strategy requires, in one process
    per machine, whose error would otherwise be hidden by those of processes that wait for it. All
    ranks must call this function."""
    for name in plan.strategy.extensions if topology.local_rank == 0 else ():
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        display.say(f"loading DeepSpeed extension {name} (compiling it takes a minute or more)")
        ALL_OPS[name].load(verbose=False)
    dist.barrier()


def stop_compilers(plan: Plan) -> None:
    """Terminate the compilers that this process has started to build an extension. Torch's own
    child processes, which run Python, end with this process. After the run has begun, other
    programs may run, such as a tracker's."""
    if records.has_begun(plan.run_dir):
        return
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not child.name().startswith("python"):
                child.terminate()


def build_engine(plan: Plan, topology: Topology) -> Engine:
    """Build the plan's engine and seed dropout. The initial weights are the same under every
    strategy. All ranks must call this function. Raises UserError if adapters do not fit the
    weights."""
    model, weights, fingerprint = build_model(plan, topology)
    if plan.adapters_dir is not None:
        initial_adapters = peft.read_folder(plan.model, plan.adapters_dir)
        initial_adapters.check_base(fingerprint)
        weights = replace(weights, adapters=initial_adapters.tensors)
    engine = plan.strategy.load_engine()(model, weights, plan, topology)
    engine.base_fingerprint = fingerprint
    seed_dropout(plan, topology, 0)
    return engine


def build_model(plan: Plan, topology: Topology) -> tuple[Decoder, InitialWeights, int]:
    """Return the model on the meta device, its initial weights and their fingerprint, which is
    0 for random weights without LoRA.

    All weights are rounded to the compute dtype. Frozen weights are stored in the compute dtype (or
    in `base_dtype` for the matrices of blocks). Trained weights are stored in fp32 or, if the
    optimizer has no fp32 copy, in bf16."""
    config = plan.config
    compute_dtype = COMPUTE_DTYPES[config.precision]
    model = plan.model.build_meta_model(dropout=config.dropout)
    if (config.lora_rank or config.has_bf16_weights) and compute_dtype is not None:
        model.to(compute_dtype)
    model.compute_dtype = compute_dtype
    if config.has_pairs:
        model.pair_loss = partial(pair_loss, config)
    if plan.packing:
        model.max_documents = plan.packing.max_documents
    source = base_source(plan, topology.device)
    fingerprint = weights_checksum(model, source) if config.lora_rank or plan.weights_dir else 0
    if config.has_quantized_base:
        source = quantize_matrices(model, source, topology.device, str(config.base_dtype))
    return model, InitialWeights(source=source, round_to=compute_dtype), fingerprint


def describe_run(plan: Plan, sampler: Sampler, data: Data) -> dict[str, Any]:
    """Return the entries that a record contains before the first step. `Record` documents most of
    these entries."""
    config = plan.config
    strategy = plan.strategy
    pipeline = {
        "schedule": config.pipeline_schedule,
        "num_microbatches": plan.batch.num_microbatches,
        "blocks_per_stage": list(plan.stages.blocks_per_stage),
        "ideal_bubble": plan.ideal_bubble,
    }
    return {
        "command": plan.command,
        "attempt_id": plan.attempt_id,
        "config": plan.settings,
        "config_requested": plan.requested.to_key_values(),
        "engine_options": plan.engine_options,
        "deepspeed_json": plan.deepspeed_json,
        "strategy": {"name": strategy.name, "engine": strategy.engine},
        "work": {**plan.work, "data_fingerprint": data.fingerprint},
        "notes": plan.notes,
        "run_dir": str(plan.run_dir),
        "resumed_from": str(plan.checkpoint) if plan.checkpoint else None,
        "world_size": plan.num_processes,
        "mesh": plan.mesh,
        "pipeline": pipeline if plan.mesh["pp"] > 1 else None,
        "machine": asdict(plan.machine),
        "num_parameters": plan.size.num_parameters,
        "num_learning": plan.size.num_trained_parameters(config.lora_rank, config.lora_targets),
        "estimated_state_bytes": plan.state_bytes,
        "prediction": plan.prediction,
        "batch": plan.batch.model_dump(),
        "data": {
            "form": data.form,
            "unit": plan.amount.unit if plan.amount else "samples",
            "num_train_samples": len(data.train),
            "num_validation_samples": len(data.validation),
            "real_token_share": data.train.real_share,
            # With packing, a sample contains several records.
            "num_train_records": len(data.train.starts) if plan.packing else None,
            "num_validation_records": len(data.validation.starts) if plan.packing else None,
            "steps_per_epoch": sampler.steps_per_epoch,
        },
        "num_steps": plan.num_steps,
    }
