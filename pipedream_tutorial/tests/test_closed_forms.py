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

from results.lab.tutorial import formulas

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


def test_torchs_zb_v_has_no_idle_time_only_if_f_i_and_w_take_equally_long() -> None:
    durations = [(f, i, w) for f in (1, 2, 3) for i in (1, 2, 3) for w in (1, 2, 3)]
    for p in (3, 4):
        for f, i, w in durations:
            spans = simulated("zb-v", case_with_durations(p, 2 * p, f=f, i=i, w=w)).span
            assert (set(spans) == {0}) == (f == i == w)
    for c in cases("zb-v", lambda c: c.m >= 2 * c.p - 1 and c.f >= c.w >= c.i):
        assert simulated("zb-v", c).span[0] == (c.p - 1) * (c.f - (c.i + c.w) / 2)


@pytest.mark.parametrize(
    "check", [*formulas.schedule_checks(), *formulas.cost_checks()], ids=lambda check: check.text
)
def test_statements_on_the_pages_hold_at_random_durations(check: formulas.Check) -> None:
    formulas.RNG.seed(check.text)
    num_tested, wrong = formulas.try_cases(check, 20)
    assert num_tested >= 10
    assert wrong == []
