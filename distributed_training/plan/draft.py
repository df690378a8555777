"""One layout of a CONFIG as a plan that nothing has checked yet. No torch import."""

from __future__ import annotations

import math

from distributed_training.models import find_model
from distributed_training.plan.layouts import build_layout, cut_batch
from distributed_training.plan.machine import Machine
from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import schedule_of
from distributed_training.records.record import new_run_dir
from distributed_training.settings.config import RunConfig, describe_work
from distributed_training.settings.config import replace as with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import user_path
from distributed_training.settings.strategies import Strategy


def lay_out(
    config: RunConfig,
    strategy: Strategy,
    mesh: dict[str, int],
    machine: Machine,
    processes_here: int,
) -> Plan:
    """A draft for a CONFIG in which only the micro-batches may be open.

    Raises UserError where a setting does not go with the mesh.
    """
    requested, notes, num_processes = config, list[str](), math.prod(mesh.values())
    model = find_model(config.model)
    layout = build_layout(config, strategy, model.size, mesh)
    schedule = schedule_of(config, strategy, mesh["pp"])
    batch = cut_batch(config, mesh, schedule)
    size, count, tp = batch.micro_batch_size, batch.num_microbatches, mesh["tp"]
    config = with_values(config, micro_batch_size=size, num_microbatches=count)
    if processes_here % tp:
        note = f"tp={tp} reaches across machines, so every layer waits for the network four times: "
        notes.append(f"{note}give tp a divisor of {processes_here} and the rest to another axis")
    output_dir = user_path("output_dir", config.output_dir)
    run_dir = new_run_dir(output_dir, strategy.name, model.label, num_processes)
    offload = output_dir / ".offload"
    if config.offload_dir is not None and strategy.swaps_to_disk:
        offload = user_path("offload_dir", config.offload_dir)
    plan = Plan(
        requested=requested,
        config=config,
        strategy=strategy,
        machine=machine,
        num_processes=num_processes,
        processes_here=processes_here,
        mesh=mesh,
        batch=batch,
        layout=layout,
        output_dir=output_dir,
        run_dir=run_dir,
        offload_dir=offload.absolute() / run_dir.name if strategy.swaps_to_disk else None,
        work=describe_work(config, batch.global_batch_size),
        notes=notes,
    )
    _check_tokens(plan)
    return plan


def _check_tokens(plan: Plan) -> None:
    """Raises UserError where tp has no samples to deal out and cannot split the tokens either."""
    length, tp, size = plan.config.max_length, plan.mesh["tp"], plan.batch.micro_batch_size
    if length % plan.tp_parts[1]:
        what = f"neither max_length={length} nor a micro-batch of {size} is a multiple of tp={tp}"
        why = "sequence_parallel deals out samples or tokens evenly"
        fix = f"set max_length to {length // tp * tp or tp} or sequence_parallel to False"
        raise UserError(what, why, fix)
