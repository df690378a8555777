"""Helpers for the parity tests: shared CONFIG values, layouts, reference runs, and comparisons."""

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.settings.strategies import MESH_AXES
from tests.conftest import clean_environment, heavy_pool
from tests.pool import ROOT, Pool
from tests.support import small_text, write_once

BASE = {
    "model": "gpt2-tiny",
    "dataset": str(small_text()),
    "tokenizer": "embedded",
    "max_length": 32,
    "num_samples": 400,
    "learning_rate": 1e-3,
    "precision": "fp32",
}
MODELS = ROOT / "tests/parity/models"  # small shapes, without weights
# The model has six blocks, so that stages can have unequal lengths. With this seed, Adam does not
# normalize any gradient that consists only of rounding errors. Such gradients would depend on the
# order of summation.
DEEP = {**BASE, "model": str(MODELS / "six-layers"), "weights": "random", "seed": 7}
GLOBAL_BATCH = 8
NUM_STEPS = 2  # the second begins with updated weights, and an evaluation precedes it
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-4, 6e-4  # gradient norms use LOSS_TOLERANCE


def micro_batches(num_microbatches: int, *, global_batch: int = GLOBAL_BATCH) -> dict[str, Any]:
    """Return CONFIG values for a global batch that each replica splits into `num_microbatches`
    micro-batches."""
    return {"global_batch": global_batch, "num_microbatches": num_microbatches}


def mesh(**axes: int) -> dict[str, Any]:
    """Return CONFIG values for strategy "3d", which has all axes. Omitted axes have size 1."""
    return {"strategy": "3d", **{**dict.fromkeys(MESH_AXES, 1), **axes}}


def run_cases(
    cases: dict[str, dict[str, Any]],
    num_processes: int,
    *,
    function: str = "train",
    module: str = "tests.parity.cases",
    steps: int = NUM_STEPS,
    failing: bool = False,
    **environment: str,
) -> dict[str, Any]:
    """Call `function` from `module` in the pool that all tests share. Return the result for each
    case. A case may set `global_batch` instead of batch_size."""
    cases = {name: dict(values) for name, values in cases.items()}
    for values in cases.values():
        if "global_batch" in values:
            values["batch_size"], remainder = divmod(values.pop("global_batch"), num_processes)
            assert remainder == 0, "the number of processes must divide the global batch size"
    return _pool(**environment).call(
        f"{module}:{function}",
        {"cases": cases, "steps": steps, "failing": failing},
        num_processes=num_processes,
    )


def named_cases(tables: Mapping[str, Mapping[int, Iterable[str]]]) -> pytest.MarkDecorator:
    """Return the mark that runs a test for each case of `tables`, which contain the cases by the
    function of cases.py, the number of processes, and their names."""
    found = [
        (what, count, name)
        for what, table in tables.items()
        for count, cases in table.items()
        for name in cases
    ]
    return pytest.mark.parametrize(
        ("what", "count", "name"), found, ids=[name for *_, name in found]
    )


def run_selected(
    request: pytest.FixtureRequest,
    table: Mapping[int, Mapping[str, dict[str, Any]]],
    work: Callable[[str], dict[str, Any]],
    **options: Any,
) -> Callable[[int], dict[str, Any]]:
    """Return a function that returns the results of all selected tests' cases for a given number of
    processes. The cases are run together on the first call, because processes take seconds to
    start. `table` contains them by the number of processes and by their names, with which the names
    of tests end, and `work` returns the values of their reference run."""
    tests = [item.name for item in request.session.items]

    @functools.cache
    def run(count: int) -> dict[str, Any]:
        cases = {
            name: {**work(name), **values}
            for name, values in table[count].items()
            if any(test.endswith((f"[{name}]", f"-{name}]")) for test in tests)
        }
        return run_cases(cases, count, **options)

    return run


