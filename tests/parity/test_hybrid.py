"""DeepSpeed's pipeline with ZeRO-1 computes what one process computes, for any cut and batch."""

from __future__ import annotations

import functools
import json

import pytest

from distributed_training.run.prepare import make_plan
from distributed_training.settings.config import build_config
from distributed_training.settings.strategies import load_strategy
from tests.conftest import assert_ok, only_record, train
from tests.parity.support import DEEP, GLOBAL_BATCH, assert_equal_runs, cut, reference, run_cases
from tests.support import CPU_MACHINE, refused

# The first word says what to compare with: the global batch packed or padded, or a number of
# samples that makes an odd number of micro-batches. There are as many of them as stages, more, and
# the number that the plan chooses.
ODD_BATCH = 12
REFERENCES = {
    "packed": {"pack": True},
    "padded": {"pack": False},
    "odd": {"pack": True, **cut(1, global_batch=ODD_BATCH)},
}
CASES = {
    2: {
        "packed-auto": {"global_batch": GLOBAL_BATCH},
        "packed-8-recomputed": {
            **cut(8), "pipeline_cut": "1,5", "activation_checkpointing": "full",
        },
    },
    # Two stages of two processes each, or four stages.
    4: {
        "odd-3": cut(3, global_batch=ODD_BATCH),
        "padded-8-pp4": {**cut(8), "pp": 4, "pipeline_cut": "1,2,2,1"},
    },
}  # fmt: skip
NAMED = [(count, name) for count, cases in CASES.items() for name in cases]


@functools.cache
def results(count):
    """What the cases of so many processes compute, run when first asked for."""
    return run_cases(
        {
            name: {**DEEP, "strategy": "hybrid", "pack": not name.startswith("padded"), **values}
            for name, values in CASES[count].items()
        },
        count,
    )


@pytest.mark.parametrize(("count", "name"), NAMED, ids=[f"{name}-on{n}" for n, name in NAMED])
def test_stages_equal_one_process(count, name):
    assert_equal_runs(results(count)[name], reference({**DEEP, **REFERENCES[name.split("-")[0]]}))


def test_evaluation_and_sample_equal_one_process(tmp_path):
    """Evaluation between training steps, and a sample, whose every token has a shape of its own."""
    records = {}
    for strategy, count in (("dp", 1), ("hybrid", 2)):
        values = {
            "batch_size": GLOBAL_BATCH // count,
            "eval_every": 2,
            "max_steps": 5,
            "num_samples": 64,
            "generate": "The",
        }
        values |= {"strategy": strategy, "output_dir": tmp_path / strategy}
        result = train(values, num_processes=count)
        assert_ok(result)
        assert "autograd" not in result.stderr, "a broadcast that torch takes for training"
        records[strategy] = only_record(tmp_path / strategy)
    ours, theirs = records["hybrid"], records["dp"]
    assert len(theirs["evaluations"]) == 4
    for row, expected in zip(ours["evaluations"], theirs["evaluations"], strict=True):
        assert row["step"] == expected["step"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert ours["sample"] == theirs["sample"]


def test_what_config_decides_is_refused_in_the_json(tmp_path):
    """DeepSpeed's own checkpointing would leave the embedding without a gradient."""
    path = tmp_path / "own.json"
    own = json.loads(load_strategy(build_config({"strategy": "hybrid"})).source.read_text())
    own["pipeline"]["activation_checkpoint_interval"] = 1
    path.write_text(json.dumps(own))
    config = build_config({"strategy": "hybrid", "deepspeed_config": str(path)})
    with refused("activation_checkpoint_interval"):
        make_plan(config, CPU_MACHINE, num_processes=2, processes_here=2)
