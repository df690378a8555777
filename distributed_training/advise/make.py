"""From CONFIG and a machine to the plan of a run that starts afresh: every "auto" is decided.

No torch import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distributed_training.advise.checks import run_checks
from distributed_training.advise.cluster import machine_rates
from distributed_training.advise.rank import choose_spread
from distributed_training.data.samples import Data
from distributed_training.plan.choose import choose_model, choose_settings
from distributed_training.plan.data import fit_to_data
from distributed_training.plan.draft import lay_out
from distributed_training.plan.machine import Machine
from distributed_training.plan.mesh import fill_mesh
from distributed_training.plan.plan import Plan
from distributed_training.plan.sources import find_sources
from distributed_training.predict.predict import predict
from distributed_training.predict.stages import with_orders
from distributed_training.settings.config import RunConfig, describe_work
from distributed_training.settings.strategies import load_strategy


def decide_plan(
    config: RunConfig,
    machine: Machine,
    num_processes: int,
    processes_here: int,
    cut: Callable[[Plan], Data | None],
) -> Plan:
    """Decide and check everything about a run; raise UserError at the first obstacle.

    What may have to be downloaded comes last. `cut` gives the run's samples, where they are wanted.
    """
    plan = with_prediction(draft_plan(config, machine, num_processes, processes_here))
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
    there = {path.name for path in (plan.output_dir / ".cache" / "tokens").glob("*")}
    if data := cut(plan):
        plan = fit_to_data(plan, data)
        if plan.cache in there:
            plan = with_prediction(plan, tokenised=True)
    return with_orders(plan)


def draft_plan(
    config: RunConfig, machine: Machine, num_processes: int, processes_here: int
) -> Plan:
    """Decide what follows from CONFIG and the machine; check only that the layout exists."""
    requested, notes = config, list[str]()
    config = choose_model(config, machine, notes)
    config = choose_spread(config, machine, num_processes, processes_here, notes)
    strategy = load_strategy(config)
    mesh = fill_mesh(strategy, num_processes, config)
    config = choose_settings(config, machine, strategy, mesh, notes)
    plan = lay_out(config, strategy, mesh, machine, processes_here)
    return replace(plan, requested=requested, notes=[*notes, *plan.notes])


def with_prediction(plan: Plan, *, tokenised: bool = False) -> Plan:
    """The plan with what it is predicted to need and take."""
    rates = machine_rates(plan.machine, plan.processes_here)
    found = predict(plan, rates, tokenised=tokenised)
    return replace(plan, prediction=found.as_record())
