"""What one process of a run does: build what the plan says, train, record; or fail, said once."""

import functools
import importlib
import logging
import os
import shutil
import signal
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.advise.make import built_extensions
from distributed_training.data.samples import Data, Sampler
from distributed_training.engines.base import COMPUTE_DTYPES, Engine
from distributed_training.models import peft
from distributed_training.models.decoder import Decoder
from distributed_training.parallel import agree
from distributed_training.plan.data import cut_data
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology, limit_channels, process_group
from distributed_training.predict.memory import estimate_state
from distributed_training.predict.rates import remember_speed
from distributed_training.records import metrics
from distributed_training.records import record as records
from distributed_training.records.display import Display, header_rows, short_path, summary_rows
from distributed_training.run import commands, rendezvous
from distributed_training.run.ending import end_failed
from distributed_training.run.loop import Trainer
from distributed_training.run.ranks import Process, Startup, current_process, handling
from distributed_training.run.saving import claims, resume
from distributed_training.run.saving.checkpoint import seed_dropout
from distributed_training.run.saving.export import push_folder, write_card
from distributed_training.run.watch import THE_END, Watch
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import threads_per_process


def run(given: Plan | RunConfig, process: Process, startup: Startup) -> int:
    """This process's part of a run; returns the exit code. Where torchrun or deepspeed was typed
    only CONFIG is `given`: rank 0 plans for all. Collective."""
    num_gpus = given.machine.num_gpus if isinstance(given, Plan) else torch.cuda.device_count()
    config = given.config if isinstance(given, Plan) else given
    watch = Watch(process)
    process, device, store = join(process, num_gpus, config.rendezvous_timeout_s)
    limit_channels(config.gradient_compression)
    with process_group(device, store):
        ask = agree.gather_in(store, process.rank, process.world_size)
        if isinstance(given, RunConfig):
            given = rendezvous.agree_on_plan(given, process, ask, rendezvous.current_agent())
            rendezvous.check_disks(given, process)
            prepare(given.machine.num_gpus, process)  # a torch without CUDA sees no GPU
            startup.end("plan")
        topology = build_topology(given, process, device)
        if given.strategy.steps_on_host:  # torchrun by itself gives each process one thread
            torch.set_num_threads(threads_per_process(process.local_world_size))
        watch.begin(given.run_dir, given.config, store)
        # Training saves at Ctrl-C. Before and after it the run just ends, at once: libraries make
        # something else of a KeyboardInterrupt, such as a checkpoint that cannot be read.
        leave = functools.partial(end_failed, given, topology, KeyboardInterrupt(), store)
        with handling({signal.SIGINT: lambda *_: leave()}):
            try:
                code = _train(given, topology, watch, ask, startup)
            except BaseException as error:  # others may wait in a collective that never completes
                if watch.place == THE_END and records.has_finished(given.run_dir):
                    what = f"{type(error).__name__}: {error}"
                    print(f"note: after the run had finished, {what}", file=sys.stderr, flush=True)
                    os._exit(0)
                end_failed(given, topology, error, store)
    watch.end()  # once nobody can be waited for any more
    if code == 0 and given.config.push is not None and process.rank == 0:
        return push(given.run_dir, given.config.push)
    return code


