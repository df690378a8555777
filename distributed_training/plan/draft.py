"""One layout of a CONFIG as a plan that nothing has checked yet. No torch import."""

from __future__ import annotations

from collections.abc import Sequence

from distributed_training.models import find_model
from distributed_training.plan.choose import choose_settings
from distributed_training.plan.layouts import build_layout, cut_batch
from distributed_training.plan.machine import Machine
from distributed_training.plan.mesh import OPEN_BATCH, fill_mesh
from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import find_schedule
from distributed_training.records.record import new_run_dir
from distributed_training.settings.config import RunConfig
from distributed_training.settings.config import replace as with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import user_path
from distributed_training.settings.strategies import load_strategy


def lay_out(
    given: RunConfig,
    machine: Machine,
    num_processes: int,
    processes_here: int,
    *,
    mesh: dict[str, int] | None = None,
    requested: RunConfig | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """A draft for a CONFIG whose model, strategy and batch size are known; `mesh`: another than
    the strategy's own; `requested`, `notes`: CONFIG before these were decided, and what was said.

    Raises UserError where the processes make no such mesh, or a setting does not go with it.
    """
    notes = list(notes)
    strategy = load_strategy(given)
    model = find_model(given.model)
    if mesh is None:
        mesh = fill_mesh(strategy, num_processes, given, model)
    config = choose_settings(given, machine, strategy, model.size, mesh, notes)
    schedule = find_schedule(strategy.schedule, mesh)
    layout = build_layout(config, strategy, model.size, schedule, mesh)
    batch = cut_batch(config, schedule, mesh)
    tp = mesh["tp"]
    if processes_here % tp:
        note = f"tp={tp} reaches across machines, so every layer waits for the network four times: "
        notes.append(f"{note}give tp a divisor of {processes_here} and the rest to another axis")
    output_dir = user_path("output_dir", config.output_dir)
    offload_dir = output_dir / ".offload"
    if config.offload_dir is not None and strategy.swaps_to_disk:
        offload_dir = user_path("offload_dir", config.offload_dir)
    run_dir = new_run_dir(output_dir, strategy.name, model.label, num_processes)
    only_copies = mesh["dp_replicate"] == num_processes
    averages = not strategy.traits.rounded_weights and batch.num_replicas > 1
    cut = {key: getattr(batch, key) for key in OPEN_BATCH}
    plan = Plan(
        requested=requested or given,
        config=with_values(config, **cut),
        strategy=strategy,
        machine=machine,
        num_processes=num_processes,
        processes_here=processes_here,
        mesh=mesh,
        batch=batch,
        layout=layout,
        only_copies=only_copies,
        uses_ddp=averages and only_copies,
        uses_fsdp=averages and not only_copies,
        output_dir=output_dir,
        run_dir=run_dir,
        offload_dir=offload_dir.absolute() / run_dir.name if strategy.swaps_to_disk else None,
        notes=notes,
    )
    _check_tokens(plan)
    return plan


def _check_tokens(plan: Plan) -> None:
    """Raises UserError where tp has no samples to deal out and cannot split the tokens either."""
    length = plan.config.max_length
    tp = plan.mesh["tp"]
    size = plan.batch.micro_batch_size
    if length % plan.tp_parts[1]:
        what = f"neither max_length={length} nor a micro-batch of {size} is a multiple of tp={tp}"
        why = "sequence_parallel deals out samples or tokens evenly"
        fix = f"set max_length to {length // tp * tp or tp} or sequence_parallel to False"
        raise UserError(what, why, fix)
