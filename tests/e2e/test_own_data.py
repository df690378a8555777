"""Test the guide's example of chats: train on them, and generate answers."""

import re
from pathlib import Path

import transformers

from tests.checkpoint.test_export import command
from tests.conftest import ROOT, assert_ok, only_record, train
from tests.data.test_records import CHAT

GUIDE = (ROOT / "REAL_MODELS_GUIDE.md").read_text()
VALIDATION_SHARE = 12


def test_a_model_trained_on_chats_answers(tmp_path):
    """Repeat the records of the guide's example, so that the model memorizes them."""
    rows = re.search(r"^```\w+ chats\.jsonl\n(.*?)^```", GUIDE, re.M | re.S)[1]
    training, validation = tmp_path / "chats.jsonl", tmp_path / "held-out.jsonl"
    training.write_text(20 * rows)
    validation.write_text(VALIDATION_SHARE // 2 * rows)
    values = {
        "dataset": training, "validation_dataset": validation,
        "strategy": "dp", "num_samples": -1, "pack": False, "max_length": 48, "epochs": 12,
        "batch_size": 8, "learning_rate": 0.01, "eval_samples": -1, "generate": "And of Italy?",
        "output_dir": tmp_path / "runs",
    }  # fmt: skip
    assert_ok(train(values, num_processes=2))
    record = only_record(tmp_path / "runs")
    assert record["data"]["num_train_samples"] == 40
    assert record["data"]["num_validation_samples"] == VALIDATION_SHARE
    assert record["sample"] == "user: And of Italy?\nassistant: Rome."
    run_dir = record["run_dir"]
    asked = command("generate", run_dir, "--prompt", "And of Italy?", "--temperature", 0)
    assert asked.stdout == "assistant: Rome.\n"
    # The exported template gives the text that the run trained on.
    theirs = transformers.AutoTokenizer.from_pretrained(Path(run_dir, "hf"))
    turns = CHAT["messages"][:3]
    expected = "system: Be brief.\nuser: 2 + 2?\nassistant: 4<|endoftext|>"
    assert theirs.apply_chat_template(turns, tokenize=False) == expected
    asks = theirs.apply_chat_template(turns[:2], tokenize=False, add_generation_prompt=True)
    assert expected.startswith(asks)
    assert asks.endswith("assistant:")
