"""Compute the numbers in the comparison tables. All schedules run the same model and
microbatches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pipedream_simple import DURATIONS

from pipedream.errors import UserError
from pipedream.schedules.closed_forms import CLOSED_FORMS, ClosedForm, ClosedFormInputs
from pipedream.schedules.ops import Schedule, repeat
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.schedules.policies import ONE_VERSION, POLICIES, Policy, WeightUse, weight_use
from pipedream.simulate.measures import Idle, idle, peak_activations
from pipedream.simulate.search import search
from pipedream.simulate.simulator import (
    Timeline,
    build_costs,
    check_scale,
    ends_of_repeats,
    load_order,
    simulate,
)

Config = Mapping[str, Any]
"""The checked CONFIG from `python -m pipedream`: sizes and durations that all schedules share."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Results for one schedule, both for a single batch and for consecutive batches (the stream).
    Numbers are computed when they are first used."""

    name: str
    title: str
    policy: Policy
    config: Config
    batch: Timeline  # one batch from an empty pipeline to an empty pipeline
    bound: Fraction | None = None  # lower bound on the makespan, only for an order from a search

    @property
    def flushes(self) -> bool:
        return self.policy is POLICIES["flush"]

    @cached_property
    def stream(self) -> Timeline:
        """Timeline of CONFIG's `num_batches` batches. If the policy needs no flush, one order
        covers all batches. Otherwise, the order of one batch is repeated, and each rank starts a
        batch as soon as it has finished the previous batch."""
        count = self.config["num_batches"]
        if self.flushes:
            return simulate(repeat(self.batch.schedule, count), self.batch.costs)
        m = self.config["num_microbatches"]
        return measure(self.name, {**self.config, "num_microbatches": m * count}).batch

    @cached_property
    def _ends(self) -> list[int]:
        """Tick at which each rank ends the stream. With flushes, the ticks are computed from a
        single batch."""
        if self.flushes:
            return ends_of_repeats(self.batch, self.config["num_batches"])
        return [ends[-1] for ends in self.stream.ends]

    @property
    def stream_makespan(self) -> Fraction:
        return max(self._ends) * self.batch.tick

    @cached_property
    def batch_idle(self) -> Idle:
        return idle(self.batch)

    @cached_property
    def stream_idle(self) -> Idle:
        return idle(self.batch, self._ends, self.config["num_batches"])

    @cached_property
    def steady_idle(self) -> Fraction:
        """Idle share of all ranks' time, from 0 to 1, if batches follow each other forever. The
        share is computed from the difference between four and two batches, which cancels the time
        for filling and draining."""
        rows = [replace(self, config={**self.config, "num_batches": n}) for n in (2, 4)]
        two, four = (row.stream_makespan for row in rows)
        busy = (1 - self.batch_idle.makespan_fraction) * self.batch.makespan
        return 1 - 2 * busy / (four - two)

    @property
    def _peak_schedule(self) -> Schedule:
        """Schedule that determines the peak memory: one batch if it ends with a flush, otherwise
        the stream."""
        return (self.batch if self.flushes else self.stream).schedule

    @cached_property
    def peak_activations(self) -> tuple[Fraction, ...]:
        """Peak activations of each rank over the stream. The unit is the activations of one
        microbatch on all of a rank's layers."""
        return peak_activations(self._peak_schedule)

    @cached_property
    def _weight_use(self) -> dict[int, WeightUse]:
        """Weight versions of each stage, in the order of the stages."""
        if self.flushes:  # needs no simulation
            batch = self.batch.schedule
            return dict.fromkeys(range(batch.num_stages), ONE_VERSION)
        return weight_use(self._peak_schedule, self.policy, self.batch.schedule.num_microbatches)

    @property
    def peak_versions(self) -> tuple[int, ...]:
        """Highest number of weight versions that each stage keeps. The stages are in the model's
        order."""
        return tuple(use.peak_versions for use in self._weight_use.values())

    @property
    def staleness(self) -> tuple[int, ...]:
        """For each stage, the largest number of updates between the version that a microbatch uses
        and the microbatch's own update."""
        return tuple(max(use.staleness.values()) for use in self._weight_use.values())

    @property
    def weight_copies(self) -> tuple[Fraction, ...]:
        """Parameters that each rank keeps, in units of a rank's share of the model."""
        schedule = self._peak_schedule
        version_counts = (
            sum(self._weight_use[stage].peak_versions for stage in stages)
            for stages in schedule.stages_by_rank()
        )
        return tuple(Fraction(count, schedule.stages_per_rank) for count in version_counts)

    @property
    def mixes_versions(self) -> bool:
        """True if a backward pass and its forward pass use different weights."""
        return any(use.backward != use.forward for use in self._weight_use.values())


