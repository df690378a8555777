"""Test that every closed form equals the simulated value exactly. Also test sizes and durations for
which the closed forms are not valid."""

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice

import pytest
from pipedream.errors import UserError
from pipedream.schedules.closed_forms import CLOSED_FORMS, ClosedFormInputs, idle_fraction
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.schedules.policies import POLICIES, weight_use
from pipedream.simulate.measures import Idle, idle, peak_activations
from pipedream.simulate.simulator import build_costs, simulate

RANKS = range(1, 9)


def simulated(name: str, c: ClosedFormInputs, overlap_saving: Fraction = Fraction(0)) -> Idle:
    schedule = build_schedule(name, c.p, c.m, c.v)
    durations = {"forward": c.f, "input_gradient": c.i, "weight_gradient": c.w}
    costs = build_costs(schedule, overlap_saving=overlap_saving, **durations)
    return idle(simulate(schedule, costs))


def makespan_idle(name: str, c: ClosedFormInputs) -> Fraction:
    """Return the simulated idle time, which must be equal on all ranks, because all ranks do the
    same work."""
    (value,) = set(simulated(name, c).makespan)
    return value


def cases(
    name: str,
    fits: Callable[[ClosedFormInputs], bool] = lambda c: True,
    ranks: range = RANKS,
    max_per_size: int = 2,
) -> Iterator[ClosedFormInputs]:
    """Yield cases with sizes that the schedule allows, and random durations for which `fits` is
    true. Yield at most `max_per_size` cases per size."""
    rng = random.Random(name)
    for p in ranks:
        sizes = {1, 2, 3, p - 1, p, p + 1, p + 2, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 4 * p} - {0}
        for m in sorted(sizes):
            for v in (1, 2, 3) if name == "interleaved" else (1,):
                try:
                    build_schedule(name, p, m, v)
                except UserError:
                    continue
                drawn = []
                for _ in range(60):
                    times = [Fraction(rng.randint(1, 24), rng.randint(1, 6)) for _ in range(3)]
                    if not rng.randrange(8):
                        times = [times[0], times[0], times[0] * rng.randint(1, 3)]
                    drawn.append(ClosedFormInputs(p, m, v, *times))
                yield from islice(filter(fits, drawn), max_per_size)