def run_tables(
    request: pytest.FixtureRequest,
    tables: Mapping[str, Mapping[int, Mapping[str, dict[str, Any]]]],
    work: Callable[[str], dict[str, Any]],
) -> dict[str, Callable[[int], dict[str, Any]]]:
    """Return the result of `run_selected` for each table of `named_cases`, by its function."""
    return {
        what: run_selected(request, table, work, function=what) for what, table in tables.items()
    }


@functools.cache
def _pool(**environment: str) -> Pool:
    """Return the shared pool. With an `environment` (for GPUs), return a pool that imports nothing
    before it forks, because CUDA does not survive a fork."""
    return Pool((), clean_environment(**environment)) if environment else heavy_pool()


@functools.cache
def small_infinity(**zero: int) -> dict[str, str]:
    """Return CONFIG values for strategy "infinity" with buffers that are as small as the models in
    these tests. The default buffers take gigabytes, and filling them takes longer than a test case.
    `zero` is merged into zero_optimization. With a sub_group_size of 2**18, models with a million
    parameters keep their largest groups on disk."""
    deepspeed = json.loads((ROOT / "configs" / "ds_config_infinity.json").read_text())
    deepspeed["zero_optimization"] |= zero
    deepspeed["zero_optimization"]["offload_param"]["buffer_size"] = 2**19
    suffix = "-".join(map(str, (os.getuid(), *zero.values())))
    file = Path(tempfile.gettempdir()) / f"small-infinity-of-tests-{suffix}.json"
    return {
        "strategy": "infinity",
        "deepspeed_config": str(write_once(file, json.dumps(deepspeed))),
    }


def reference(
    values: dict[str, Any], *, steps: int = NUM_STEPS, function: str = "train"
) -> dict[str, Any]:
    """Return the cached result of a single-process run. The whole batch is one micro-batch unless
    `values` splits it."""
    return _reference(json.dumps({"strategy": "dp", **micro_batches(1), **values}), steps, function)


@functools.cache
def _reference(values: str, steps: int, function: str) -> dict[str, Any]:
    return run_cases({"one": json.loads(values)}, 1, steps=steps, function=function)["one"]


def assert_same_bits(
    actual: dict[str, Any],
    expected: dict[str, Any],
    keys: Iterable[str] = ("losses", "grad_norms", "evaluation"),
) -> None:
    """Check that the results named in `keys` and the final weights are bitwise equal in two
    runs."""
    for key in keys:
        assert actual[key] == expected[key]
    for name, weight in expected["state"].items():
        assert torch.equal(actual["state"][name], weight), name


def assert_resumes(
    cases: dict[str, dict[str, Any]], count: int, *, steps: int = NUM_STEPS, **options: Any
) -> None:
    """Check that runs that continue from a checkpoint are bitwise equal to uninterrupted runs. Also
    check that steps with a learning rate of 0 do not change the weights."""
    for found in run_cases(cases, count, function="resume", steps=steps, **options).values():
        assert_same_bits({"state": found["resumed"]}, {"state": found["straight"]}, ())
        for key, weight in found["loaded"].items():
            torch.testing.assert_close(found["kept"][key], weight, rtol=1e-6, atol=1e-6)


def assert_equal_runs(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that two runs agree. Losses, gradient norms and the halfway evaluation must agree
    within LOSS_TOLERANCE. Final weights and the halfway logits must agree within
    WEIGHT_TOLERANCE."""
    for what in ("losses", "grad_norms", "evaluation"):
        assert actual[what] == pytest.approx(expected[what], rel=LOSS_TOLERANCE), what
    assert set(actual["state"]) == set(expected["state"])
    for name, weight in expected["state"].items():
        error = (actual["state"][name] - weight).norm() / weight.norm().clamp(min=1e-9)
        assert error <= WEIGHT_TOLERANCE, f"{name} differs by {error:.1e}"
    if "logits" not in actual:  # tp, cp or pp splits the model
        return
    assert actual["logits"].shape == expected["logits"].shape
    for position, logits in enumerate(expected["logits"][0]):
        error = (actual["logits"][0, position] - logits).norm() / logits.norm()
        assert error <= WEIGHT_TOLERANCE, f"logits after token {position} differ by {error:.1e}"
