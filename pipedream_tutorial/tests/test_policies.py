"""Versions and staleness against a count of which weights are still to be read."""

import random
from fractions import Fraction

import pytest
from pipedream.schedules.catalogue import SCHEDULES, build_schedule
from pipedream.schedules.ops import Op, Schedule, repeat
from pipedream.schedules.policies import POLICIES, Policy, WeightUse, weight_use
from pipedream.simulate.simulator import Costs, simulate

SIZES = [(p, m) for p in range(1, 7) for m in range(max(1, p - 1), p + 3)]


def sizes_of(name: str) -> list[tuple[int, int]]:
    if name == "chimera":
        return [(2, 2), (2, 4), (4, 4), (4, 8)]
    if name == "dualpipe":
        return [(2, 4), (2, 6), (4, 8)]
    return [(1, 2), (2, 4), (4, 8)] + [(2, 2), (4, 4)] * (name != "dualpipe-v")


def run(name: str, p: int, m: int, batches: int) -> tuple[Schedule, dict[int, WeightUse]]:
    """Several batches under the schedule's policy: in a row if it flushes, else as one stream."""
    entry = SCHEDULES[name]
    one = build_schedule(name, p, m * batches if entry.policy != "flush" else m)
    s = repeat(one, batches) if entry.policy == "flush" else one
    return s, weight_use(s, POLICIES[entry.policy], m)


def stage_ops(s: Schedule) -> dict[int, list[Op]]:
    found: dict[int, list[Op]] = {}
    for op in s.ops():
        found.setdefault(op.stage, []).append(op)
    return found


def kept_at_most(ops: list[Op], use: WeightUse, updates_after: list[int]) -> int:
    """Most versions that exist and are the newest or will be read by a later operation."""
    reads = [(use.forward if op.kind == "F" else use.backward)[op.microbatch] for op in ops]
    return max(
        len({newest} | {v for v in reads[k + 1 :] if v <= newest})
        for k, newest in enumerate(updates_after)
    )


def updates_by_hand(ops: list[Op], policy: Policy, m: int) -> list[int]:
    """After each operation: one update a microbatch, or one when a batch's last is back."""
    per_batch: dict[int, int] = {}
    counts, updates = [], 0
    for op in ops:
        if op.kind in "BW":
            batch = op.microbatch // m
            per_batch[batch] = per_batch.get(batch, 0) + 1
            updates += policy.per_microbatch or per_batch[batch] == m
        counts.append(updates)
    return counts


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "pipedream-no-stash"])
def test_versions_kept_are_those_still_to_be_read(name: str) -> None:
    policy = POLICIES[SCHEDULES[name].policy]
    for p, m in sizes_of(name):
        s, used = run(name, p, m, 4)
        for stage, ops in stage_ops(s).items():
            updates = updates_by_hand(ops, policy, m)
            assert used[stage].peak_versions == kept_at_most(ops, used[stage], updates)
            assert used[stage].live[-1][1] == 1
            assert [op for op, _ in used[stage].live] == ops


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_in_place_updates_change_the_weights_between_forward_and_backward(p: int, m: int) -> None:
    _, used = run("pipedream-no-stash", p, m, 4)
    for s, use in used.items():
        assert use.peak_versions == 1
        for i in range(4 * m):
            assert use.forward[i] == i - min(i, p - 1 - s)
            assert use.backward[i] == i  # all earlier microbatches have updated it by now
    assert used[p - 1].forward == used[p - 1].backward


def test_2bw_needs_p_minus_1_microbatches_a_batch_for_its_version_to_be_there_in_time() -> None:
    """With fewer, stage 0 would have to run a microbatch before the update it waits for."""
    policy = POLICIES["2bw"]
    for p in range(1, 7):
        for m in range(1, 8):
            ops = stage_ops(build_schedule("pipedream-2bw", p, 5 * m))[0]
            before = [0, *updates_by_hand(ops, policy, m)]
            in_time = all(
                policy.forward_version(updates, op.microbatch, m, p) <= updates
                for op, updates in zip(ops, before, strict=False)
                if op.kind == "F"
            )
            assert in_time == (m >= p - 1)


def test_versions_depend_on_the_order_and_never_on_timing() -> None:
    """Counted along the clock of runs with quite different durations, they are the same."""
    rng = random.Random(7)
    for p, m in ((2, 6), (3, 9), (5, 11)):
        s, used = run("pipedream", p, m, 1)
        for _ in range(6):
            f, i, w = (tuple(Fraction(rng.randint(1, 50)) for _ in range(p)) for _ in range(3))
            costs = Costs(
                forward=f,
                input_gradient=i,
                weight_gradient=w,
                communication=Fraction(rng.randint(0, 90)),
            )
            updates = dict.fromkeys(range(p), 0)
            for event in sorted(simulate(s, costs).all_events(), key=lambda e: e.end):
                for kind, stage, microbatch in event.item.parts:
                    if kind == "F":
                        assert used[stage].forward[microbatch] == updates[stage]
                    else:
                        updates[stage] += 1
            assert set(updates.values()) == {m}
