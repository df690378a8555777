"""Test the guide's examples of user data: train on the data, and generate answers."""

import re
import subprocess
import sys
from pathlib import Path

import transformers

from tests.checkpoint.test_export import command
from tests.conftest import ROOT, SCRIPT, assert_ok, clean_environment, only_record, train
from tests.data.test_records import CHAT
from tests.e2e.support import metrics

GUIDE = (ROOT / "REAL_MODELS_GUIDE.md").read_text()
EXAMPLES = dict(re.findall(r"^```\w+ (\w+\.(?:jsonl|csv))\n(.*?)^```", GUIDE, re.M | re.S))
VALIDATION_SHARE = 12


def write_example(folder: Path, name: str) -> dict:
    """Write the guide's example file `name`, with its records repeated. Return CONFIG values with
    which a run memorizes the records."""
    lines = EXAMPLES[name].splitlines(keepends=True)
    rows = lines[name.endswith(".csv") :]
    head = lines[: -len(rows)]
    (folder / name).write_text("".join(head + 20 * rows))
    (folder / f"held-out-{name}").write_text("".join(head + VALIDATION_SHARE // 2 * rows))
    return {
        "dataset": folder / name, "validation_dataset": folder / f"held-out-{name}",
        "strategy": "dp", "num_samples": "auto", "pack": False, "max_length": 48, "epochs": 12,
        "batch_size": 8, "learning_rate": 0.01, "eval_samples": -1, "generate": "And of Italy?",
        "output_dir": folder / "runs",
    }  # fmt: skip


def test_a_model_trained_on_chats_answers(tmp_path):
    assert_ok(train(write_example(tmp_path, "chats.jsonl"), num_processes=2))
    record = only_record(tmp_path / "runs")
    assert record["data"]["num_train_samples"] == 40
    assert record["data"]["num_validation_samples"] == VALIDATION_SHARE
    (note,) = [note for note in record["notes"] if "answers" in note]
    assert 10 < float(re.search(r"([\d.]+)% of the tokens", note)[1]) < 60
    assert record["sample"] == "user: And of Italy?\nassistant: Rome."
    run_dir = record["run_dir"]
    asked = command("generate", run_dir, "--prompt", "And of Italy?", "--temperature", 0)
    assert asked.stdout == "assistant: Rome.\n"
    talk = [sys.executable, SCRIPT, "generate", run_dir, "--temperature", "0"]
    lines = "What is the capital of France?\nAnd of Italy?\n"
    shell = {"text": True, "timeout": 60, "env": clean_environment()}
    dialog = subprocess.check_output(talk, input=lines, **shell)
    assert dialog.startswith("assistant: Paris.\nassistant: ")
    # The exported template gives the text that the run trained on.
    theirs = transformers.AutoTokenizer.from_pretrained(Path(run_dir, "hf"))
    turns = CHAT["messages"][:3]
    expected = "system: Be brief.\nuser: 2 + 2?\nassistant: 4<|endoftext|>"
    assert theirs.apply_chat_template(turns, tokenize=False) == expected
    asks = theirs.apply_chat_template(turns[:2], tokenize=False, add_generation_prompt=True)
    assert expected.startswith(asks)
    assert asks.endswith("assistant:")


def test_a_model_trained_on_prompts_completes_them(tmp_path):
    values = write_example(tmp_path, "cards.csv")
    assert_ok(train({**values, "pack": True, "max_length": 16, "epochs": 40}))
    record = only_record(tmp_path / "runs")
    assert record["config"]["validation_dataset"].endswith("held-out-cards.csv")
    asked = command("generate", record["run_dir"], "--prompt", "2 + 2 =", "--temperature", 0)
    assert asked.stdout == "2 + 2 = 4\n"
    rows = metrics(Path(record["run_dir"]))
    assert all(0 < row["num_targets"] < row["num_tokens"] for row in rows)
