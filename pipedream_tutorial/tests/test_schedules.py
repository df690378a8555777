"""Test orders, rejected sizes, and exact times with uneven stages, communication and consecutive
batches."""

import random
from fractions import Fraction
from itertools import pairwise

import pytest
from pipedream.errors import UserError
from pipedream.schedules.closed_forms import CLOSED_FORMS, ClosedFormInputs
from pipedream.schedules.ops import Op, Schedule, repeat
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.simulator import Costs, Timeline, build_costs, simulate


def drawn(rng: random.Random, count: int) -> tuple[Fraction, ...]:
    return tuple(Fraction(rng.randint(1, 24), rng.randint(1, 4)) for _ in range(count))


def uneven(
    schedule: Schedule,
    forward: tuple[Fraction, ...],
    backward: tuple[Fraction, ...],
    communication: Fraction = Fraction(0),
) -> Timeline:
    """Simulate a schedule with unsplit backward passes. `forward` and `backward` list the durations
    of whole passes by stage."""
    costs = Costs(
        forward=forward,
        input_gradient=tuple(b / 3 for b in backward),
        weight_gradient=tuple(2 * b / 3 for b in backward),
        communication=communication,
    )
    return simulate(schedule, costs)


EXPECTED_ORDERS = {
    ("naive", 2, 2): ("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"),
    ("zb-h2", 2, 3): ("0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"),
    # The authors' zbv_greedy.py gives these orders.
    ("v-half", 3, 4): (
        "0F0 0F1 0F2 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 0F3 5F2 "
        "5I2 5W2 0I1 0W1 5F3 5I3 0I2 5W3 0W2 0I3 0W3",
        "1F0 1F1 4F0 4F1 4I0 4W0 1F2 1I0 4I1 4W1 4F2 1W0 1F3 "
        "1I1 4I2 4W2 4F3 1W1 1I2 4I3 4W3 1W2 1I3 1W3",
        "2F0 3F0 2F1 3F1 3I0 3W0 2I0 2W0 2F2 3F2 3I1 2I1 3W1 "
        "2F3 2W1 3F3 3I2 2I2 3W2 2W2 3I3 2I3 3W3 2W3",
    ),
    ("v-min", 3, 4): (
        "0F0 0F1 0F2 5F0 5I0 5W0 5F1 0I0 5I1 5W1 0W0 5F2 0F3 "
        "0I1 5I2 5W2 0W1 5F3 5I3 0I2 5W3 0W2 0I3 0W3",
        "1F0 1F1 4F0 4F1 4I0 4W0 1I0 1F2 1W0 4I1 4F2 4W1 1I1 "
        "1F3 1W1 4I2 4F3 4W2 1I2 4I3 4W3 1W2 1I3 1W3",
        "2F0 3F0 2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 "
        "2W1 2F3 3F3 3I2 2I2 3W2 2W2 3I3 2I3 3W3 2W3",
    ),
}


@pytest.mark.parametrize("name_and_sizes", EXPECTED_ORDERS, ids=lambda key: key[0])
def test_small_orders_match_the_figures_in_the_papers(name_and_sizes: tuple[str, int, int]) -> None:
    s = build_schedule(*name_and_sizes)
    assert tuple(" ".join(map(str, order)) for order in s.orders) == EXPECTED_ORDERS[name_and_sizes]


@pytest.mark.parametrize(
    ("name", "p", "m", "words"),
    [
        ("dualpipe-v", 4, 7, "at least 2 microbatches per rank, not 7.*to 8"),
        ("interleaved", 2, 7, "use a multiple of 2, such as 6 or 8"),
        ("1f1", 2, 2, "unknown schedule '1f1'; did you mean '1f1b'"),
    ],
)
def test_unsupported_sizes_are_refused(name: str, p: int, m: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_schedule(name, p, m)


def test_gpipe_is_limited_by_the_slowest_stage_in_each_direction() -> None:
    """The forward passes and the backward passes each fill the pipeline once and then run at the
    pace of their slowest stage. Every hop adds its time once in each direction."""
    rng = random.Random(1)
    for _ in range(150):
        p, m = rng.randint(1, 7), rng.randint(1, 12)
        f, b, c = drawn(rng, p), drawn(rng, p), drawn(rng, 1)[0] * rng.randint(0, 1)
        expected = sum(f) + sum(b) + (m - 1) * (max(f) + max(b)) + 2 * (p - 1) * c
        assert uneven(build_schedule("gpipe", p, m), f, b, c).makespan == expected


def test_1f1b_is_limited_by_the_slowest_stage() -> None:
    """In the steady state, the time per microbatch is the time for one forward and one backward
    pass of the slowest stage. PipeDream's order is used, because it is 1F1B without a flush."""
    rng = random.Random(3)
    for _ in range(40):
        p = rng.randint(1, 5)
        f, b = drawn(rng, p), drawn(rng, p)
        t = uneven(build_schedule("pipedream", p, 70), f, b)
        by_op = {op: e.end for e in t.events for op in e.item.parts}
        first = [by_op[Op("B", 0, i)] for i in range(50, 70 - p)]
        assert {after - before for before, after in pairwise(first)} == {
            max(map(sum, zip(f, b, strict=True)))
        }


def test_1f1b_pays_for_a_round_trip_every_p_microbatches() -> None:
    """Stage 0 has at most p microbatches in flight, so every p additional microbatches cost
    `2 (p-1)` hops, however well sending overlaps with computing. With a time of c per hop, the cost
    per microbatch is `2 c (p-1) / p`."""
    rng = random.Random(4)
    for p in range(1, 8):
        times = {}
        f, b, c = drawn(rng, 3)
        for m in range(1, 3 * p + 3):
            times[m] = uneven(build_schedule("1f1b", p, m), (f,) * p, (b,) * p, c).makespan
            hops = 2 * (p + m - 2 - -(-(m - 1) // p))
            assert times[m] == (m + p - 1) * (f + b) + hops * c
        if p > 2:  # most microbatches cost two hops, and one in p costs none
            steps = {times[m + 1] - times[m] for m in range(1, 3 * p + 2)}
            assert steps == {f + b, f + b + 2 * c}


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v"])
def test_the_next_batch_fills_the_end_of_a_zero_bubble_schedule(name: str) -> None:
    """Each further batch adds rank 0's computing time, and rank 0's idle time between the first and
    the last operation of a batch. This idle time may be less than the idle time within the makespan
    of one batch."""
    rng, form, num_shorter = random.Random(name), CLOSED_FORMS[name], 0
    for p, m in ((1, 1), (2, 4), (3, 6), (4, 8), (5, 10)):
        s = build_schedule(name, p, m)
        for _ in range(4):
            f, i, w = drawn(rng, 3)
            c = ClosedFormInputs(p, m, 2, f, *((f, f) if name == "zb-v" else (i, w)))
            one = m * c.total + form.makespan_idle(c)
            further = m * c.total + form.span_idle(c, 0)
            costs = build_costs(s, forward=c.f, input_gradient=c.i, weight_gradient=c.w)
            for k in (1, 2, 3):
                found = simulate(repeat(s, k), costs).makespan
                assert found == one + (k - 1) * further
            num_shorter += further < one
    assert num_shorter >= 4