def _train(plan: Plan, topology: Topology, watch: Watch, ask: agree.Ask, startup: Startup) -> int:
    """From data to the finished record; the exit code. Collective."""
    first = topology.rank == 0
    display = Display(enabled=first)
    for note in plan.notes:
        display.note(note)
    data = cut_data(plan)
    # Machines may hold other files under one name, or another Python, which is the embedded corpus.
    agree.check_ranks_agree({"training data": data.fingerprint}, ask)
    build_extensions(plan, topology, display)
    startup.end("data")
    sampler = build_sampler(plan, data, topology)
    history = records.History()
    record = None
    if first:
        if plan.checkpoint is None:  # rows of an attempt that saved nothing
            records.truncate_metrics(plan.run_dir, 0)
        else:
            state = resume.state_of(plan.checkpoint, resume.read_meta(plan.checkpoint))
            history = records.History(**state.model_dump())
        values = describe_run(plan, sampler, data) | vars(history)
        record = records.start_record(plan.run_dir, **values)
    about = {**plan.work, "strategy": plan.strategy.name, "processes": plan.num_processes}
    log_to = plan.config.log_to if first else None
    going_on = resume.read_meta(plan.checkpoint).step if plan.checkpoint and first else 0
    tracker = metrics.build_tracker(log_to, plan.run_dir, about, going_on)
    history = records.History(**agree.from_rank_0(vars(history)))
    engine = build_engine(plan, topology)
    if record is not None:
        record.update(dtypes=engine.describe_dtypes())
        display.table(header_rows(records.Record.model_validate(record.values)))
    trainer = Trainer(
        engine, plan, topology, data, sampler, display, history, record, tracker,
        watch.at, startup,
    )  # fmt: skip
    if plan.checkpoint is not None:
        trainer.restore(plan.checkpoint)
        display.say(f"resumed from {short_path(plan.checkpoint)}")
    startup.end("model")
    signum = trainer.run()
    watch.at(THE_END)
    results = collect_results(trainer)
    if record is not None:
        status = "interrupted" if signum else "ok"
        record.update(**results, status=status, finished_at=records.timestamp())
        finished = records.Record.model_validate(record.values)
        if not signum:
            display.table(summary_rows(finished))
            display.commands("next, for example:", *commands.after_the_end(plan, finished))
        for folder in (plan.run_dir / records.LAST, plan.run_dir / records.BEST):
            if folder.is_dir():
                write_card(folder, finished)
        tracker.close(finished)
    if signum:
        saved = plan.config.checkpoint_every != 0
        what = f"interrupted at step {trainer.step} of {trainer.num_steps}"
        if saved:
            words, command = commands.to_continue(plan)
            display.commands(f"{what}; {words}", command)
        else:
            display.say(f"{what}; checkpoint_every=0: nothing was saved")
    engine.close()
    dist.barrier()
    if first:
        claims.release(plan.run_dir)
    if plan.offload_dir is not None and topology.local_rank == 0:
        shutil.rmtree(plan.offload_dir, ignore_errors=True)
    return 128 + signum if signum else 0


def push(run_dir: Path, name: str) -> int:
    """Send a finished run's model to the Hub; return the exit code."""
    try:
        print(f"pushed {push_folder(run_dir / records.LAST, name)}", flush=True)
    except UserError as error:  # the run is finished all the same
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def join(
    process: Process, num_gpus: int, limit_s: float
) -> tuple[Process, torch.device, dist.Store]:
    """Open the run's store; return this process with its local numbers, and its device. A device
    that cannot be used is an error before anybody is waited for, if the launcher told its number.
    Collective."""
    located = process.local_world_size > 0
    try:
        device = prepare(num_gpus, process) if located else torch.device("cpu")
    except UserError as error:
        # The command line prints rank 0's; another machine may have other GPUs.
        if process.rank and not process.local_rank:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise
    store = open_store(process, limit_s)
    if not located:
        process = current_process() or process
        device = prepare(num_gpus, process)
    return process, device, store


def open_store(process: Process, limit_s: float) -> dist.Store:
    """The one that all processes share, as `meet` gives it; a process alone has nobody to meet."""
    if process.world_size > 1:
        return rendezvous.meet(process, limit_s)
    rendezvous.use_loopback()  # gloo and NCCL listen all the same
    return dist.HashStore()


def prepare(num_gpus: int, process: Process) -> torch.device:
    """Settings of libraries, and the device of this process. Raises UserError where torch cannot
    use the machine's GPUs or there are too few."""
    # Libraries that call each other's deprecated functions are not the user's business.
    ours = "torch|deepspeed|distributed_training"
    warnings.filterwarnings("ignore", category=FutureWarning, module=ours)
    if not num_gpus:
        return use_cpu()
    if not torch.cuda.is_available():
        what = f"the installed torch {torch.__version__} cannot use this machine's GPU"
        fix = "install a build that matches the driver, or hide the GPU: CUDA_VISIBLE_DEVICES=''"
        raise UserError(what, f"it was built for CUDA {torch.version.cuda}", fix)
    here = process.local_world_size
    gpus = torch.cuda.device_count()
    if here > gpus:
        what = f"{here} processes on a machine with {gpus} GPUs that each can use"
        fix = f"start {gpus}; under srun, let each see all of its node's: --gpus-per-node, not "
        raise UserError(what, fix=f"{fix}--gpus-per-task")
    # DeepSpeed's builder cannot read entries such as 9.0a; this machine's own is enough.
    major, minor = torch.cuda.get_device_capability(process.local_rank)
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    return torch.device("cuda", process.local_rank)


