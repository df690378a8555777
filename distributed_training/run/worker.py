"""What one process of a run does: build what the plan says, train, record; or fail, said once."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil
import signal
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.data.samples import Data
from distributed_training.parallel.agree import (
    Gather,
    check_ranks_agree,
    from_rank_0,
    gather,
    gather_in,
)
from distributed_training.plan import data as plan_data
from distributed_training.plan.machine import detect_machine, threads_per_process
from distributed_training.plan.plan import PLAN_AS_JSON, Plan
from distributed_training.plan.topology import Topology, p2p_channels, process_group
from distributed_training.predict.rates import remember_speed
from distributed_training.records import metrics, trackers
from distributed_training.records import record as records
from distributed_training.records.card import write_card
from distributed_training.records.display import Display, header_rows, short_path, summary_rows
from distributed_training.records.provenance import code, versions
from distributed_training.records.record import BEST, LAST
from distributed_training.run import assemble
from distributed_training.run.ending import end_failed
from distributed_training.run.loop import History, Trainer
from distributed_training.run.prepare import go_on, make_plan, reserve_run_dir
from distributed_training.run.process import Process, Startup
from distributed_training.run.profiling import Profile
from distributed_training.run.ranks import handling
from distributed_training.run.rendezvous import current_agent, meet
from distributed_training.run.saving import claims, export, resume
from distributed_training.run.saving.disks import check_disks
from distributed_training.run.watch import Watch
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError

MIN_TIMED_STEPS = 10  # from which their median is a speed


def run(given: Plan | RunConfig, process: Process, startup: Startup) -> int:
    """This process's part of a run; returns the exit code. Where torchrun or deepspeed was typed
    only CONFIG is `given`: rank 0 plans for all. Collective."""
    seen = torch.cuda.device_count
    device = prepare(given.machine.num_gpus if isinstance(given, Plan) else seen(), process)
    config = given.config if isinstance(given, Plan) else given
    watch = Watch()
    store = meet(process, config.rendezvous_timeout_s)
    with process_group(device, store, p2p_channels=p2p_channels(config.gradient_compression)):
        ask = gather_in(store, process.rank, process.world_size)
        if isinstance(given, RunConfig):
            given = agree_on_plan(given, process, ask, current_agent(os.environ))
            check_disks(given, process)
            prepare(given.machine.num_gpus, process)  # a torch without CUDA sees no GPU
            startup.end("plan")
        topology = assemble.build_topology(given, process, device)
        if given.strategy.steps_on_host:  # torchrun by itself gives each process one thread
            torch.set_num_threads(threads_per_process(process.local_world_size))
        watch.begin(given.run_dir, topology, given.config)
        # Training saves at Ctrl-C. Before and after it the run just ends, at once: libraries make
        # something else of a KeyboardInterrupt, such as a checkpoint that cannot be read.
        leave = functools.partial(end_failed, given, topology, KeyboardInterrupt(), store)
        with handling({signal.SIGINT: lambda *_: leave()}):
            try:
                return _train(given, topology, watch, ask, startup)
            except BaseException as error:  # others may wait in a collective that never completes
                end_failed(given, topology, error, store)


def warm_up(process: Process) -> None:
    """What takes seconds and needs no plan: the GPU's context, the compiler and its processes."""
    if torch.cuda.is_available() and process.local_rank < torch.cuda.device_count():
        torch.zeros((), device=torch.device("cuda", process.local_rank))
        importlib.import_module("torch._inductor.compile_fx")


def prepare(num_gpus: int, process: Process) -> torch.device:
    """Settings of libraries, and the device of this process. Raises UserError where torch cannot
    use the machine's GPUs or there are too few."""
    # Libraries that call each other's deprecated functions are not the user's business.
    ours = "torch|deepspeed|distributed_training"
    warnings.filterwarnings("ignore", category=FutureWarning, module=ours)
    if not num_gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Else it says that there is CUDA's compiler but no GPU.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        what = f"the installed torch {torch.__version__} cannot use this machine's GPU"
        fix = "install a build that matches the driver, or hide the GPU: CUDA_VISIBLE_DEVICES=''"
        raise UserError(what, f"it was built for CUDA {torch.version.cuda}", fix)
    here = process.local_world_size
    gpus = torch.cuda.device_count()
    if here > gpus:
        raise UserError(f"{here} processes on a machine with {gpus} GPUs", fix=f"start {gpus}")
    # DeepSpeed's builder cannot read entries such as 9.0a; this machine's own is enough.
    major, minor = torch.cuda.get_device_capability(process.local_rank)
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    return torch.device("cuda", process.local_rank)


