"""Compare the time and memory of recomputation (R before every backward pass) with closed forms."""

import random
from collections import Counter
from fractions import Fraction

import pytest
from pipedream.errors import UserError
from pipedream.schedules.closed_forms import CLOSED_FORMS, ClosedFormInputs, fill_and_drain_idle
from pipedream.schedules.ops import Schedule, with_recomputation
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.simulate.measures import idle, peak_activations
from pipedream.simulate.simulator import Timeline, build_costs, simulate
from pipedream.simulate.trace import find_input_ops

SIZES = [(1, 2), (2, 4), (3, 6), (4, 8), (4, 4), (6, 12)]
KEPT = Fraction(1, 20)


def built(name: str) -> list[tuple[ClosedFormInputs, Schedule]]:
    """Return a case with random durations, and its schedule, for each size that the schedule
    allows."""
    rng, found = random.Random(name), []
    for p, m in SIZES:
        f, i, w = (Fraction(rng.randint(1, 12), rng.randint(1, 4)) for _ in range(3))
        try:
            found.append((ClosedFormInputs(p, m, 2, f, i, w), build_schedule(name, p, m)))
        except UserError:
            continue
    assert len(found) >= 3
    return found


def timed(
    schedule: Schedule, c: ClosedFormInputs, communication: Fraction = Fraction(0)
) -> Timeline:
    costs = build_costs(
        schedule, forward=c.f, input_gradient=c.i, weight_gradient=c.w, communication=communication
    )
    return simulate(schedule, costs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_recomputation_precedes_the_backward_and_delays_it_by_at_most_its_duration(
    name: str,
) -> None:
    for c, schedule in built(name):
        recomputed = with_recomputation(schedule, KEPT)
        counts = Counter(op.kind for op in recomputed.ops())
        assert counts["R"] == counts["F"] == counts["B"] + counts["I"]
        before, after = (timed(s, c, c.f / 3) for s in (schedule, recomputed))
        times, ranks = after.times, recomputed.rank_by_op()
        for op in recomputed.ops():
            if op.kind == "R":
                backward = next(b for b in (op._replace(kind=k) for k in "BI") if b in times)
                assert ranks[op] == ranks[backward]
                assert times[op._replace(kind="F")][1] <= times[op][0]
                assert times[op][1] <= times[backward][0]
                assert times[op][1] - times[op][0] == c.f / recomputed.stages_per_rank
        longest = before.makespan + c.p * c.m * c.f  # as if no R overlapped with other operations
        assert before.makespan < after.makespan <= longest
        assert find_input_ops(recomputed) == find_input_ops(schedule)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_recomputation_adds_m_forward_passes_and_no_idle_time(name: str) -> None:
    """R waits for no other rank, so idle times are the same with and without R."""
    for c, schedule in built(name):
        found = timed(with_recomputation(schedule, KEPT), c)
        assert set(idle(found).makespan) == {fill_and_drain_idle(c)}
        assert found.makespan == (c.m + c.p - 1) * c.total + c.m * c.f


@pytest.mark.parametrize(
    "name", ["naive", "gpipe", "1f1b", "eager-1f1b", "interleaved", "pipedream"]
)
@pytest.mark.parametrize("kept", [Fraction(0), KEPT, Fraction(1)])
def test_peak_activations_of_schedules_with_unsplit_backward_passes(
    name: str, kept: Fraction
) -> None:
    """A rank holds all activations of one stage while that stage runs F or B. For the other stages,
    it holds only the kept share."""
    form = CLOSED_FORMS[name]
    for c, schedule in built(name):
        v = schedule.stages_per_rank
        if SCHEDULES[name].policy == "flush" or c.m >= c.p:
            held = [form.peak_activations(c, r) for r in range(c.p)]
            expected = [(1 + (stages * v - 1) * kept) / v for stages in held]
            assert list(peak_activations(with_recomputation(schedule, kept))) == expected


@pytest.mark.parametrize(("name", "ahead"), [("zb-h1", 1), ("zb-h2", 2)])
def test_a_late_weight_gradient_keeps_recomputed_activations(name: str, ahead: int) -> None:
    """All activations of a microbatch are held from R to the late W, so recomputation does not
    reduce the peak of the last rank."""
    for c, schedule in built(name):
        found = peak_activations(with_recomputation(schedule, KEPT))
        max_held = min(c.m, c.p if ahead == 1 else 2 * c.p - 1)
        full_held = [min(c.m, ahead * r + 1) for r in range(c.p)]
        assert list(found) == [held + (max_held - held) * KEPT for held in full_held]
        assert found[-1] == peak_activations(schedule)[-1]
