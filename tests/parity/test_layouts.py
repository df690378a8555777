"""Layers split over tp, dealt out over pp, and both with data parallelism: the same training."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.parity.test_strategies import BASE, GLOBAL_BATCH, assert_equal_runs, run_cases

# Six blocks, so that stages can have unequal lengths. With this seed no gradient that Adam
# divides by lies at the level of rounding, which sums in another order would make visible.
DEEP = {**BASE, "model": "six-layers", "tokenizer": "embedded", "seed": 7}


def accumulated(count, dp_size=1):
    """CONFIG of the global batch in `count` micro-batches."""
    return {"grad_accum_steps": count, "batch_size": GLOBAL_BATCH // (count * dp_size)}


def split(**axes):
    """The strategy with all axes, those that are not given being 1."""
    return {"strategy": "3d", **{"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, **axes}}


# The word before the slash names the data, that is the reference. Activation checkpointing comes
# with a mechanism that another case shows without it.
CASES = {
    2: {
        "packed/tp2": {**split(tp=2), **accumulated(1)},
        "padded/tp2": {
            **split(tp=2), **accumulated(2), "activation_checkpointing": "selective",
        },
        "packed/tp2-whole-norms": {
            **split(tp=2), **accumulated(2), "sequence_parallel": False,
            "activation_checkpointing": "full",
        },
        "packed/dp2-recomputed": {
            "strategy": "dp", **accumulated(2, 2), "activation_checkpointing": "full",
        },
        "padded/fsdp2-recomputed": {
            "strategy": "fsdp", **accumulated(2, 2), "activation_checkpointing": "selective",
        },
        "packed/pp2-gpipe-1": {**split(pp=2), **accumulated(1), "pipeline_schedule": "gpipe"},
        "padded/pp2-1f1b-2": {**split(pp=2), **accumulated(2), "pipeline_cut": "5,1"},
        "padded/pp2-interleaved-4": {
            **split(pp=2), **accumulated(4), "pipeline_schedule": "interleaved",
        },
        "packed/pp2-zb-v-8": {**split(pp=2), **accumulated(8), "pipeline_schedule": "zb-v"},
    },
    4: {
        "padded/tp4": {**split(tp=4), **accumulated(1)},
        "packed/shard2-tp2": {**split(dp_shard=2, tp=2), **accumulated(2, 2)},
        "padded/copies2-tp2": {**split(dp_replicate=2, tp=2), **accumulated(1, 2)},
        "packed/hsdp2x2": {"strategy": "fsdp", "dp_replicate": 2, **accumulated(2, 4)},
        "padded/hsdp2x2-recomputed": {
            "strategy": "fsdp", "dp_replicate": 2, **accumulated(1, 4),
            "activation_checkpointing": "selective",
        },
        "padded/pp4-gpipe": {**split(pp=4), **accumulated(2), "pipeline_schedule": "gpipe"},
        "packed/pp4-1f1b": {**split(pp=4), **accumulated(8)},
        "packed/pp4-zb-h1": {**split(pp=4), **accumulated(8), "pipeline_schedule": "zb-h1"},
        "packed/tp2-pp2": {**split(tp=2, pp=2), **accumulated(4)},
        "padded/tp2-pp2-zb-v": {
            **split(tp=2, pp=2), **accumulated(4), "pipeline_schedule": "zb-v",
            "sequence_parallel": False,
        },
        "packed/shard2-pp2-interleaved": {
            **split(dp_shard=2, pp=2), **accumulated(4, 2), "pipeline_schedule": "interleaved",
        },
        "padded/copies2-pp2-zb-h1": {
            **split(dp_replicate=2, pp=2), **accumulated(4, 2), "pipeline_schedule": "zb-h1",
            "pipeline_cut": "2,4",
        },
        "packed/shard2-pp2-recomputed": {
            **split(dp_shard=2, pp=2), **accumulated(4, 2), "activation_checkpointing": "full",
        },
    },
    8: {
        "packed/shard2-tp2-pp2": {**split(dp_shard=2, tp=2, pp=2), **accumulated(4, 2)},
        "padded/copies2-tp2-pp2-zb-v": {
            **split(dp_replicate=2, tp=2, pp=2), **accumulated(2, 2), "pipeline_schedule": "zb-v",
        },
    },
}  # fmt: skip
# What needs another batch or model than those: micro-batches that stages do not divide, and two
# stages on each of four processes.
ODD_BATCH = 6
ODD = {"grad_accum_steps": 3, "batch_size": 2}
EIGHT = {"model": "eight-layers"}
OTHERS = {
    2: {
        f"odd/pp2-{schedule}-3": {**split(pp=2), **ODD, "pipeline_schedule": schedule}
        for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
    },
    4: {
        f"eight/pp4-{schedule}": {
            **EIGHT, **split(pp=4), **accumulated(8), "pipeline_schedule": schedule,
        }
        for schedule in ("interleaved", "zb-v")
    },
}  # fmt: skip
ALL = {count: {**cases, **OTHERS.get(count, {})} for count, cases in CASES.items()}
NAMED = [(count, name) for count, cases in ALL.items() for name in cases]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    whole = {**DEEP, "strategy": "dp", "batch_size": GLOBAL_BATCH}
    cases = {
        "packed": whole,
        "padded": {**whole, "pack": False},
        "odd": {**whole, "batch_size": ODD_BATCH},
        "eight": {**whole, **EIGHT},
    }
    return run_cases(cases, 1, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """number of processes -> what its cases computed, run when first asked for."""
    found = {}

    def run(count):
        if count not in found:
            cases = {
                name: {**DEEP, "pack": not name.startswith("padded/"), **values}
                for name, values in ALL[count].items()
            }
            found[count] = run_cases(cases, count, tmp_path_factory.mktemp(f"on{count}"))
        return found[count]

    return run


@pytest.mark.parametrize(("count", "name"), NAMED, ids=[name for _, name in NAMED])
def test_layout_equals_one_process(count, name, results, reference):
    assert_equal_runs(results(count)[name], reference[name.split("/")[0]])


RESUMED = Path(__file__).parent / "resume_cases.py"


# zb-v too, where one process holds both copies of the tied embedding.
TO_RESUME = {
    2: {
        "zb-v": {**split(pp=2), **accumulated(2), "pipeline_schedule": "zb-v"},
        "1f1b in bf16": {**split(pp=2), **accumulated(2), "precision": "bf16"},
        "tp": {**split(tp=2), **accumulated(1)},
    },
    4: {
        "tp2-pp2": {**split(tp=2, pp=2), **accumulated(2)},
        "shard2-tp2": {**split(dp_shard=2, tp=2), **accumulated(1, 2)},
        "shard2-pp2-zb-v": {
            **split(dp_shard=2, pp=2), **accumulated(2, 2), "pipeline_schedule": "zb-v",
        },
        "hsdp2x2": {"strategy": "fsdp", "dp_replicate": 2, **accumulated(1, 4)},
        "hybrid2x2": {"strategy": "hybrid", **accumulated(2, 2)},
    },
}  # fmt: skip


@pytest.mark.parametrize("count", TO_RESUME)
def test_a_resumed_layout_goes_on_bit_for_bit(count, tmp_path):
    cases = {name: {**DEEP, **values} for name, values in TO_RESUME[count].items()}
    out = run_cases(cases, count, tmp_path, RESUMED)
    for name, both in out.items():
        for key, weight in both["straight"].items():
            assert torch.equal(weight, both["resumed"][key]), f"{name}: {key}"


def test_stages_in_bf16_follow_one_process(tmp_path):
    """Their weights are rounded once a step, and gradients of micro-batches added up in fp32."""
    noted = {**DEEP, "precision": "bf16"}
    one = run_cases({"one": {**noted, "strategy": "dp", **accumulated(4)}}, 1, tmp_path, steps=8)
    stages = {**noted, **split(pp=2), **accumulated(4)}
    cases = {
        "1f1b": stages,
        "zb-v": {**stages, "pipeline_schedule": "zb-v"},
        "recomputed": {**stages, "compile": True, "activation_checkpointing": "full"},
    }
    found = run_cases(cases, 2, tmp_path, steps=8)
    found |= run_cases({"tp2-pp2": {**stages, "tp": 2}}, 4, tmp_path, steps=8)
    for name, values in found.items():
        assert values["losses"] == pytest.approx(one["one"]["losses"], rel=1e-4), name
        assert values["grad_norms"] == pytest.approx(one["one"]["grad_norms"], rel=2e-3), name


def test_what_is_exported_after_an_evaluation_in_bf16(tmp_path):
    """run_cases.py compares it with the state before, which FSDP's gathered copies are not."""
    noted = {**DEEP, "precision": "bf16"}
    cases = {
        "fsdp": {**noted, "strategy": "fsdp", **accumulated(1, 4)},
        "shard2-pp2": {**noted, **split(dp_shard=2, pp=2), **accumulated(2, 2)},
        "pp4": {**noted, **split(pp=4), **accumulated(4)},
    }
    out = run_cases(cases, 4, tmp_path, steps=2)
    for name, values in out.items():
        assert all(torch.isfinite(tensor).all() for tensor in values["state"].values()), name


