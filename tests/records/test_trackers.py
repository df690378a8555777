"""What trackers are sent, with the packages' own interfaces in place of the packages."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from distributed_training.records.metrics import build_tracker

VALUES = {"loss": 2.5, "tokens": 3, "phase": "train", "norm": None}


@pytest.fixture
def sent(monkeypatch):
    """What was called, in order."""
    calls = []

    class SummaryWriter:
        def __init__(self, folder):
            calls.append(("open", folder))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    tensorboard = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    wandb = ModuleType("wandb")
    run = SimpleNamespace(
        log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("closed")
    )
    wandb.init = lambda **words: calls.append(("open", words)) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return calls


def test_tensorboard_gets_numbers_by_step(sent, tmp_path):
    tracker = build_tracker("tensorboard", tmp_path, {})
    tracker.log(VALUES, 7)
    tracker.close()
    folder = str(tmp_path / "tensorboard")
    assert sent == [("open", folder), ("loss", 2.5, 7), ("tokens", 3.0, 7), "closed"]


def test_wandb_gets_numbers_and_the_configuration(sent, tmp_path):
    tracker = build_tracker("wandb", tmp_path, {"seed": 1})
    tracker.log(VALUES, 7)
    tracker.close()
    (opened, words), *logged, closed = sent
    assert opened == "open"
    assert (words["name"], words["dir"]) == (tmp_path.name, str(tmp_path))
    assert words["config"] == {"seed": 1}
    assert logged == [({"loss": 2.5}, 7), ({"tokens": 3.0}, 7)]
    assert closed == "closed"


def test_without_a_tracker_nothing_is_imported(sent, tmp_path):
    tracker = build_tracker(None, tmp_path, {})
    tracker.log(VALUES, 7)
    tracker.close()
    assert sent == []