def case_with_durations(
    p: int, m: int, v: int = 1, f: int = 1, i: int = 1, w: int = 1
) -> ClosedFormInputs:
    return ClosedFormInputs(p, m, v, Fraction(f), Fraction(i), Fraction(w))


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_idle_time_equals_its_closed_form_within_the_range(name: str) -> None:
    form, num_checked = CLOSED_FORMS[name], 0
    for c in cases(name, form.idle_holds, max_per_size=1 if name == "interleaved" else 2):
        measured = simulated(name, c)
        assert set(measured.makespan) == {form.makespan_idle(c)}, c
        assert list(measured.span) == [form.span_idle(c, r) for r in range(c.p)], c
        assert measured.makespan_fraction == idle_fraction(form.makespan_idle(c), c), c
        num_checked += 1
    assert num_checked >= 24


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_peak_activations_equal_their_closed_form_for_all_sizes(name: str) -> None:
    form, num_checked = CLOSED_FORMS[name], 0
    long_runs_only = SCHEDULES[name].policy != "flush" or name == "v-min"
    for c in cases(name, lambda c: not long_runs_only or c.m >= c.p, max_per_size=1):
        schedule = build_schedule(name, c.p, c.m, c.v)
        expected = tuple(form.peak_activations(c, r) for r in range(c.p))
        assert peak_activations(schedule) == expected, c
        num_checked += 1
    assert num_checked >= 12


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_versions_and_staleness_equal_their_closed_forms(name: str) -> None:
    form, policy = CLOSED_FORMS[name], POLICIES[SCHEDULES[name].policy]
    num_checked = 0
    for c in cases(name, lambda c: c.m >= c.p - 1, range(1, 7), max_per_size=1):
        if SCHEDULES[name].policy == "flush":
            schedule = build_schedule(name, c.p, c.m, c.v)
        else:
            schedule = build_schedule(name, c.p, c.m * max(3, -(-2 * c.p // c.m)))
        for stage, use in weight_use(schedule, policy, c.m).items():
            assert use.peak_versions == form.peak_versions(c, stage), (c, stage)
            expected = {i: form.staleness(c, stage, i) for i in use.staleness}
            assert use.staleness == expected, (c, stage)
        num_checked += 1
    assert num_checked >= 6


def test_zb_h1_formula_beyond_the_published_range() -> None:
    def published(c: ClosedFormInputs) -> Fraction:
        return (c.p - 1) * (c.f + c.i - c.w)

    for c in cases("zb-h1", lambda c: c.m >= c.p > 1):
        own_span, batch_idle = simulated("zb-h1", c).span[0], makespan_idle("zb-h1", c)
        assert (own_span == published(c)) == (c.w <= c.f)
        assert (batch_idle == published(c)) == (c.w <= min(c.f, c.i))
        assert batch_idle >= own_span >= published(c)
        if c.w > c.f:
            assert own_span == (c.p - 1) * c.i
            assert batch_idle == (c.p - 1) * max(c.f, c.i)
    for c in cases("zb-h1", lambda c: c.m < c.p and c.w <= min(c.f, c.i)):
        assert makespan_idle("zb-h1", c) == published(c) + (c.p - c.m) * c.w


def test_torchs_zb_v_has_no_idle_time_only_if_f_i_and_w_take_equally_long() -> None:
    durations = [(f, i, w) for f in (1, 2, 3) for i in (1, 2, 3) for w in (1, 2, 3)]
    for p in (3, 4):
        for f, i, w in durations:
            spans = simulated("zb-v", case_with_durations(p, 2 * p, f=f, i=i, w=w)).span
            assert (set(spans) == {0}) == (f == i == w)
    for c in cases("zb-v", lambda c: c.m >= 2 * c.p - 1 and c.f >= c.w >= c.i):
        assert simulated("zb-v", c).span[0] == (c.p - 1) * (c.f - (c.i + c.w) / 2)


def test_zb_h1_works_with_every_number_of_microbatches() -> None:
    for p in RANKS:
        for m in range(p, 8 * p + 1):
            c = case_with_durations(p, m)
            assert makespan_idle("zb-h1", c) == p - 1
            assert peak_activations(build_schedule("zb-h1", p, m)) == (p,) * p


def test_v_min_and_v_half_hold_a_third_and_a_half_of_1f1bs_activations() -> None:
    """Compare peak activations with the paper's counts, and idle time with the closed forms."""
    for p in range(2, 17):
        for m in (p + 2, 3 * p + 1):
            idle_time = {}
            for name, held in (("v-half", (p + 2) // 2), ("v-min", (p + 4) // 3)):
                schedule = build_schedule(name, p, m)
                assert max(peak_activations(schedule)) == held
                idle_time[name] = makespan_idle(name, case_with_durations(p, m))
                assert simulate(schedule, build_costs(schedule)).makespan - 3 * m == idle_time[name]
            assert idle_time["v-half"] < idle_time["v-min"] or p < 4


def test_dualpipe_v_matches_the_formula_in_its_readme() -> None:
    def readme(c: ClosedFormInputs, saving: Fraction = Fraction(0)) -> Fraction:
        """Return the bubble according to DualPipe's README, `(PP/2 - 1) (F&B + B - 3W)` with `PP =
        2p` stages. A rank has two stages, so a stage's durations are half of the rank's durations.
        `saving` is the share of the shorter pass that is hidden when F and B overlap."""
        pair = c.f + c.backward - saving * min(c.f, c.backward)
        return (c.p - 1) * (pair + c.backward - 3 * c.w) / 2

    for c in cases("dualpipe-v", lambda c: c.f >= c.i):
        assert (
            makespan_idle("dualpipe-v", c)
            == readme(c) + (c.p - 1) * ((c.f - c.i) + max(Fraction(0), c.w - c.i)) / 2
        )
    for c in cases("dualpipe-v", lambda c: c.f < c.i):
        closed = CLOSED_FORMS["dualpipe-v"].makespan_idle(c)
        assert makespan_idle("dualpipe-v", c) >= closed
    assert makespan_idle("dualpipe-v", case_with_durations(4, 8, f=1, i=2, w=1)) == Fraction(11, 2)
    assert CLOSED_FORMS["dualpipe-v"].makespan_idle(
        case_with_durations(4, 8, f=1, i=2, w=1)
    ) == Fraction(9, 2)
    # Ranks have different numbers of overlapping pairs, so X differs between ranks. The X of rank 0
    # equals the README's formula only for two ranks.
    half = Fraction(1, 2)
    for p in range(2, 6):
        c = case_with_durations(p, 2 * p)
        measured = simulated("dualpipe-v", c, overlap_saving=half).makespan
        assert measured[0] == p - 1 - half * Fraction(2 * p - 3, 2)
        assert (measured[0] == readme(c, half)) == (p == 2)
        assert (len(set(measured)) == 1) == (p == 2)
