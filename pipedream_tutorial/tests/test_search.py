"""Test that orders from the search are valid and as short as reported. If the optimum is known, the
orders must be optimal."""

import json
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream.schedules.ops import repeat, save_csv
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.measures import peak_activations
from pipedream.simulate.search import build_problem, lower_bound, score, search
from pipedream.simulate.simulator import Costs, build_costs, load_order, simulate
from starting import last_line, no_process_is_left, run  # noqa: F401

from results.lab.tutorial.frontier import solve


def costs_of(p, *, communication=0, **durations):
    return build_costs(build_schedule("1f1b", p, 1), communication=communication, **durations)


def can_begin_with(word, m, memory):
    """Return whether the order of a rank can begin with `word`."""
    forward, first, second = map(word.count, "FIW")
    return forward <= m and second <= first <= forward <= second + memory


def words_of(m, memory):
    """Return all orders of one rank with `m` microbatches and at most `memory` activations, as
    strings."""
    found = [""]
    for _ in range(3 * m):
        longer = (word + kind for word in found for kind in "FIW")
        found = [word for word in longer if can_begin_with(word, m, memory)]
    return found


def shortest_of_all(problem):
    """Return the shortest time over all combinations of the ranks' orders."""
    words = words_of(problem.num_microbatches, problem.memory)
    ranks = len(problem.durations)
    return min(score(problem, list(combination))[0] for combination in product(words, repeat=ranks))


@pytest.mark.parametrize(("memory", "shortest"), [(4, 39), (5, 36), (6, 33), (7, 30)])
def test_search_finds_the_optimum_between_zb_h1_and_zb_h2(memory, shortest):
    """OR-Tools proved that these times are the shortest for `p = 4`, `m = 8` and `c = F = I = W =
    1`."""
    costs = costs_of(4, communication=1)
    found = search(costs, 8, memory)
    assert found.makespan == shortest >= found.lower_bound
    assert simulate(found.schedule, costs).makespan == found.makespan
    assert max(peak_activations(found.schedule)) <= memory
    if memory in (4, 7):
        fixed = build_schedule({4: "zb-h1", 7: "zb-h2"}[memory], 4, 8)
        assert simulate(fixed, costs).makespan == {4: 41, 7: 30}[memory]
        assert max(peak_activations(fixed)) == memory


@pytest.mark.parametrize(("memory", "in_a_row"), [(4, 108), (7, 99)])
def test_search_prefers_orders_that_are_short_for_consecutive_batches(memory, in_a_row):
    """If messages take no time, the makespan is 27 for every memory of 4 or more. Only ZB-H2's
    order, which needs a memory of 7, lets the next batch begin at once."""
    costs = costs_of(4)
    found = search(costs, 8, memory)
    assert found.makespan == found.lower_bound == 27
    assert max(peak_activations(found.schedule)) <= memory
    assert simulate(repeat(found.schedule, 4), costs).makespan <= in_a_row


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 3),
    memory=st.integers(1, 3),
    times=st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=2, max_size=2),
    communication=st.integers(0, 3),
)
def test_search_equals_brute_force_for_small_sizes(m, memory, times, communication):
    forward, first, second = (tuple(map(Fraction, kind)) for kind in zip(*times, strict=True))
    costs = Costs(
        forward=forward,
        input_gradient=first,
        weight_gradient=second,
        communication=Fraction(communication),
    )
    problem = build_problem(costs, m, memory)
    shortest = shortest_of_all(problem)
    assert lower_bound(problem) <= shortest
    found = search(costs, m, memory, tries=3000)
    assert found.makespan == shortest * problem.tick
    assert simulate(found.schedule, costs).makespan == found.makespan


@pytest.mark.parametrize(("p", "m", "memory", "shortest"), [(4, 8, 5, 36), (2, 3, 2, None)])
def test_solver_proves_the_optimum(p, m, memory, shortest):
    pytest.importorskip("ortools")
    problem = build_problem(costs_of(p, communication=1), m, memory)
    if shortest is None:
        shortest = shortest_of_all(problem)
    (words,), bound = solve(problem, 2 * shortest, 60)
    assert score(problem, words)[0] == bound == shortest
    for word in words:
        assert len(word) == 3 * m
        assert all(can_begin_with(word[:end], m, memory) for end in range(3 * m))


@pytest.mark.timeout(120)
def test_a_found_order_trains_bitwise_like_one_process(tmp_path):
    found = search(costs_of(3, communication=1), 6, 4).schedule
    path, record = tmp_path / "found.csv", tmp_path / "record.json"
    save_csv(found, path)
    assert load_order(path).orders == found.orders
    done = run(
        ["--num_stages=3", "--num_microbatches=6", f"--schedule={path}", "--forward_ms=0",
         "--backward_ms=0", "--record", str(record)]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(record.read_text())["cases"]
    assert case["measured"]["weights_equal"] is True
