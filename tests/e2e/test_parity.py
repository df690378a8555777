"""Test `parity` as a user would type it. One layout matches the results of a single process, and
one omits part of a gradient."""

import json
import math

import pytest

from distributed_training.tools.parity import exit_code, find_excess, relative_difference
from tests.conftest import SMALL, run_command, settings
from tests.e2e.support import clone
from tests.support import small_records

# Some adapters are not sharded over tp, and each rank has different tokens, so their gradients must
# be summed over ranks. This engine omits the sum.
ENGINE = """
from distributed_training.engines.native import NativeEngine
from distributed_training.settings.strategies import Traits

TRAITS = Traits(build="Forgetful", axes=("tp",))


class Forgetful(NativeEngine):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.tp_partial_params = []
"""


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [("ok", 0), ("ok, skipped, other work", 0), ("skipped", 1), ("ok, differs", 1),
     ("failed, ok", 1)],
)  # fmt: skip
def test_exit_code(verdicts, code):
    """The exit code is 0 only if at least one layout agrees and none differs or fails."""
    assert exit_code(verdicts.split(", ")) == code


def test_a_nan_differs():
    rounding = {"loss": {"step 1": 0.0}, "gradient norm": {"step 1": 0.0}, "weights": {}}
    difference = relative_difference(math.nan, 1.0)
    layout = {**rounding, "weights": {"weight/a": difference, "weight/b": 0.0}}
    assert find_excess(layout | {"weights": {"weight/b": 0.0}}, rounding) == []
    (reason,) = find_excess(layout, rounding)
    assert "eight/a" in reason


def test_every_layout_is_compared_with_one_process(tmp_path):
    """`parity` compares every layout with a single-process run. This test adds the strategy
    "forgetful", which does not sum the gradients of whole adapters over the tp ranks. `parity`
    must report that only the results of "forgetful" differ."""
    repository = clone(tmp_path / "repository")
    own = repository / "strategies" / "20_forgetful"
    own.mkdir()
    (own / "engine.py").write_text(ENGINE)
    config = {"name": "forgetful", "mesh": {"tp": -1}, "engine": "engine.py"}
    (own / "config.json").write_text(json.dumps(config))

    values = {**SMALL, "max_steps": 4, "num_samples": 64, "dataset": str(small_records())}
    values["lora_rank"] = 4
    del values["model"]  # "auto" chooses a model with enough layers for pipelines
    words = ["--num_gpus", "2", "--strategies", "3d,fsdp,forgetful", *settings(values)]
    script = repository / "real_model_example.py"
    found = run_command(["python", script, "parity", *words], cwd=repository, timeout_s=390)
    assert found.returncode == 1, found.stdout + found.stderr
    printed = " ".join(found.stdout.split())
    for text in ("1 of 3 layouts", "forgetful (differs)", "3d (skipped)", "Gradient norm of step "):
        assert text in printed
    runs = [
        json.loads(file.read_text())
        for file in repository.glob("runs/parity-x2/runs/*/record.json")
    ]
    assert {run["config"]["model"] for run in runs} == {"gpt2-tiny-4-blocks"}
    assert not [*(repository / "runs/parity-x2/runs").glob("*/checkpoints")]
