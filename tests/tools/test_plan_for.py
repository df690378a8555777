"""Test `plan --for`: what another trainer needs, beside what this suite needs."""

import json

import pytest

from distributed_training.settings.files import ROOT
from distributed_training.tools import plan_for
from tests.planner.test_command import plan  # noqa: F401
from tests.support import refused

LORA = "--model", "Qwen/Qwen3-0.6B", "--lora_rank", "16"


@pytest.mark.processes
def test_the_peak_of_a_trainer_is_the_measured_one(plan):  # noqa: F811
    shape = "--batch_size", "8", "--max_length", "1024", "--for", "trainer"
    found = json.loads(plan(*LORA, *shape, "--cluster", "H100-80GB", "--json"))
    assert found["peak_bytes"] / 2**30 == pytest.approx(30.60, rel=0.003)  # on an H100
    assert sum(found["memory_bytes"].values()) == found["peak_bytes"]
    assert found["memory_bytes"]["optimizer"] == 8 * 10_092_544 + 4 * 392  # with steps of tensors
    assert found["fits"] == "yes"
    assert found["settings"]["optim"] == "adamw_torch_fused"
    assert "--batch_size 8 --max_length 1024 --strategy dp" in found["suite"]["command"]


@pytest.mark.processes
def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(plan_for, "OTHERS", ROOT / "tests" / "missing")
    with refused("could not be traced"):
        plan_for.trace({"class": "Trainer"})


@pytest.mark.parametrize(
    ("trainer", "cluster", "words"),
    [("trainr", "4090", ("trainer",)), ("trainer", "2x4090", ("one GPU",))],
)
def test_what_cannot_be_answered_is_refused(trainer, cluster, words, monkeypatch, capsys):
    from tests.planner.test_command import CONFIG, main

    arguments = ["x", "plan", "--for", trainer, "--cluster", cluster, *LORA]
    monkeypatch.setattr("sys.argv", arguments)
    assert main(CONFIG, "About.", str(ROOT / "real_model_example.py")) == 2
    assert all(word in capsys.readouterr().err for word in words)
