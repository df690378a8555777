"""DeepSpeed's pipeline with ZeRO-1 computes what one process computes, for any cut and batch."""

from __future__ import annotations

import json

import pytest

from distributed_training.config import build_config
from distributed_training.deepspeed_json import fill_deepspeed_json
from distributed_training.errors import UserError
from distributed_training.strategy import load_strategy
from tests.conftest import assert_ok, only_record, run_script, settings
from tests.parity.test_strategies import BASE, GLOBAL_BATCH, assert_equal_runs, run_cases

SIX = {**BASE, "model": "six-layers", "seed": 7}
# The first word says what to compare with: GLOBAL_BATCH samples packed or padded, or a number of
# samples that makes an odd number of micro-batches. There are fewer, as many and more of them than
# stages. Values: (batch_size, grad_accum_steps, others).
ODD_BATCH = 12
TWO = {
    "packed-2": (4, 2, {}),
    "padded-4": (2, 4, {"pipeline_cut": "4,2"}),
    "packed-1": (8, 1, {}),
    "packed-8-recomputed": (1, 8, {"pipeline_cut": "1,5", "activation_checkpointing": "full"}),
    "odd-3": (4, 3, {}),
}
FOUR = {
    "packed-1": (4, 1, {}),
    "packed-4": (1, 4, {"pipeline_cut": "4,2"}),
    "padded-4": (1, 4, {}),
    "odd-3": (2, 3, {}),
    "packed-2-pp4": (4, 2, {"pp": 4}),
    "padded-8-pp4": (1, 8, {"pp": 4, "pipeline_cut": "1,2,2,1"}),
}


def hybrid_cases(table: dict) -> dict:
    return {
        name: {
            **SIX,
            "strategy": "hybrid",
            "pack": not name.startswith("padded"),
            "batch_size": batch_size,
            "grad_accum_steps": grad_accum_steps,
            **others,
        }
        for name, (batch_size, grad_accum_steps, others) in table.items()
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process, whole batch at once."""
    whole = {**SIX, "strategy": "dp", "batch_size": GLOBAL_BATCH}
    cases = {
        "packed": whole,
        "padded": {**whole, "pack": False},
        "odd": {**whole, "batch_size": ODD_BATCH},
    }
    return run_cases(cases, 1, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Two stages."""
    return run_cases(hybrid_cases(TWO), 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory):
    """Two stages of two processes each, or four stages."""
    return run_cases(hybrid_cases(FOUR), 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", TWO)
def test_two_stages_equal_one_process(name, reference, two_processes):
    assert_equal_runs(two_processes[name], reference[name.split("-")[0]])


@pytest.mark.parametrize("name", FOUR)
def test_four_processes_equal_one(name, reference, four_processes):
    assert_equal_runs(four_processes[name], reference[name.split("-")[0]])


def test_clipping_was_at_work(reference):
    """Only a norm above the limit shows that it is the whole model's, no tensor counted twice."""
    assert max(reference["packed"]["grad_norms"]) > 1.0


def test_evaluation_and_sample_equal_one_process(tmp_path):
    """Evaluation between training steps, and a sample, whose every token has a shape of its own."""
    records = {}
    for strategy, count, batch in (("dp", 1, (8, 1)), ("hybrid", 2, (2, 4))):
        values = {
            "batch_size": batch[0],
            "grad_accum_steps": batch[1],
            "eval_every": 2,
            "max_steps": 5,
            "num_samples": 64,
            "generate": "The",
        }
        command = ["--strategy", strategy, "--num_gpus", str(count), *settings(values)]
        result = run_script(*command, output_dir=tmp_path / strategy)
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
    with pytest.raises(UserError, match="activation_checkpoint_interval"):
        fill_deepspeed_json(load_strategy(config), config, dp_size=1, offload_dir="")
