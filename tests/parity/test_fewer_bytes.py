"""Fewer or smaller exchanges: what must equal plain data parallelism does; a resumed run goes on
bit for bit; what is sent is what the formulas say."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.parity.support import BASE, assert_resumes, assert_same_bits, cut, run_cases

LOCAL = {**BASE, "strategy": "local_sgd", **cut(1)}
DILOCO = {**LOCAL, "outer_lr": 0.7, "outer_momentum": 0.9}
DP = {**BASE, "strategy": "dp", **cut(1)}
COMPRESSED = {
    "bf16": {**DP, "gradient_compression": "bf16"},
    "powersgd": {**DP, "gradient_compression": "powersgd", "compression_rank": 2},
    "topk-int8": {**DP, "gradient_compression": "topk-int8", "compression_k": 0.05},
    "all of top-k": {**DP, "gradient_compression": "topk-int8", "compression_k": 1.0},
}
CASES = {
    "dp": DP,
    "one local step": {**LOCAL, "local_steps": 1},
    "four local steps": {**LOCAL, "local_steps": 4},
    "diloco": {**DILOCO, "local_steps": 4},
    **COMPRESSED,
}


@functools.cache
def results():
    """Of those that must learn the same."""
    names = ("dp", "one local step", "all of top-k")
    return run_cases({name: CASES[name] for name in names}, 2, steps=8)


def test_one_local_step_is_data_parallelism():
    ours, theirs = results()["one local step"], results()["dp"]
    for what in ("losses", "grad_norms"):
        assert ours[what] == pytest.approx(theirs[what], rel=1e-6)
    for name, weight in theirs["state"].items():
        torch.testing.assert_close(ours["state"][name], weight, rtol=1e-6, atol=1e-6)


def test_all_of_top_k_is_no_compression_bit_for_bit():
    assert_same_bits(results()["all of top-k"], results()["dp"])


# Three steps before: in the middle of a round, after compression has begun to lose something.
TO_RESUME = {
    "local": {**LOCAL, "local_steps": 2},
    "diloco": {**DILOCO, "local_steps": 2},
    "met": {**DILOCO, "local_steps": 3},
    **{name: COMPRESSED[name] for name in ("powersgd", "topk-int8")},
}


def test_a_resumed_run_goes_on_bit_for_bit():
    assert_resumes(TO_RESUME, 2)


def test_counted_bytes_are_the_formulas():
    """And of local SGD they fall by its number of local steps."""
    found = run_cases(CASES, 4, what="count_bytes")
    for name, ranks in found.items():
        for rank in ranks:
            counted = {key: row["sent_bytes"] for key, row in rank["counted"].items()}
            assert counted == rank["formula_sent_bytes"], name
    sent = {name: sum(ranks[0]["formula_sent_bytes"].values()) for name, ranks in found.items()}
    assert sent["one local step"] == sent["all of top-k"] == sent["dp"]
    assert sent["diloco"] == sent["four local steps"] == sent["dp"] / 4
    assert sent["bf16"] == sent["dp"] / 2
    assert sent["powersgd"] < sent["topk-int8"] < 0.4 * sent["dp"]
