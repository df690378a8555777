"""Test runs with fewer, smaller or rescheduled exchanges. Runs with lossless exchanges must match
plain data parallelism, and resumed runs must be bitwise equal to uninterrupted runs."""

import torch

from tests.parity.support import (
    BASE,
    DEEP,
    assert_resumes,
    assert_same_bits,
    micro_batches,
    run_cases,
)

LOCAL = {**BASE, "strategy": "local_sgd", **micro_batches(1)}
DILOCO = {**LOCAL, "outer_lr": 0.7, "outer_momentum": 0.9}
DP = {**BASE, "strategy": "dp", **micro_batches(1)}
SMALLER = {**DP, "strategy": "compressed"}
COMPRESSED = {
    "bf16": {**DP, "gradient_compression": "bf16"},
    "powersgd": {**SMALLER, "compression_rank": 2},
    "topk-int8": {**SMALLER, "compression": "topk-int8", "compression_k": 0.05},
    "all of top-k": {**SMALLER, "compression": "topk-int8", "compression_k": 1.0},
}
CASES = {
    "dp": DP,
    "one local step": {**LOCAL, "local_steps": 1},
    "four local steps": {**LOCAL, "local_steps": 4},
    "diloco": {**DILOCO, "local_steps": 4},
    **COMPRESSED,
}


def test_one_local_step_and_full_top_k_equal_data_parallelism():
    names = ("dp", "one local step", "all of top-k")
    found = run_cases({name: CASES[name] for name in names}, 2, steps=8)
    assert_same_bits(found["all of top-k"], found["dp"])
    for what in ("losses", "grad_norms", "state"):
        ours, theirs = found["one local step"][what], found["dp"][what]
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


# After three steps, a round of local steps is incomplete, and compression has stored errors.
TO_RESUME = {
    "local": {**LOCAL, "local_steps": 2},
    "diloco": {**DILOCO, "local_steps": 2},
    "met": {**DILOCO, "local_steps": 3},
    **{name: COMPRESSED[name] for name in ("powersgd", "topk-int8")},
}


def test_a_resumed_run_is_bitwise_equal():
    assert_resumes(TO_RESUME, 2, steps=6)


MOVED = {
    "dp": {**DEEP, "strategy": "dp", **micro_batches(1)},
    "small buckets": {**DEEP, "strategy": "dp", **micro_batches(1), "bucket_cap_mb": 0.05},
}


def test_smaller_buckets_change_no_bits():
    """Use two processes, because the sum of two values does not depend on their position in a
    bucket."""
    found = run_cases(MOVED, 2)
    assert_same_bits(found["small buckets"], found["dp"])