STREAMS = Path(__file__).parent / "dropout_streams.py"


def test_dropout_masks_agree_where_they_must_and_differ_where_they_must(tmp_path):
    noisy = {**DEEP, "dropout": 0.3}
    cases = {
        "split": {**noisy, **split(dp_shard=2, tp=2), **accumulated(1, 2)},
        "whole": {
            **noisy, **split(dp_shard=2, tp=2), **accumulated(1, 2), "sequence_parallel": False,
            "activation_checkpointing": "full",
        },
        "stages": {**noisy, **split(pp=2, tp=2), **accumulated(2), "sequence_parallel": False},
    }  # fmt: skip
    out = run_cases(cases, 4, tmp_path, STREAMS)
    for name, alike in [("split", []), ("whole", [(0, 1), (2, 3)]), ("stages", [(0, 1), (2, 3)])]:
        streams = out[name]["streams"]
        for kind in ("residual", "attention"):
            drawn = [set(rank[kind]) for rank in streams]
            assert all(drawn)
            for one, other in itertools.combinations(range(4), 2):
                if kind == "residual" and (one, other) in alike:
                    assert streams[one][kind] == streams[other][kind], f"{name}: {one}, {other}"
                else:
                    assert not drawn[one] & drawn[other], f"{name}, {kind}: {one}, {other}"
    # What is computed again in the backward pass draws the masks of the forward pass.
    assert all(
        len(rank["attention"]) == 2 * len(set(rank["attention"]))
        for rank in out["whole"]["streams"]
    )