def agree_on_plan(
    config: RunConfig, process: Process, ask: Gather, agent: str | None = None
) -> Plan:
    """The plan that rank 0 makes, on all ranks; raises its UserError on all, and where another rank
    was given other values or runs other code. Where this process's `agent` has begun a run already,
    the plan goes on with it. Collective."""
    typed = config.to_user_words()
    del typed["output_dir"]  # as a path: checkouts may lie in different places
    check_ranks_agree({**typed, **versions(), **code()}, ask)
    answer = dict[str, str]()
    launchers = sorted(set(ask(agent))) if agent else []
    if process.rank == 0:
        sizes = {"num_processes": process.world_size, "processes_here": process.local_world_size}
        try:
            config, notes = go_on(config, launchers, process.world_size)
            plan = make_plan(config, detect_machine(), **sizes, cut=plan_data.cut_data)
            plan = replace(plan, launchers=launchers, notes=[*plan.notes, *notes])
            answer["plan"] = PLAN_AS_JSON.dump_json(reserve_run_dir(plan)).decode()
        except UserError as error:
            answer["error"] = str(error)
        except OSError as error:  # a full or read-only disk under the cache, most often
            answer["error"] = f"preparing the data failed; {error}; set output_dir elsewhere"
    answer = ask(answer)[0]
    if "error" in answer:
        raise UserError(answer["error"])
    return PLAN_AS_JSON.validate_json(answer["plan"])


def _train(plan: Plan, topology: Topology, watch: Watch, ask: Gather, startup: Startup) -> int:
    """From data to the finished record; the exit code. Collective."""
    display = Display(enabled=topology.rank == 0)
    for note in plan.notes:
        display.note(note)
    data, tokenizer = plan_data.load_plan_data(plan)
    # Machines may hold other files under one name, or another Python, which is the embedded corpus.
    check_ranks_agree({"training data": data.fingerprint}, ask)
    assemble.build_extensions(plan, topology, display)
    startup.end("data")
    trainer = _build_trainer(plan, topology, data, display)
    startup.end("model")
    trainer.startup = startup
    model = (trainer.engine, plan, tokenizer, tokenizer.talks(data.form))
    if trainer.step == 0:
        trainer.history.sample_before = export.generate_sample(*model, display, "before")
    trainer.save_best = lambda: export.export(*model, plan.run_dir / BEST).result()
    trainer.at = watch.at
    last = plan.run_dir / LAST

    def leave() -> str | None:
        best = trainer.history.best
        written = None
        if plan.config.export and best and best["step"] == trainer.step:  # gathered already
            if topology.rank == 0:
                written = export.in_thread(export.copy_folder, plan.run_dir / BEST, last)
        elif plan.config.export:
            written = export.export(*model, last, trainer.saver.weights(trainer.step))
        sample = export.generate_sample(*model, display, "after")
        if written is not None:
            written.result()
            display.say(f"exported {short_path(last)} (Hugging Face's format)")
        return sample

    trainer.leave = leave
    with Profile(plan, topology, trainer.step, display) as profile:
        trainer.step_ended = profile.step_ended
        signum = trainer.run()
    watch.at("the end")
    results = collect_results(trainer, profile)
    if not signum:
        results["sample"] = trainer.sample
    if trainer.record is not None:
        results.update(status="interrupted" if signum else "ok", finished_at=records.timestamp())
        trainer.record.update(**results)
        if not signum:
            display.table(summary_rows(trainer.record.as_record()))
        for folder in (last, plan.run_dir / BEST):
            if folder.is_dir():
                write_card(folder, trainer.record.as_record())
        trainer.tracker.close(trackers.final_values(trainer.record.as_record()))
    if signum:
        saved = plan.config.checkpoint_every != 0
        then = "go on with --resume auto" if saved else "checkpoint_every=0: nothing was saved"
        display.say(f"interrupted at step {trainer.step} of {trainer.num_steps}; {then}")
    trainer.engine.close()
    dist.barrier()
    watch.end()
    if topology.rank == 0:
        claims.release(plan.run_dir)
    if plan.offload_dir is not None and topology.local_rank == 0:
        shutil.rmtree(plan.offload_dir, ignore_errors=True)
    if plan.config.push is not None and topology.rank == 0 and not signum:
        try:
            print(f"pushed {export.push_folder(last, plan.config.push)}", flush=True)
        except UserError as error:  # the run is finished all the same
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
    return 128 + signum if signum else 0


