"""What the pictures show, computed: every schedule at one size, and idle shares against m."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from pipedream.errors import UserError
from pipedream.schedules.catalogue import SCHEDULES, build_schedule
from pipedream.schedules.closed_forms import idle_fraction
from pipedream.schedules.ops import FORWARD, Schedule
from pipedream.schedules.policies import WeightUse
from pipedream.simulate.comparison import Case, Refused, Row, closed_form, compare, measure
from pipedream.simulate.simulator import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One schedule, and its idle share when batch follows batch for ever."""

    row: Row
    period: Fraction
    """Time that one more batch takes at the end of a stream of batches."""
    steady_idle: Fraction
    """Share of all ranks' time that is idle in one period, 0 to 1."""


def standings(case: Case) -> tuple[list[Standing], list[Refused]]:
    """All schedules at one size, and those that this size does not allow.

    The rows' streams have 2 batches. The period is half of what two further batches add; orders
    repeat from batch to batch, so that fill and drain drop out of the difference.
    """
    found, refused = [], []
    for row in compare(replace(case, num_batches=2)):
        if isinstance(row, Refused):
            refused.append(row)
            continue
        longer = measure(row.name, replace(case, num_batches=4))
        period = (longer.stream_makespan - row.stream_makespan) / 2
        share = 1 - busy(row.batch) / (case.num_stages * period)
        found.append(Standing(row=row, period=period, steady_idle=share))
    return found, refused


def busy(timeline: Timeline) -> Fraction:
    """Time that all ranks together spend on operations."""
    return sum((event.end - event.start for event in timeline.all_events()), Fraction(0))


def forwards_only(schedule: Schedule) -> Schedule:
    """The same orders without backward passes."""
    orders = tuple(
        tuple(op for item in order for op in item.parts if op.kind == FORWARD)
        for order in schedule.orders
    )
    return replace(schedule, orders=orders)


def same_orders(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows grouped by what one batch looks like: PipeDream's policies share 1F1B's order."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.batch.schedule.orders, []).append(row)
    return list(groups.values())


class IdleShares(NamedTuple):
    """Idle shares of one batch, 0 to 1."""

    microbatches: int
    makespan: Fraction
    span: Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleCurve:
    """Idle shares of one schedule, or of several that have the same, against m."""

    titles: tuple[str, ...]
    simulated: tuple[IdleShares, ...]
    """For each number of microbatches that is allowed."""
    closed: tuple[IdleShares, ...]
    """The same by the closed forms, at more values of m, where they hold."""


def idle_curves(
    names: Sequence[str], case: Case, counts: Sequence[int], closed_counts: Sequence[int]
) -> list[IdleCurve]:
    """Idle shares simulated at `counts` and by closed form at `closed_counts`.

    Closed forms are for even stages without communication or overlap; for other cases there are
    none. Schedules that agree everywhere share a curve.
    """
    titles: dict[tuple[tuple[IdleShares, ...], tuple[IdleShares, ...]], list[str]] = {}
    for name in names:
        simulated = []
        for m in counts:
            try:
                row = measure(name, replace(case, num_microbatches=m, num_batches=1))
            except UserError:
                continue
            shares = row.batch_idle
            simulated.append(IdleShares(m, shares.makespan_fraction, shares.span_fraction))
        closed = _closed_shares(name, case, closed_counts)
        if simulated:
            titles.setdefault((tuple(simulated), closed), []).append(SCHEDULES[name].title)
    return [
        IdleCurve(titles=tuple(found), simulated=simulated, closed=closed)
        for (simulated, closed), found in titles.items()
    ]


def _closed_shares(name: str, case: Case, counts: Sequence[int]) -> tuple[IdleShares, ...]:
    p, found = case.num_stages, []
    for m in counts:
        known = closed_form(name, replace(case, num_microbatches=m))
        if known is None or not known[0].idle_holds(known[1]):
            continue
        try:
            build_schedule(name, p, m, case.chunks)
        except UserError:
            continue
        form, sizes = known
        span = sum((form.span_idle(sizes, r) for r in range(p)), Fraction(0)) / p
        idle_times = (form.makespan_idle(sizes), span)
        found.append(IdleShares(m, *(idle_fraction(idle_time, sizes) for idle_time in idle_times)))
    return tuple(found)


def wrong_backwards(use: dict[int, WeightUse]) -> set[tuple[int, int]]:
    """(stage, microbatch) whose backward pass sees other weights than its forward pass did."""
    return {
        (stage, i)
        for stage, one in use.items()
        for i, version in one.backward.items()
        if version != one.forward[i]
    }
