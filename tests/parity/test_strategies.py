"""Every strategy computes what one process computes: losses, gradient norms, final weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from distributed_training.preflight import has_libaio
from tests.conftest import assert_ok, run_command

CASES = Path(__file__).parent / "run_cases.py"
BASE = {
    "model": "gpt2-tiny",
    "dataset": "embedded",
    "max_length": 32,
    "num_samples": 400,
    "learning_rate": 1e-3,
    "precision": "fp32",
}
STRATEGIES = ("dp", "fsdp", "zero1", "zero2", "zero3", "offload", "infinity")
GLOBAL_BATCH = 8
LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE = 1e-4, 1e-4, 1e-3


def run_cases(
    cases: dict,
    num_processes: int,
    folder: Path,
    script: Path = CASES,
    steps: int = 20,
    **environment: str,
) -> dict:
    """Run cases on `num_processes` processes and return what they saved."""
    (folder / "cases.json").write_text(json.dumps(cases))
    out = folder / f"out{num_processes}.pt"
    assert_ok(
        run_command(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc_per_node={num_processes}", script, folder / "cases.json", out,
                steps,
            ],
            timeout_s=500,
            **environment,
        )
    )  # fmt: skip
    return torch.load(out)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process, whole batch at once: packed, padded, and with dropout off."""
    cases = {
        "packed": {**BASE, "strategy": "dp", "batch_size": GLOBAL_BATCH},
        "padded": {**BASE, "strategy": "dp", "batch_size": GLOBAL_BATCH, "pack": False},
    }
    return run_cases(cases, 1, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Every strategy but infinity on two processes."""
    six = [strategy for strategy in STRATEGIES if strategy != "infinity"]
    return run_cases(variants(six), 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def two_processes_infinity(tmp_path_factory):
    """Infinity on two processes; it needs a system library that the others do not."""
    if not has_libaio():
        pytest.skip("libaio is not installed and could not be fetched")
    return run_cases(variants(["infinity"]), 2, tmp_path_factory.mktemp("infinity"))


def variants(strategies):
    """Cases for each strategy: without and with accumulation, packed and padded."""
    cases = {}
    for strategy in strategies:
        values = {**BASE, "strategy": strategy}
        cases[f"{strategy}-packed-1"] = {**values, "batch_size": 4}
        cases[f"{strategy}-packed-2"] = {**values, "batch_size": 2, "grad_accum_steps": 2}
        cases[f"{strategy}-padded-2"] = {
            **values, "batch_size": 2, "grad_accum_steps": 2, "pack": False,
        }  # fmt: skip
    return cases


@pytest.mark.parametrize("variant", ["packed-1", "packed-2", "padded-2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_equals_one_process(strategy, variant, reference, request):
    fixture = "two_processes_infinity" if strategy == "infinity" else "two_processes"
    actual = request.getfixturevalue(fixture)[f"{strategy}-{variant}"]
    assert_equal_runs(actual, reference[variant.split("-")[0]])


def assert_equal_runs(actual, expected):
    """Losses, gradient norms and final weights agree within the tolerances above, and what the
    models answer halfway (run_cases.py), from weights that have taken the same steps: the loss of
    an evaluation as a step's loss, logits as the weights that they are products of.
    """
    for step, (ours, theirs) in enumerate(zip(actual["losses"], expected["losses"], strict=True)):
        assert abs(ours - theirs) <= LOSS_TOLERANCE * theirs, f"loss of step {step}"
    for step, (ours, theirs) in enumerate(
        zip(actual["grad_norms"], expected["grad_norms"], strict=True)
    ):
        assert abs(ours - theirs) <= NORM_TOLERANCE * theirs, f"gradient norm of step {step}"
    assert set(actual["state"]) == set(expected["state"])
    for name, weight in expected["state"].items():
        error = (actual["state"][name] - weight).norm() / weight.norm().clamp(min=1e-9)
        assert error <= WEIGHT_TOLERANCE, f"{name} differs by {error:.1e}"
    ours, theirs = actual["evaluation"], expected["evaluation"]
    assert abs(ours - theirs) <= LOSS_TOLERANCE * theirs, "loss of the evaluation"
    assert actual["logits"].shape == expected["logits"].shape
    for place, theirs in enumerate(expected["logits"][0]):
        error = (actual["logits"][0, place] - theirs).norm() / theirs.norm()
        assert error <= WEIGHT_TOLERANCE, f"logits after token {place} differ by {error:.1e}"


def test_training_moves_the_weights(reference):
    """The comparison above would be empty if nothing were learnt."""
    losses = reference["packed"]["losses"]
    assert losses[-1] < losses[0] - 0.3
