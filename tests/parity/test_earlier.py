"""DDP's buckets and FSDP's prefetch: the same exchanges at other times, the same weights."""

from __future__ import annotations

import functools

import pytest

from tests.parity.support import DEEP, assert_same_bits, cut, run_cases

BLOCKS = 6
CASES = {
    "dp": {**DEEP, "strategy": "dp", **cut(1)},
    "dp, small buckets": {**DEEP, "strategy": "dp", **cut(1), "bucket_cap_mb": 0.05},
    **{
        f"fsdp, {ahead} ahead": {**DEEP, "strategy": "fsdp", **cut(2), "fsdp_prefetch": ahead}
        for ahead in (1, 0, 2)
    },
}


@functools.cache
def results():
    return run_cases(CASES, 2, steps=3, what="train_and_trace")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("dp, small buckets", "dp"),
        ("fsdp, 0 ahead", "fsdp, 1 ahead"),
        ("fsdp, 2 ahead", "fsdp, 1 ahead"),
    ],
)
def test_weights_are_the_same_bit_for_bit(ours, theirs):
    """Of two processes: a sum of two does not depend on where its parts lie in a bucket."""
    assert_same_bits(results()[ours], results()[theirs])


def gathered_while(ahead):
    """Block -> which pass of which block had begun when its gathering did, of one micro-batch."""
    found, current = {}, ""
    for name in results()[f"fsdp, {ahead} ahead"]["names"]:
        what, _, block = name.removesuffix(")").partition(" (blocks.")
        if what in ("FSDP::pre_forward", "FSDP::pre_backward") and block:
            current = (what.removeprefix("FSDP::pre_"), int(block))
        elif what == "FSDP::all_gather" and block and current:
            found.setdefault((current[0], int(block)), current[1])
    return found


def test_blocks_are_gathered_so_many_ahead():
    inner = range(2, BLOCKS - 2)  # with two blocks before, and two after
    for ahead in (0, 2):
        found = gathered_while(ahead)
        for block in inner:
            assert found["forward", block] == block - ahead
            assert found["backward", block] == block + ahead
    found = gathered_while(1)
    for block in inner:  # forward, FSDP need not: the next one's stream waits for nothing
        assert (found["forward", block], found["backward", block]) == (block, block + 1)
