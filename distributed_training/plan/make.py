"""From CONFIG and a machine to the plan of a run. No torch import."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distributed_training.models import find_model
from distributed_training.plan.checks import run_checks
from distributed_training.plan.cost import estimate_activation_bytes, estimate_state_bytes
from distributed_training.plan.deepspeed_json import fill_deepspeed_json
from distributed_training.plan.layouts import build_layout, cut_batch
from distributed_training.plan.machine import Machine
from distributed_training.plan.mesh import fill_mesh
from distributed_training.plan.plan import PLAN_FILE, Plan, dump_plan
from distributed_training.plan.resolve import choose_model, choose_settings, find_sources
from distributed_training.plan.resume import find_resume
from distributed_training.plan.schedules import schedule_of
from distributed_training.records.record import new_run_dir
from distributed_training.settings.config import RunConfig, describe_work
from distributed_training.settings.config import replace as with_values
from distributed_training.settings.files import user_path
from distributed_training.settings.strategies import load_strategy


def make_plan(
    config: RunConfig,
    machine: Machine,
    *,
    num_processes: int,
    processes_here: int,
    run_dir: Path | None = None,
) -> Plan:
    """Decide and check everything about a run; raise UserError at the first obstacle.

    What may have to be downloaded comes last. `run_dir` fixes the run's folder; None picks a new
    one (or, resuming, the old one).
    """
    plan = draft_plan(config, machine, num_processes, processes_here, run_dir)
    run_checks(plan)
    config, tokenizer_dir, weights_dir = find_sources(plan.config, plan.notes)
    if weights_dir is not None:
        plan.model.check_weights(weights_dir)
    plan = replace(
        plan,
        config=config,
        tokenizer_dir=tokenizer_dir,
        weights_dir=weights_dir,
        work=describe_work(config, plan.batch.global_batch_size),
    )
    found = find_resume(config.resume, plan.output_dir, plan.identity)
    if found is not None:
        plan = replace(plan, run_dir=found[0], checkpoint=found[1])
    return _with_deepspeed_json(plan)


def draft_plan(
    config: RunConfig,
    machine: Machine,
    num_processes: int,
    processes_here: int,
    run_dir: Path | None = None,
) -> Plan:
    """Decide what follows from CONFIG and the machine; check only that the layout exists."""
    requested, strategy, notes = config, load_strategy(config), list[str]()
    config = choose_model(config, machine, notes)
    model = find_model(config.model)
    mesh = fill_mesh(strategy, num_processes, config)
    config = choose_settings(config, machine, strategy, mesh, notes)
    layout = build_layout(config, strategy, model.size, mesh)
    schedule = schedule_of(config, strategy, mesh["pp"])
    batch = cut_batch(config, mesh, schedule)
    size, count, tp = batch.micro_batch_size, batch.num_microbatches, mesh["tp"]
    config = with_values(config, micro_batch_size=size, num_microbatches=count)
    kept = schedule.kept(mesh["pp"], count)
    if processes_here % tp:
        notes.append(
            f"tp={tp} reaches across machines ({processes_here} processes on this one): every "
            f"layer waits for the network four times; give tp a divisor of {processes_here} and "
            "the rest to another axis"
        )
    output_dir = user_path("output_dir", config.output_dir)
    run_dir = run_dir or new_run_dir(output_dir, strategy.name, model.label, num_processes)
    offload = output_dir / ".offload"
    if config.offload_dir is not None and strategy.swaps_to_disk:
        offload = user_path("offload_dir", config.offload_dir)
    return Plan(
        requested=requested,
        config=config,
        strategy=strategy,
        machine=machine,
        num_processes=num_processes,
        processes_here=processes_here,
        mesh=mesh,
        batch=batch,
        layout=layout,
        state=estimate_state_bytes(strategy, layout.num_parameters, config.precision, mesh),
        activation_bytes=estimate_activation_bytes(config, model.size, mesh, size, kept),
        output_dir=output_dir,
        run_dir=run_dir,
        offload_dir=offload.absolute() / run_dir.name if strategy.swaps_to_disk else None,
        work=describe_work(config, batch.global_batch_size),
        notes=notes,
    )


def _with_deepspeed_json(plan: Plan) -> Plan:
    if not plan.strategy.traits.takes_deepspeed_json:
        return plan
    document = fill_deepspeed_json(plan.strategy, plan.config, plan.batch, str(plan.offload_dir))
    return replace(plan, deepspeed_json=document)


def reserve_run_dir(plan: Plan) -> Plan:
    """Make the run's folder, under the next free name where another run was quicker, and write
    the plan into it.
    """
    while plan.checkpoint is None:
        try:
            plan.run_dir.mkdir(parents=True)
            break
        except FileExistsError:
            label, count = plan.model.label, plan.num_processes
            run_dir = new_run_dir(plan.output_dir, plan.strategy.name, label, count)
            offload_dir = plan.offload_dir and plan.offload_dir.with_name(run_dir.name)
            plan = _with_deepspeed_json(replace(plan, run_dir=run_dir, offload_dir=offload_dir))
    (plan.run_dir / PLAN_FILE).write_text(dump_plan(plan), encoding="utf-8")
    return plan
