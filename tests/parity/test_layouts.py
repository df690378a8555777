"""Layers split over tp, dealt out over pp, and both with data parallelism: the same training."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from tests.parity.support import DEEP, assert_equal_runs, cut, reference, run_cases, split

# The word before the slash names the data, that is the reference. Activation checkpointing comes
# with a mechanism that another case shows without it.
CASES = {
    2: {
        "packed/tp2": {**split(tp=2), **cut(1)},
        "padded/tp2": {
            **split(tp=2), **cut(2), "activation_checkpointing": "selective",
        },
        "packed/tp2-whole-norms": {
            **split(tp=2), **cut(2), "sequence_parallel": False,
            "activation_checkpointing": "full",
        },
        "padded/fsdp2-recomputed": {
            "strategy": "fsdp", **cut(2), "activation_checkpointing": "selective",
        },
        "packed/pp2-gpipe-1": {**split(pp=2), **cut(1), "pipeline_schedule": "gpipe"},
        "padded/pp2-1f1b-2": {**split(pp=2), **cut(2), "pipeline_cut": "5,1"},
        "padded/pp2-interleaved-4": {
            **split(pp=2), **cut(4), "pipeline_schedule": "interleaved",
        },
        "packed/pp2-zb-v-8": {**split(pp=2), **cut(8), "pipeline_schedule": "zb-v"},
    },
    4: {
        "padded/tp4-by-tokens": {**split(tp=4), **cut(4)},
        "packed/hsdp2x2": {"strategy": "fsdp", "dp_replicate": 2, **cut(2)},
        "packed/pp4-1f1b": {**split(pp=4), **cut(8)},
        "packed/pp4-zb-h1": {**split(pp=4), **cut(8), "pipeline_schedule": "zb-h1"},
        "padded/tp2-pp2-zb-v": {
            **split(tp=2, pp=2), **cut(4), "pipeline_schedule": "zb-v",
            "sequence_parallel": False,
        },
        "packed/shard2-pp2-interleaved": {
            **split(dp_shard=2, pp=2), **cut(4), "pipeline_schedule": "interleaved",
        },
        "padded/copies2-pp2-zb-h1": {
            **split(dp_replicate=2, pp=2), **cut(4), "pipeline_schedule": "zb-h1",
            "pipeline_cut": "2,4",
        },
    },
    8: {
        "packed/shard2-tp2-pp2": {**split(dp_shard=2, tp=2, pp=2), **cut(2)},
        "padded/copies2-tp2-pp2-zb-v": {
            **split(dp_replicate=2, tp=2, pp=2), **cut(2), "pipeline_schedule": "zb-v",
        },
    },
}  # fmt: skip
# What needs another batch or model than those: micro-batches that stages do not divide, and two
# stages on each of four processes.
ODD_BATCH = 6
ODD = cut(3, global_batch=ODD_BATCH)
EIGHT = {"model": "eight-layers"}
OTHERS = {
    2: {
        f"odd/pp2-{schedule}-3": {**split(pp=2), **ODD, "pipeline_schedule": schedule}
        for schedule in ("interleaved", "zb-v")
    } | {
        # Five micro-batches are not rounds of two.
        "ten/pp2-zb-h1-5": {
            **split(pp=2), **cut(5, global_batch=10), "pipeline_schedule": "zb-h1",
        },
    },
    4: {
        f"eight/pp4-{schedule}": {
            **EIGHT, **split(pp=4), **cut(8), "pipeline_schedule": schedule,
        }
        for schedule in ("zb-v", "zb-auto")
    },
}  # fmt: skip
ALL = {count: {**cases, **OTHERS.get(count, {})} for count, cases in CASES.items()}
NAMED = [(count, name) for count, cases in ALL.items() for name in cases]


# The word before a case's slash -> what it is compared with.
REFERENCES = {
    "packed": {"pack": True},
    "padded": {"pack": False},
    "odd": {"pack": True, **cut(1, global_batch=ODD_BATCH)},
    "ten": {"pack": True, **cut(1, global_batch=10)},
    "eight": {"pack": True, **EIGHT},
}


def model(values):
    """Deep enough for stages where there are any; two blocks show all that splits each of them."""
    return DEEP if values.get("pp", 1) > 1 else {**DEEP, "model": "gpt2-tiny"}


@functools.cache
def results(count):
    """What the cases of so many processes compute, run when first asked for."""
    return run_cases(
        {
            name: {**model(values), "pack": not name.startswith("padded/"), **values}
            for name, values in ALL[count].items()
        },
        count,
    )


@pytest.mark.parametrize(("count", "name"), NAMED, ids=[name for _, name in NAMED])
def test_layout_equals_one_process(count, name):
    expected = reference({**model(ALL[count][name]), **REFERENCES[name.split("/")[0]]})
    assert_equal_runs(results(count)[name], expected)


# zb-v too, where one process holds both copies of the tied embedding.
TO_RESUME = {
    2: {
        "zb-v": {**split(pp=2), **cut(2), "pipeline_schedule": "zb-v"},
        "zb-auto": {**split(pp=2), **cut(4), "pipeline_schedule": "zb-auto"},
        "1f1b in bf16": {**split(pp=2), **cut(2), "precision": "bf16"},
    },
    4: {
        "tp2-pp2": {**split(tp=2, pp=2), **cut(2)},
        "shard2-pp2-zb-v": {
            **split(dp_shard=2, pp=2), **cut(2), "pipeline_schedule": "zb-v",
        },
        "hsdp2x2": {"strategy": "fsdp", "dp_replicate": 2, **cut(1)},
        "hybrid2x2": {"strategy": "hybrid", **cut(2)},
    },
}  # fmt: skip


@pytest.mark.parametrize("count", TO_RESUME)
def test_a_resumed_layout_goes_on_bit_for_bit(count):
    cases = {name: {**DEEP, **values} for name, values in TO_RESUME[count].items()}
    out = run_cases(cases, count, what="resume")
    for name, both in out.items():
        for key, weight in both["straight"].items():
            assert torch.equal(weight, both["resumed"][key]), f"{name}: {key}"


def test_stages_in_bf16_follow_one_process():
    """Their weights are rounded once a step, and gradients of micro-batches added up in fp32."""
    one = reference({**DEEP, "precision": "bf16", **cut(4)}, steps=8)
    stages = {**DEEP, "precision": "bf16", **split(pp=2), **cut(4)}
    cases = {"1f1b": stages, "zb-v": {**stages, "pipeline_schedule": "zb-v"}}
    for name, values in run_cases(cases, 2, steps=8).items():
        assert values["losses"] == pytest.approx(one["losses"], rel=1e-4), name
        assert values["grad_norms"] == pytest.approx(one["grad_norms"], rel=2e-3), name


def test_what_is_exported_after_an_evaluation_in_bf16():
    """cases.py compares it with the state before, which FSDP's gathered copies are not."""
    noted = {**DEEP, "precision": "bf16"}
    cases = {
        "fsdp": {**noted, "strategy": "fsdp", **cut(1)},
        "shard2-pp2": {**noted, **split(dp_shard=2, pp=2), **cut(2)},
        "pp4": {**noted, **split(pp=4), **cut(4)},
    }
    out = run_cases(cases, 4, steps=2)
    for name, values in out.items():
        assert all(torch.isfinite(tensor).all() for tensor in values["state"].values()), name


