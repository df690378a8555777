"""Test invariants for random orders and durations, and errors for orders that cannot run."""

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipedream.errors import UserError
from pipedream.lecture.pictures import run
from pipedream.schedules.ops import Op, Schedule
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.simulate.simulator import Costs, DeadlockError, Timeline, build_costs, simulate

# Use the same examples on every machine and in every run.
FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=80)
DURATIONS = st.fractions(Fraction(1, 40), 8, max_denominator=40)


@st.composite
def schedules(draw: Callable[[Any], Any]) -> Schedule:
    name = draw(st.sampled_from(list(SCHEDULES)))
    p, m, v = draw(st.integers(1, 5)), draw(st.integers(1, 11)), draw(st.integers(1, 3))
    try:
        return build_schedule(name, p, m, v)
    except UserError:
        assume(False)
        raise


@st.composite
def timelines(draw: Callable[[Any], Any], overlap: bool = True) -> Timeline:
    """Generate a timeline with uneven stages, communication time and, if requested, overlapping
    pairs."""
    schedule = draw(schedules())
    n = schedule.num_stages
    by_stage = st.tuples(*[DURATIONS] * n)
    costs = Costs(
        forward=draw(by_stage),
        input_gradient=draw(by_stage),
        weight_gradient=draw(by_stage),
        communication=draw(st.sampled_from([Fraction(0), Fraction(1, 3), Fraction(5)])),
        overlap_saving=draw(st.fractions(0, 1, max_denominator=4)) if overlap else Fraction(0),
    )
    return simulate(schedule, costs)


def ends(timeline: Timeline) -> dict[Op, Fraction]:
    return {op: event.end for event in timeline.events for op in event.item.parts}


@FIXED
@given(schedules())
def test_each_microbatch_passes_each_stage_once_forward_and_once_backward(s: Schedule) -> None:
    kinds: dict[tuple[int, int], list[str]] = {}
    for op in s.ops():
        kinds.setdefault((op.stage, op.microbatch), []).append(op.kind)
    assert all(sorted(found) in (["B", "F"], ["F", "I", "W"]) for found in kinds.values())
    # Microbatches are numbered from 0.
    n = s.num_stages
    for i in range(s.num_microbatches):
        stages = sorted(stage for stage, j in kinds if j == i)
        assert stages == list(range(n))
    assert len({rank for op, rank in s.rank_by_op().items() if op.stage == 0}) == 1


@FIXED
@given(timelines())
def test_operations_wait_for_what_they_need_and_start_as_soon_as_they_can(t: Timeline) -> None:
    end, rank_of, c = ends(t), t.schedule.rank_by_op(), t.costs.communication
    n = t.schedule.num_stages
    for rank in range(t.schedule.num_ranks):
        line = [event for event in t.events if event.rank == rank]
        for before, event in zip((None, *line), line, strict=False):
            inputs = [Fraction(0)] if before is None else [before.end]
            for kind, stage, i in event.item.parts:
                k = stage % n
                if kind == "F":
                    wanted = [Op("F", stage - 1, i)] if k else []
                elif kind == "W":
                    wanted = [Op("I", stage, i)]
                else:
                    after = [Op(kind, stage + 1, i) for kind in "BI" if k + 1 < n]
                    wanted = [Op("F", stage, i), *[op for op in after if op in end]]
                    assert len(wanted) == 2 or not after
                inputs += [end[op] + (c if rank_of[op] != event.rank else 0) for op in wanted]
            assert event.start == max(inputs)
            assert event.end == event.start + t.costs.duration(event.item)


@FIXED
@given(schedules(), st.data())
def test_swapping_two_operations_runs_or_reports_a_real_cycle(
    s: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, s.num_ranks - 1))
    orders = [list(order) for order in s.orders]
    positions = st.integers(0, len(orders[rank]) - 1)
    a, b = data.draw(positions), data.draw(positions)
    orders[rank][a], orders[rank][b] = orders[rank][b], orders[rank][a]
    broken = replace(s, orders=tuple(map(tuple, orders)))
    try:
        result: Timeline | DeadlockError = simulate(broken, build_costs(broken))
    except DeadlockError as error:
        result = error
    if isinstance(result, Timeline):
        assert len(result.events) == sum(len(order) for order in s.orders)
        return
    # Each rank waits for the current or a later operation of the next rank in the cycle.
    matches = re.findall(r"is at (\d+)(\w)(\d+), which needs", str(result))
    cycle = [Op(kind, int(stage), int(i)) for stage, kind, i in matches]
    ranks = [broken.rank_by_op()[op] for op in cycle]
    assert len(set(ranks)) == len(ranks) >= 1
    for k, stuck in enumerate(cycle):
        following = (k + 1) % len(ranks)
        order = broken.orders[ranks[following]]
        position = next(n for n, item in enumerate(order) if cycle[following] in item.parts)
        to_come = {op for item in order[position:] for op in item.parts}
        assert to_come & set(broken.needs(stuck))
        assert f"rank {ranks[k]} is at {stuck}, which needs" in str(result)


@pytest.mark.parametrize("name", SCHEDULES)
def test_missing_and_duplicate_operations_are_named(name: str) -> None:
    s = build_schedule(name, 2, 4)
    for rank, order in enumerate(s.orders):
        for k, item in enumerate(order):
            for edited in (order[:k] + order[k + 1 :], (*order[:k], item, *order[k:])):
                orders = (*s.orders[:rank], edited, *s.orders[rank + 1 :])
                with pytest.raises(ValueError, match="|".join(str(op) for op in item.parts)):
                    run(replace(s, orders=orders))


def test_costs_are_divided_among_a_ranks_stages_and_scaled_per_stage() -> None:
    s = build_schedule("interleaved", 2, 2, 3)
    costs = build_costs(s, forward=6, input_gradient=3, stage_scale=[1, 1, 1, 1, 1, "1/2"])
    assert costs.forward == (2, 2, 2, 2, 2, 1)
    assert costs.input_gradient == (1, 1, 1, 1, 1, Fraction(1, 2))
    with pytest.raises(ValueError, match="3 factors for 2 ranks"):
        build_costs(s, stage_scale=[1, 2, 3])
