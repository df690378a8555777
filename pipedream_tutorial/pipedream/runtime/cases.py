"""What one start of the runtime runs: every schedule at every size, and orders to be found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipedream.errors import UserError
from pipedream.runtime.channels import connection_to
from pipedream.runtime.prediction import MeasuredRun, calibrate, recut
from pipedream.schedules.catalogue import FOUND, schedule_for_training
from pipedream.schedules.ops import Schedule, repeat
from pipedream.schedules.policies import POLICIES, Policy
from pipedream.simulate.search import search
from pipedream.simulate.simulator import load_order

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One schedule at one number of microbatches."""

    name: str
    num_microbatches: int
    schedule: Schedule
    """Orders over all batches."""
    policy: Policy
    memory: int | None = None
    """Of an order that is still to be found: microbatches that a rank may hold. Until then
    `schedule` is 1F1B, which has the same stages and neighbours."""


def build_cases(config: Config) -> list[Case]:
    """Every schedule at every number of microbatches, and a search for every limit on memory.

    Raises UserError for what cannot be trained, and for a search that has no durations to go by.
    """
    cases = []
    for name in config["schedule"]:
        limits = (config["memory"] or [config["num_stages"]]) if name == "search" else [None]
        for limit in limits:
            for m in config["num_microbatches"]:
                schedule, policy = _orders_of("1f1b" if limit else name, config, m)
                case = Case(
                    name=f"{FOUND}{limit}" if limit else name,
                    num_microbatches=m,
                    schedule=schedule,
                    policy=policy,
                    memory=limit,
                )
                cases.append(case)
    if any(case.memory for case in cases):
        _check_first(config["schedule"][0], cases[0])
    return cases


def _check_first(name: str, case: Case) -> None:
    if case.memory or not case.schedule.cuts_backward:
        what = "nothing runs" if case.memory else f"{name} does not cut its backward passes"
        raise UserError(
            f"schedule=search takes measured times of F, I and W, and {what} before it",
            "set schedule=zb-h1,search",
        )


def _orders_of(name: str, config: Config, m: int) -> tuple[Schedule, Policy]:
    """The orders over all batches of a schedule that has a name, or of a CSV's."""
    p, num_batches = config["num_stages"], config["num_batches"]
    if not name.lower().endswith(".csv"):
        return schedule_for_training(name, p, m, num_batches)
    batch = load_order(Path(name))
    if (batch.num_ranks, batch.num_microbatches) != (p, m):
        raise UserError(
            f"{name} has {batch.num_ranks} ranks and {batch.num_microbatches} microbatches",
            f"set num_stages={batch.num_ranks} and num_microbatches={batch.num_microbatches}",
        )
    return repeat(batch, num_batches), POLICIES["flush"]


def found_case(config: Config, case: Case, runs: Sequence[MeasuredRun]) -> Case:
    """The case with the shortest order for the measured times that rank 0 finds, on all ranks."""
    found: list[Schedule | None] = [None]
    if dist.get_rank() == 0:
        chosen = calibration(runs, config)
        assert chosen is not None
        assert case.memory is not None
        costs = recut(calibrate(chosen.events, chosen.schedule), config["num_stages"])
        found = [search(costs, case.num_microbatches, case.memory).schedule]
    with connection_to("the other stages"):
        dist.broadcast_object_list(found)
    assert found[0] is not None
    return replace(case, schedule=repeat(found[0], config["num_batches"]))


def calibration(runs: Sequence[MeasuredRun], config: Config) -> MeasuredRun | None:
    """The run that durations are from, once it has been run."""
    return next((run for run in runs if run.num_microbatches == config["calibrate_on"]), None)