def test_dropout_masks_agree_where_they_must_and_differ_where_they_must():
    noisy = {**DEEP, "dropout": 0.3}
    cases = {
        "split": {**noisy, **split(dp_shard=2, tp=2), **cut(1)},
        "whole": {
            **noisy, **split(dp_shard=2, tp=2), **cut(1), "sequence_parallel": False,
            "activation_checkpointing": "full",
        },
        "stages": {**noisy, **split(pp=2, tp=2), **cut(2), "sequence_parallel": False},
    }  # fmt: skip
    out = run_cases(cases, 4, what="dropout_streams")
    for name, alike in [("split", []), ("whole", [(0, 1), (2, 3)]), ("stages", [(0, 1), (2, 3)])]:
        streams = out[name]
        for kind in ("residual", "attention"):
            drawn = [set(rank[kind]) for rank in streams]
            assert all(drawn)
            for one, other in itertools.combinations(range(4), 2):
                if kind == "residual" and (one, other) in alike:
                    assert streams[one][kind] == streams[other][kind], f"{name}: {one}, {other}"
                else:
                    assert not drawn[one] & drawn[other], f"{name}, {kind}: {one}, {other}"
    # What is computed again in the backward pass draws the masks of the forward pass.
    assert all(len(rank["attention"]) == 2 * len(set(rank["attention"])) for rank in out["whole"])
