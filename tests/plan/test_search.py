"""Orders that are found for what operations take."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from torch.distributed.pipelining.schedules import _add_send_recv

from distributed_training.parallel import private
from distributed_training.plan.cost import SCHEDULES
from distributed_training.plan.orders import build_orders, simulate
from distributed_training.plan.search import search_orders
from distributed_training.plan.stages import expect_spans, find_orders
from tests.plan.helpers import plan_for
from tests.support import GPU_MACHINE

ZB_V = SCHEDULES["zb-v"]
# Of six gpt2-medium blocks and the loss on an H200, 32 x 1024 tokens, in ms.
BLOCK, LOSS, MESSAGE = (1.71, 2.73, 1.09), (7.34, 11.0, 0.0), 0.6
MEDIUM = (2, 4, 4, 4, 3, 3, 3, 1)


def durations(blocks, block=BLOCK, loss=LOSS):
    stages = [[count * took for took in block] for count in blocks]
    stages[-1] = [own + more for own, more in zip(stages[-1], loss, strict=True)]
    return tuple(map(tuple, stages))


def length(orders, seconds, message=MESSAGE):
    times = {
        (kind, s): of
        for s, each in enumerate(seconds)
        for kind, of in zip("FIW", each, strict=True)
    }
    return simulate(orders, times, ZB_V.ranks(len(seconds) // 2), message)[0]


def held(order, blocks):
    """Blocks whose activations a process holds at most."""
    now = most = 0
    for kind, stage, _ in order:
        now += {"F": 1, "W": -1}.get(kind, 0) * blocks[stage]
        most = max(most, now)
    return most


@pytest.mark.parametrize("m", [1, 4, 8, 12])
@pytest.mark.parametrize("blocks", [MEDIUM, (3, 2, 2, 1)])
def test_found_orders_are_whole_shorter_and_hold_what_they_may(blocks, m):
    seconds, p = durations(blocks), len(blocks) // 2
    found, known = search_orders(seconds, blocks, m, MESSAGE), build_orders("zb-v", p, m)
    for rank in range(p):
        assert sorted(found[rank]) == sorted(known[rank])
        own = blocks[rank] + blocks[-1 - rank]
        most = max(held(known[rank], blocks), min(p + 1, m) * own)
        assert held(found[rank], blocks) <= most
    # What is not there yet would end the simulation. The loss's backward pass follows at once.
    assert length(found, seconds) <= length(known, seconds)
    last = len(blocks) - 1
    for number in range(m):
        place = found[0].index(("F", last, number))
        assert found[0][place + 1] == ("I", last, number)


def test_gpt2_mediums_step_gets_shorter_by_a_twentieth():
    """Within 3% of what no order can beat: that of the process which starts last."""
    seconds = durations(MEDIUM)
    found = length(search_orders(seconds, MEDIUM, 8, MESSAGE), seconds)
    assert found < 0.955 * length(build_orders("zb-v", 4, 8), seconds)
    begins = sum(seconds[stage][0] + MESSAGE for stage in range(3))
    busy = 8 * sum(seconds[3] + seconds[4])
    assert begins + busy <= found < 1.03 * (begins + busy)


def test_equal_operations_leave_zb_v():
    """Its formula is then that of any order on a V."""
    blocks = (1,) * 8
    seconds = ((1.0, 1.0, 1.0),) * 8
    for m in (7, 10):
        found = search_orders(seconds, blocks, m, 0.0)
        assert length(found, seconds, 0.0) == length(build_orders("zb-v", 4, m), seconds, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_one_micro_batch_over_two_processes_as_by_brute_force(seed):
    draw = random.Random(seed).uniform
    seconds = tuple((draw(1, 5), draw(1, 5), draw(1, 5)) for _ in range(4))
    words = [["F0", "F3", "I3", "W3", "I0", "W0"], ["F1", "F2", "I2", "W2", "I1", "W1"]]
    every = [
        [tuple((w[0], int(w[1]), 0) for w in order) for order in itertools.permutations(of)]
        for of in words
    ]
    dependent = [("F0", "F3"), ("F3", "I3"), ("I3", "W3"), ("I3", "I0"), ("I0", "W0"),
                 ("F1", "F2"), ("F2", "I2"), ("I2", "I1"), ("I1", "W1"), ("I2", "W2")]  # fmt: skip
    before = [((a[0], int(a[1]), 0), (b[0], int(b[1]), 0)) for a, b in dependent]
    every = [
        [
            order for order in orders
            if all(order.index(a) < order.index(b) for a, b in before if a in order)
        ]
        for orders in every
    ]  # fmt: skip
    best = min(length(pair, seconds) for pair in itertools.product(*every))
    found = length(search_orders(seconds, (1, 1, 1, 1), 1, MESSAGE), seconds)
    assert found == pytest.approx(best)


def medium(tmp_path, machine=GPU_MACHINE):
    words = {"model": "gpt2-medium", "strategy": "pp", "pipeline_schedule": "zb-auto"}
    return plan_for(tmp_path, machine, 4, checked=False, batch_size=8, **words)


def test_every_machine_finds_the_same_orders(tmp_path):
    """Processes search on their own: in different orders they would wait for each other."""
    plan = medium(tmp_path)
    other = medium(tmp_path, dataclasses.replace(GPU_MACHINE, gpu_name="NVIDIA A100", num_cpus=4))
    found = find_orders(plan)
    search_orders.cache_clear()
    assert find_orders(other) == found
    assert expect_spans(plan) == expect_spans(other)


def test_messages_keep_the_order_in_which_they_are_made(tmp_path):
    """Both ends of every edge have them in one order, and none waits for what comes later."""
    plan = medium(tmp_path)
    ranks, spans, last = plan.layout.ranks, expect_spans(plan), len(plan.layout.ranks) - 1
    computing = {
        rank: [private._Action(s, private._COMPUTING[kind], i) for kind, s, i in order]
        for rank, order in enumerate(find_orders(plan))
    }
    lowered = _add_send_recv(computing, lambda stage: ranks[stage], last + 1)
    found = {
        rank: private._in_order_of_messages(actions, spans) for rank, actions in lowered.items()
    }
    for rank, actions in lowered.items():
        assert sorted(map(str, actions)) == sorted(map(str, found[rank]))
        assert [a for a in actions if a.is_compute_op] == [
            a for a in found[rank] if a.is_compute_op
        ]
    # Step by step, with messages that block both ends: what a real run does at worst.
    place, done = dict.fromkeys(found, 0), set()
    opposite = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1),
                "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}  # fmt: skip
    moved = True
    while moved:
        moved = False
        for rank, actions in found.items():
            while place[rank] < len(actions):
                action = actions[place[rank]]
                kind, stage, number = action.computation_type.name, action.stage_index, action[2]
                if kind in opposite:
                    other, by = opposite[kind]
                    peer = ranks[stage + by]
                    there = found[peer][place[peer]] if place[peer] < len(found[peer]) else None
                    meets = there and (there.computation_type.name, there.stage_index, there[2])
                    if meets != (other, stage + by, number):
                        break
                    place[peer] += 1
                    done.add((min(stage, stage + by), "F" in kind, number))
                place[rank] += 1
                moved = True
    assert all(place[rank] == len(actions) for rank, actions in found.items())
    edges = sum(ranks[stage] != ranks[stage + 1] for stage in range(last))
    assert len(done) == 2 * edges * plan.batch.num_microbatches