def use_cpu() -> torch.device:
    """The device, once libraries know that there is no other."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Else it says that there is CUDA's compiler but no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    return torch.device("cpu")


def warm_up(process: Process) -> None:
    """What takes seconds and needs no plan: the GPU's context, the compiler and its processes."""
    if torch.cuda.is_available() and process.local_rank < torch.cuda.device_count():
        torch.zeros((), device=torch.device("cuda", process.local_rank))
        importlib.import_module("torch._inductor.compile_fx")


def build_topology(plan: Plan, process: Process, device: torch.device) -> Topology:
    own = {name: getattr(process, name) for name in ("world_size", "rank", "local_rank")}
    return Topology(**own, **plan.mesh, device_type=device.type)


def build_sampler(plan: Plan, data: Data, topology: Topology) -> Sampler:
    """The order in which this rank sees the training samples."""
    own = {"replica": topology.dp_rank, "seed": plan.config.seed}
    return Sampler(num_samples=len(data.train), **plan.batch.model_dump(), **own)


def build_extensions(plan: Plan, topology: Topology, display: Display) -> None:
    """Compile DeepSpeed's extensions before the run, one process a machine, and say so."""
    plan.strategy.load_engine()  # all import the engine now, not one while the others wait
    names = built_extensions(plan.strategy) if topology.local_rank == 0 else ()
    for name in names:
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        began = time.monotonic()
        display.say(f"DeepSpeed extension {name}: loading (compiling takes a minute or more) ...")
        ALL_OPS[name].load(verbose=False)
        display.say(f"DeepSpeed extension {name}: loaded in {time.monotonic() - began:.1f} s")
    dist.barrier()


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
    if plan.adapters_dir is not None:
        initial = peft.read_initial(plan.model, plan.adapters_dir)
        peft.check_base(model, initial.base, plan.adapters_dir)
        model.initial_adapters = initial.tensors
    if model.compute_dtype is not None:
        # DeepSpeed makes its fp32 master copy from weights already rounded: so do all.
        for parameter in model.parameters():
            rounded = parameter.data.to(model.compute_dtype)
            parameter.data = rounded if config.lora_rank else rounded.float()
    engine = plan.strategy.load_engine()(model, plan, topology)
    engine.base_fingerprint = fingerprint
    seed_dropout(plan, topology, 0)
    return engine


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
        "command": plan.command,
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
            # With packed records a sample is a block of some of them.
            "num_train_records": len(data.train.starts) if plan.packing else None,
            "num_validation_records": len(data.validation.starts) if plan.packing else None,
            "mean_document_tokens": plan.packing and plan.packing.mean_length,
            "steps_per_epoch": sampler.steps_per_epoch,
        },
        "num_steps": plan.num_steps,
    }


def collect_results(trainer: Trainer) -> dict[str, Any]:
    """History, performance, memory by rank, disk traffic with checkpoints. Collective."""
    plan = trainer.plan
    config = plan.config
    sampler = trainer.sampler
    timed = trainer.timed
    # Steps that the data fill (the last of an epoch takes as long with fewer tokens), untraced.
    slowed = trainer.profile.slowed if trainer.profile else ()
    full = [s for step, s in timed if sampler.is_full(step - 1) and step not in slowed]
    samples = min(sampler.global_batch_size, sampler.num_samples)
    performance = metrics.summarise_performance(
        full or [seconds for _, seconds in timed],
        tokens_per_step=samples * config.max_length * trainer.data.train.real_share,
        flops_per_token=plan.size.flops_per_token(plan.attended, frozen=config.lora_rank > 0),
        world_size=plan.num_processes,
        device_name=plan.machine.gpu_name,
    )
    if trainer.topology.rank == 0:
        remember_speed(plan, performance)
    peaks = trainer.memory.as_dict()
    ranks = agree.gather({"rank": trainer.topology.rank, **peaks, "disk": trainer.disk})
    memory: dict[str, Any] = {
        name: None if mine is None else max(rank[name] for rank in ranks)
        for name, mine in peaks.items()
    }
    total = {name: sum(rank["disk"][name] for rank in ranks) for name in trainer.disk}
    return {
        **vars(trainer.history),
        "profile": trainer.profile and trainer.profile.record,
        "performance": performance,
        "memory": memory | {"by_rank": ranks},
        "disk": total | {"num_steps": max(1, len(timed))} if total else None,
        "sample": trainer.sample,
    }
