"""What one process of a run does: agree on the plan, build the engine, train, record."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from distributed_training.assemble import (
    build_engine,
    build_extensions,
    build_sampler,
    check_ranks_agree,
    seed_dropout,
)
from distributed_training.checkpoint import check_same_data
from distributed_training.config import RunConfig
from distributed_training.display import Display, header_rows, summary_rows
from distributed_training.engines.base import Engine
from distributed_training.errors import UserError
from distributed_training.hf_checkpoint import save_hf_folder
from distributed_training.launch import Process, threads_per_process
from distributed_training.machine import Machine
from distributed_training.metrics import disk_bytes
from distributed_training.outcome import collect_results, describe_run, explain_out_of_memory
from distributed_training.plan import Plan, load_plan_data, make_plan, reserve_run_dir
from distributed_training.record import (
    FAILURE_FILE,
    LOST,
    claim_failure,
    load_record,
    mark_stopped,
    start_record,
    timestamp,
    truncate_metrics,
)
from distributed_training.resolve import with_model
from distributed_training.strategy import load_strategy
from distributed_training.tokenizer import Tokenizer
from distributed_training.topology import Topology, build_topology, process_group
from distributed_training.trackers import NoTracker, build_tracker
from distributed_training.train import InterruptedRun, Trainer, generate

GENERATED_TOKENS = 60
EXIT_FAILED = 1
# gloo's words and NCCL's where the process at the other end is gone.
SIGNS_OF_LOSS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited",
)  # fmt: skip
logger = logging.getLogger(__name__)


def run_worker(config: RunConfig, machine: Machine, process: Process, run_dir: Path | None) -> int:
    """Run this process's part to the end; return its exit code.

    UserErrors that every rank finds are raised. A failure after that is recorded, printed and ends
    the process at once: other ranks may wait inside a collective that will never complete.
    """
    # Libraries that call each other's deprecated functions are not the user's business.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|deepspeed")
    strategy = load_strategy(config)
    topology = build_topology(
        strategy,
        world_size=process.world_size,
        rank=process.rank,
        local_rank=process.local_rank,
        device_type="cuda" if machine.num_gpus else "cpu",
        config=with_model(config, machine),
    )
    if strategy.needs_cpu_adam:  # torchrun by itself gives each process one thread
        torch.set_num_threads(threads_per_process(machine, process.local_world_size))
    if machine.num_gpus and not torch.cuda.is_available():
        raise UserError(
            f"the installed torch {torch.__version__} cannot use this machine's GPU",
            f"it was built for CUDA {torch.version.cuda}",
            "install a build that matches the driver, or hide the GPU: CUDA_VISIBLE_DEVICES=''",
        )
    with process_group(topology):
        plan = _agree_on_plan(config, machine, process, topology, run_dir)
        try:
            return _train(plan, topology)
        except BaseException as error:
            _fail(plan, topology, error)
            raise AssertionError("unreachable") from error


def _agree_on_plan(
    config: RunConfig,
    machine: Machine,
    process: Process,
    topology: Topology,
    run_dir: Path | None,
) -> Plan:
    """Rank 0 resolves and checks (a network may answer one process and not another); all take
    its plan, or its error.
    """
    answer: list[Any] = [None]
    if topology.rank == 0:
        try:
            answer[0] = make_plan(
                config,
                machine,
                num_processes=process.world_size,
                processes_here=process.local_world_size,
                run_dir=run_dir,
            )
            load_plan_data(answer[0])  # fills the cache that the other ranks read
            if run_dir is None:
                answer[0] = reserve_run_dir(answer[0])
        except UserError as error:
            answer[0] = error
        except OSError as error:  # a full or read-only disk under the cache, most often
            answer[0] = UserError(
                "preparing the data failed", str(error), "set output_dir elsewhere"
            )
    dist.broadcast_object_list(answer, device=torch.device("cpu"))
    if isinstance(answer[0], UserError):
        raise answer[0]
    return answer[0]


def _train(plan: Plan, topology: Topology) -> int:
    display = Display(enabled=topology.rank == 0)
    for note in plan.resolved.notes:
        display.say(f"note: {note}")
    trainer, tokenizer = _build_trainer(plan, topology, display)
    disk_before = disk_bytes()
    interrupted: InterruptedRun | None = None
    try:
        trainer.run()
    except InterruptedRun as stop:
        interrupted = stop
    trainer.memory.end()
    results = collect_results(plan, topology, trainer, disk_before)
    if interrupted is None:
        results.update(_finish(plan, topology, trainer.engine, tokenizer, display))
    if trainer.record is not None:
        status = "ok" if interrupted is None else "interrupted"
        trainer.record.update(**results, status=status, finished_at=timestamp())
        display.table(summary_rows(trainer.record.values))
    if interrupted is not None:
        saved = plan.config.checkpoint_every != 0
        then = "continue with --set resume=auto" if saved else "checkpoint_every=0: not saved"
        display.say(f"interrupted by {interrupted}; {then}")
    trainer.tracker.close()
    trainer.engine.close()
    if plan.offload_dir is not None:
        dist.barrier()
        if topology.local_rank == 0:
            shutil.rmtree(plan.offload_dir, ignore_errors=True)
    return 0 if interrupted is None else 128 + interrupted.signum


def _build_trainer(plan: Plan, topology: Topology, display: Display) -> tuple[Trainer, Tokenizer]:
    """Data, engine and record of a run, brought to where it starts or goes on. Collective."""
    config = plan.config
    data, tokenizer = load_plan_data(plan)
    check_ranks_agree(data, topology)
    sampler = build_sampler(config, data, topology)
    num_steps = config.num_epochs * sampler.steps_per_epoch
    if config.max_steps != -1:
        num_steps = min(num_steps, config.max_steps)
    build_extensions(plan, topology, display)
    history = load_record(plan.run_dir) if plan.checkpoint else None
    values = describe_run(plan, topology, sampler, num_steps, data, history)
    dist.barrier()  # every rank has read the old record before it is written anew
    record, tracker = None, NoTracker()
    if topology.rank == 0:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        (plan.run_dir / FAILURE_FILE).unlink(missing_ok=True)
        record = start_record(plan.run_dir, **values)
        tracker = build_tracker(config.log_to, plan.run_dir, values["config"])
    engine = build_engine(plan, topology)
    values["dtypes"] = engine.describe_dtypes()
    display.table(header_rows(values))
    if record is not None:
        record.update(dtypes=values["dtypes"])
    trainer = Trainer(
        engine=engine,
        plan=plan,
        topology=topology,
        data=data,
        sampler=sampler,
        num_steps=num_steps,
        display=display,
        record=record,
        tracker=tracker,
    )
    if plan.checkpoint is not None and history is not None:
        check_same_data(plan.checkpoint, data.fingerprint)
        trainer.resume(plan.checkpoint, history)
        if topology.rank == 0:
            truncate_metrics(plan.run_dir, trainer.step)
        display.say(f"resumed from {plan.checkpoint}")
    else:
        seed_dropout(config, topology)
    return trainer, tokenizer


def _finish(
    plan: Plan, topology: Topology, engine: Engine, tokenizer: Tokenizer, display: Display
) -> dict[str, Any]:
    """The sample and the export. Collective."""
    config = plan.config
    sample = None
    if config.generate is not None:
        prompt = tokenizer.encode_batch([config.generate])[0].tolist() or [tokenizer.eos_id]
        ids = generate(
            engine,
            prompt,
            num_tokens=GENERATED_TOKENS,
            # The split of a window over tp may append tokens, which need positions, too.
            context=plan.size.num_positions // topology.tp * topology.tp,
            eos_id=tokenizer.eos_id,
            seed=config.seed,
        )
        sample = tokenizer.decode(ids)
        display.say(f"sample: {sample!r}")
    if config.export:
        state = engine.full_state()
        if state is not None:
            folder = plan.run_dir / "hf"
            save_hf_folder(state, plan.size, folder, eos_token_id=tokenizer.eos_id)
            tokenizer.save(folder)
            display.say(f"exported {folder} (Hugging Face format)")
        dist.barrier()
    return {"sample": sample}


def _fail(plan: Plan, topology: Topology, error: BaseException) -> None:
    """Say and record what went wrong, then leave without waiting for anybody."""
    code = EXIT_FAILED
    first_line = (str(error).strip().splitlines() or [""])[0]
    status, reason = "failed", f"rank {topology.rank}: {type(error).__name__}: {first_line}"
    lost = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS_OF_LOSS)
    if lost:
        reason = f"rank {topology.rank} {LOST}: {first_line}"
        print(reason, file=sys.stderr)
    elif isinstance(error, UserError):
        code, reason = error.exit_code, str(error)
        if claim_failure(plan.run_dir):
            print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, torch.cuda.OutOfMemoryError):
        status = "oom"
        print(explain_out_of_memory(plan, topology, first_line), file=sys.stderr)
    else:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        traceback.print_exception(error)
    sys.stderr.flush()
    try:
        mark_stopped(plan.run_dir, status, reason, consequence=lost)
        if status == "failed" and not lost and not isinstance(error, UserError):
            get_error_handler().record_exception(error)  # torchrun says it last
        if lost:  # so that the launcher sees the other's end first
            time.sleep(2)
        if plan.offload_dir is not None and topology.local_rank == 0:
            shutil.rmtree(plan.offload_dir, ignore_errors=True)
    finally:  # even where the disk is full
        os._exit(code)
