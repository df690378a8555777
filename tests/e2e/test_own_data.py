"""Test the guide's example of chats: train on them, and generate answers."""

import io
import re
import sys

import real_model_example
from tests.conftest import ROOT, SCRIPT, assert_ok, only_record, train

GUIDE = (ROOT / "REAL_MODELS_GUIDE.md").read_text()
VALIDATION_SHARE = 12


def test_a_model_trained_on_chats_answers(tmp_path, monkeypatch, capsys):
    """Repeat the records of the guide's example, so that the model memorizes them."""
    rows = re.search(r"^```\w+ chats\.jsonl\n(.*?)^```", GUIDE, re.M | re.S)[1]
    training, validation = tmp_path / "chats.jsonl", tmp_path / "held-out.jsonl"
    training.write_text(20 * rows)
    validation.write_text(VALIDATION_SHARE // 2 * rows)
    values = {
        "dataset": training, "validation_dataset": validation,
        "strategy": "dp", "num_samples": -1, "pack": False, "max_length": 48, "epochs": 12,
        "batch_size": 8, "learning_rate": 0.01, "eval_samples": -1, "generate": "And of Italy?",
        "system": "One word!",
        "output_dir": tmp_path / "runs",
    }  # fmt: skip
    assert_ok(train(values, num_processes=2))
    record = only_record(tmp_path / "runs")
    assert record["data"]["num_train_samples"] == 40
    assert record["data"]["num_validation_samples"] == VALIDATION_SHARE
    assert record["sample"] == "user: And of Italy?\nassistant: Rome."
    run_dir = record["run_dir"]
    # Each line of input is a question of its own.
    monkeypatch.setattr(sys, "stdin", io.StringIO(2 * "And of Italy?\n"))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "generate", run_dir])
    capsys.readouterr()
    assert real_model_example.main() == 0
    assert capsys.readouterr().out == 2 * "assistant: Rome.\n"
