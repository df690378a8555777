"""From CONFIG and a machine to the plan of a run that starts afresh. No torch import."""

import functools
from collections.abc import Callable
from dataclasses import replace

from distributed_training.advise.checks import run_checks
from distributed_training.advise.rank import choose_spread, what_fits
from distributed_training.data.samples import Data
from distributed_training.plan.choose import choose_model
from distributed_training.plan.data import find_sources, fit_to_data
from distributed_training.plan.plan import Plan
from distributed_training.predict.predict import lay_out_on, predict, this_machine
from distributed_training.settings.config import RunConfig
from distributed_training.settings.machine import GIB, Machine


def decide_plan(
    config: RunConfig,
    machine: Machine,
    num_processes: int,
    processes_here: int,
    cut: Callable[[Plan], Data | None],
) -> Plan:
    """Decide and check everything (`run.prepare.make_plan`), what may be downloaded last."""
    cluster = this_machine(machine, num_processes, processes_here)
    plan = draft_plan(config, machine, num_processes, processes_here)
    prediction = predict(plan, cluster.rates)
    run_checks(prediction, functools.partial(what_fits, cluster=cluster))
    plan = find_sources(plan)
    if plan.weights_dir is not None:
        plan.model.check_weights(plan.weights_dir)
    known = {path.name for path in (plan.output_dir / ".cache" / "tokens").glob("*")}
    data = cut(plan)
    if data is not None:
        plan = fit_to_data(plan, data)
    if plan.cache in known:
        prediction = predict(plan, cluster.rates, tokenised=True)
    if plan.strategy.traits.takes_deepspeed_json:
        from distributed_training.plan.deepspeed_json import fill_deepspeed_json

        plan = replace(plan, deepspeed_json=fill_deepspeed_json(plan))
    notes = list(plan.notes)
    if prediction.room == "tight":
        notes.append(
            "memory is near the edge: runs of this kind have needed up to "
            f"{prediction.memory.likely_bytes[1] / GIB:.1f} GiB a GPU"
        )
    return replace(plan, prediction=prediction.as_record(), notes=notes)


def draft_plan(
    config: RunConfig, machine: Machine, num_processes: int, processes_here: int
) -> Plan:
    """Decide what follows from CONFIG and the machine; check only that the layout exists."""
    cluster = this_machine(machine, num_processes, processes_here)
    notes: list[str] = []
    decided = choose_model(config, machine, num_processes, notes)
    decided = choose_spread(decided, cluster, notes)
    if config.checkpoint_every == 0:
        notes.append("checkpoint_every=0: nothing will be saved, not on Ctrl-C either")
    plan = lay_out_on(cluster, decided)
    return replace(plan, requested=config, notes=notes + plan.notes)