def _build_trainer(plan: Plan, topology: Topology, data: Data, display: Display) -> Trainer:
    """Record and engine of a run, brought to where it starts or goes on. Collective."""
    sampler = assemble.build_sampler(plan, data, topology)
    assert plan.num_steps is not None, "the launching process cut the data"
    history = History()
    record = None
    tracker = trackers.Tracker()
    if plan.checkpoint is not None and topology.rank == 0:
        state = resume.state_of(plan.checkpoint)
        history = History(**state.model_dump(include=set(vars(history))))
    history = History(**from_rank_0(vars(history)))
    if topology.rank == 0:
        values = assemble.describe_run(plan, sampler, data) | vars(history)
        record = records.start_record(plan.run_dir, **values)
        if plan.checkpoint is None:  # rows of an attempt that saved nothing
            records.truncate_metrics(plan.run_dir, 0)
        about = {**plan.work, "strategy": plan.strategy.name, "processes": plan.num_processes}
        tracker = trackers.build_tracker(plan.config.log_to, plan.run_dir, about)
    engine = assemble.build_engine(plan, topology)
    dtypes = engine.describe_dtypes()
    if record is not None:
        record.update(dtypes=dtypes)
        display.table(header_rows(record.as_record()))
    trainer = Trainer(
        engine, plan, topology, data, sampler, plan.num_steps, display, history, record, tracker
    )
    if plan.checkpoint is not None:
        trainer.restore(plan.checkpoint)
        display.say(f"resumed from {short_path(plan.checkpoint)}")
    return trainer


def _remember_speed(plan: Plan, performance: dict[str, Any]) -> None:
    """For the next plan on this machine: where many steps were timed, and of a GPU's own speed
    only where it was alone."""
    said = plan.prediction
    enough = performance["num_timed_steps"] >= MIN_TIMED_STEPS
    if not (plan.machine.num_gpus and said and said["step_time_s"] and enough):
        return
    alone = plan.num_processes == 1 and said["bound_by"] in ("arithmetic", "memory")
    if alone or said["bound_by"] == "host":
        measured_s = performance["step_time_s"]["p50"]
        remember_speed(str(plan.machine.gpu_name), said, measured_s, records.timestamp())


def collect_results(trainer: Trainer, profile: Profile) -> dict[str, Any]:
    """History, performance, memory by rank, disk traffic with checkpoints. Collective."""
    plan = trainer.plan
    sampler = trainer.sampler
    durations = trainer.timer.durations_s()
    # Steps that the data fill (the last of an epoch takes as long with fewer tokens), untraced.
    steps = enumerate(durations, trainer.step - len(durations))
    full = [s for step, s in steps if sampler.is_full(step) and step + 1 not in profile.slowed]
    samples = min(sampler.global_batch_size, sampler.num_samples)
    performance = metrics.summarise_performance(
        full or durations,
        tokens_per_step=samples * plan.config.max_length * trainer.data.train.real_share,
        flops_per_token=plan.size.flops_per_token(
            plan.config.max_length, frozen=plan.config.lora_rank > 0
        ),
        world_size=plan.num_processes,
        device_name=plan.machine.gpu_name,
    )
    if trainer.topology.rank == 0:
        _remember_speed(plan, performance)
    peaks = trainer.memory.as_dict()
    ranks = gather({"rank": trainer.topology.rank, **peaks, "disk": trainer.disk})
    memory: dict[str, Any] = {
        name: None if mine is None else max(rank[name] for rank in ranks)
        for name, mine in peaks.items()
    }
    total = {name: sum(rank["disk"][name] for rank in ranks) for name in trainer.disk}
    return {
        **vars(trainer.history),
        "profile": profile.as_record(),
        "performance": performance,
        "memory": memory | {"by_rank": ranks},
        "disk": total | {"num_steps": max(1, len(durations))} if total else None,
    }
