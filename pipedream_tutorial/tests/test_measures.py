"""Idle time, activations and the critical path against counting on the clock."""

import random
from fractions import Fraction
from itertools import pairwise

import pytest
from pipedream.errors import UserError
from pipedream.schedules.catalogue import SCHEDULES, build_schedule
from pipedream.schedules.ops import Op, Schedule, one_chain
from pipedream.simulate.measures import activation_steps, idle, peak_activations
from pipedream.simulate.simulator import Costs, Timeline, build_costs, simulate


def random_timelines(name: str, count: int = 12) -> list[Timeline]:
    """Uneven stages and a time to send, over sizes that the schedule takes."""
    rng, found = random.Random(name), []
    while len(found) < count:
        try:
            s = build_schedule(name, rng.randint(1, 5), rng.randint(1, 12), rng.randint(1, 3))
        except UserError:
            continue
        n = len(s.chains[0])
        f, i, w = (
            tuple(Fraction(rng.randint(1, 12), rng.randint(1, 4)) for _ in range(n)) for _ in "FIW"
        )
        costs = Costs(
            forward=f,
            input_gradient=i,
            weight_gradient=w,
            communication=Fraction(rng.randint(0, 3), 2),
            overlap_saving=Fraction(rng.randint(0, 2), 2),
        )
        found.append(simulate(s, costs))
    return found


def test_a_rank_without_operations_idles_throughout() -> None:
    s = Schedule(name="one", orders=((Op("F", 0, 0), Op("B", 0, 0)), ()), chains=one_chain(1))
    measured = idle(simulate(s, build_costs(s)))
    assert measured.makespan == measured.span == (0, 3)
    assert measured.makespan_fraction == Fraction(1, 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_idle_time_is_the_sum_of_the_gaps(name: str) -> None:
    for t in random_timelines(name):
        measured = idle(t)
        gaps = [sum((b.start - a.end for a, b in pairwise(line)), Fraction(0)) for line in t.events]
        assert list(measured.span) == gaps
        edges = [line[0].start + t.makespan - line[-1].end for line in t.events]
        assert list(measured.makespan) == [g + e for g, e in zip(gaps, edges, strict=True)]
        total = t.makespan * len(t.events)
        assert measured.makespan_fraction == sum(measured.makespan) / total
        assert measured.span_fraction * (total - sum(edges)) == sum(gaps)
        assert 0 <= measured.makespan_fraction < 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_are_those_between_a_forward_and_its_last_backward(name: str) -> None:
    for t in random_timelines(name):
        v = t.schedule.stages_per_rank
        steps, peaks = activation_steps(t.schedule), peak_activations(t.schedule)
        for rank, line in enumerate(t.events):
            assert steps[rank][-1][1] == 0
            assert all(held >= 0 for _, held in steps[rank])
            assert [op for op, _ in steps[rank]] == [op for e in line for op in e.item.parts]
            # On the clock: from the start of its forward to the end of its B or W.
            born = {op[1:]: e.start for e in line for op in e.item.parts if op.kind == "F"}
            freed = {op[1:]: e.end for e in line for op in e.item.parts if op.kind in "BW"}
            assert born.keys() == freed.keys()
            most = max(sum(born[k] <= at < freed[k] for k in born) for at in born.values())
            assert peaks[rank] == Fraction(most, v)