class Refused(NamedTuple):
    """A schedule that the given sizes do not allow."""

    title: str
    reason: str


def compare(config: Config) -> Iterator[Row | Refused]:
    """Yield a row for each schedule in SCHEDULES, or the reason why the schedule is impossible."""
    check_scale(config["stage_scale"], config["num_stages"])
    return _rows(config)


def _rows(config: Config) -> Iterator[Row | Refused]:
    row: Row | None = None
    for name, entry in SCHEDULES.items():
        try:
            if row is None or SCHEDULES[row.name].orders is not entry.orders:
                row = measure(name, config)
            else:  # PipeDream's weight policies differ only in these values
                stream = row.stream
                row = replace(row, name=name, title=entry.title, policy=POLICIES[entry.policy])
                vars(row)["stream"] = stream
            _ = row.staleness  # raises UserError if 2BW has too few microbatches
            yield row
        except UserError as error:
            yield Refused(entry.title, str(error))


def measure(name: str, config: Config) -> Row:
    """Return the row for `name`: a schedule's name, the path of a CSV file, or "search". For
    "search", the row shows the best order found within CONFIG's memory limit. A CSV file determines
    the numbers of ranks and microbatches. Raises UserError if the schedule does not allow the
    sizes, or if the orders in a CSV file are incomplete or would deadlock."""
    p, m = config["num_stages"], config["num_microbatches"]
    durations = {key: config[key] for key in (*DURATIONS, "overlap_saving", "stage_scale")}
    policy = "flush"
    bound = None
    if name in SCHEDULES:
        title = SCHEDULES[name].title
        policy = SCHEDULES[name].policy
        schedule = build_schedule(name, p, m, config["chunks"])
    elif name == "search":
        memory = config["memory"] or p
        costs = build_costs(build_schedule("1f1b", p, m), **durations)
        result = search(costs, m, memory)
        title = f"Search, {memory} in memory"
        schedule = result.schedule
        bound = result.lower_bound
    else:
        title = Path(name).name
        schedule = load_order(Path(name))
    return Row(
        name=name,
        title=title,
        policy=POLICIES[policy],
        config=config,
        batch=simulate(schedule, build_costs(schedule, **durations)),
        bound=bound,
    )


def closed_form(name: str, config: Config) -> tuple[ClosedForm, ClosedFormInputs] | None:
    """Return the schedule's closed form and the arguments of its formulas, or None if no closed
    form applies. There is no closed form for a CSV file, uneven stages, communication time,
    or overlap."""
    scale = config["stage_scale"] or [Fraction(1)]
    if (
        name not in CLOSED_FORMS
        or len(set(scale)) > 1
        or config["communication"]
        or (config["overlap_saving"] and name == "dualpipe-v")
    ):
        return None
    sizes = config["num_stages"], config["num_microbatches"], config["chunks"]
    f, i, w, _ = (scale[0] * config[key] for key in DURATIONS)
    return CLOSED_FORMS[name], ClosedFormInputs(*sizes, f, i, w)
