"""Compare the requirements and costs of each schedule with simulations of its order of
operations."""

import itertools

import pytest
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from distributed_training.plan.orders import build_orders
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.predict.simulate import (
    ideal_bubble,
    map_consumers,
    simulate,
    total_duration,
)

# (p, m) -> (idle time, busy time) of a rank, as in pipedream_tutorial's closed_forms.py. Before
# 2 p - 1 micro-batches, there is no formula for zb-v.
IDLE_AND_BUSY = {
    "1f1b": lambda p, m: (p - 1, m),
    "gpipe": lambda p, m: (p - 1, m),
    "interleaved": lambda p, m: (p - 1 if m >= p else 2 * (p - m) + m - 1, 2 * m),
    "zb-h1": lambda p, m: (2 * (p - 1) - (min(m, p) - 1), 3 * m),
    "zb-v": lambda p, m: (p - 1, 6 * m) if m >= 2 * p - 1 else None,
}


def test_each_schedule_accepts_certain_numbers_of_micro_batches():
    """Check which numbers of micro-batches, from 1 to 12, each schedule accepts on 4 processes."""
    refused = {"1f1b": {1, 2, 3}, "interleaved": {9, 11}}
    for name, schedule in SCHEDULES.items():
        assert {m for m in range(1, 13) if not schedule.accepts(4, m)} == refused.get(name, set())
    assert SCHEDULES["1f1b"].accepted_counts(4, 12) == [4, 6, 12]


def test_messages_take_time_only_between_processes():
    """A message between processes takes time, and a message within a process takes none. A forward
    pass takes 1, a backward pass takes 2 and a message takes 0.25. With one micro-batch on two
    stages, all operations run in sequence."""
    seconds = {(kind, stage): took for kind, took in (("F", 1.0), ("B", 2.0)) for stage in (0, 1)}
    orders = build_orders("gpipe", 2, 1)
    assert total_duration(simulate(orders, seconds, map_consumers((0, 1), 0.25))) == 6.5
    alone = [orders[0][:1] + orders[1] + orders[0][1:]]
    assert total_duration(simulate(alone, seconds, map_consumers((0, 0), 0.25))) == 6.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_orders_are_complete_and_match_the_closed_forms(name):
    """Every order is complete, and its idle share and held activations equal the closed forms. All
    stages take the same time, and each half of a backward pass takes as long as a forward pass."""
    schedule, parts = SCHEDULES[name], SCHEDULES[name].stages_per_rank
    kinds = "FIW" if schedule.splits_backward else "FB"
    compared = 0
    for p, m in itertools.product(range(2, 9), range(1, 33)):
        if not schedule.accepts(p, m):
            continue
        orders, ranks = build_orders(name, p, m), schedule.ranks(p)
        done = [operation for order in orders for operation in order]
        assert sorted(done) == sorted(itertools.product(kinds, range(len(ranks)), range(m)))
        if formula := IDLE_AND_BUSY[name](p, m):
            assert ideal_bubble(name, p, m) == pytest.approx(formula[0] / sum(formula)), (p, m)
            compared += 1
        if name != "interleaved" or m % p == 0:
            held = max(most_held(order) for order in orders)
            assert held / parts == schedule.kept_micro_batches(p, m), (p, m)
    assert compared > 80


def test_zb_v_matches_torchs_order():
    for p, m in itertools.product(range(2, 7), range(1, 16)):
        torchs = ScheduleZBVZeroBubble.__new__(ScheduleZBVZeroBubble)
        torchs.pp_group_size, torchs.num_stages, torchs._n_microbatches = p, 2 * p, m
        for rank, order in enumerate(build_orders("zb-v", p, m)):
            actions = map(str, filter(None, torchs._calculate_single_rank_operations(rank)))
            assert [*actions] == [f"{stage}{kind}{n}" for kind, stage, n in order]


def most_held(order):
    """Return the largest number of forward passes whose activations a process holds at once."""
    steps = [{"F": 1, "I": 0}.get(kind, -1) for kind, _, _ in order]
    return max(itertools.accumulate(steps))
