"""Versions and staleness against a count of which weights are still to be read."""

import pytest
from pipedream.schedules.catalogue import SCHEDULES, build_schedule
from pipedream.schedules.ops import Op, Schedule, repeat
from pipedream.schedules.policies import POLICIES, Policy, WeightUse, weight_use


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
