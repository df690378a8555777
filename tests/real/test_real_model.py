"""Test SmolLM2-135M-Instruct (from 4-bit originals) against transformers and PEFT.
`python -m tests.real.make_model` writes it."""

import json
from pathlib import Path

import peft as library
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from distributed_training.data.corpus import CHATS_DIR
from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models import find_model
from distributed_training.models.peft import to_peft
from distributed_training.settings.config import Config
from tests.checkpoint.test_export import command
from tests.conftest import assert_ok, only_record, train
from tests.models.theirs import logits
from tests.parity.support import mesh, micro_batches, run_cases
from tests.parity.test_lora import ALL, train_in_peft
from tests.real.make_model import FOLDER
from tests.reference import call_reference

pytestmark = [
    pytest.mark.real,
    pytest.mark.processes,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="run: python -m tests.real.make_model"),
]
BATCH = 6
ONE = {"strategy": "dp", **micro_batches(1, global_batch=BATCH)}
VALUES = {
    "dataset": "ellmoor", "max_length": 66, "pack": False,
    "precision": "fp32", "learning_rate": 1e-3, "lr_schedule": "constant", "warmup_steps": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a folder with a few blocks of the model. Their values are as real as all, and a step
    takes a fourth of the time."""
    folder = tmp_path_factory.mktemp("base")
    AutoModelForCausalLM.from_pretrained(FOLDER, num_hidden_layers=6).save_pretrained(folder)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def batches(base):
    """Return the batches of three steps."""
    cases = {"one": {**VALUES, "model": str(base), **ONE}}
    return run_cases(cases, 1, steps=3, function="batches")["one"]


@pytest.fixture(scope="module")
def values(base, tmp_path_factory):
    """Return CONFIG values that continue PEFT adapters with random values."""
    folder = tmp_path_factory.mktemp("adapters")
    options = library.LoraConfig(r=4, lora_alpha=8, target_modules=ALL.split(","))
    adapted = library.get_peft_model(AutoModelForCausalLM.from_pretrained(base), options)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(folder)
    return {**VALUES, "model": "auto", "weights": str(folder)}


def assert_same_updates(ours, before, after):
    """Adam's first step moves each value by the learning rate, in the direction of its gradient.
    Where a gradient is almost 0, rounding chooses it: one of 768 values is 7% of a norm."""
    errors = {name: (ours[name] - value).norm() for name, value in after.items()}
    updates = {name: (value - before[name]).norm() for name, value in after.items()}
    for name, error in errors.items():
        assert error < 0.1 * updates[name], f"{name} differs by {error / updates[name]:.1e}"
    total = torch.stack([*errors.values()]).norm() / torch.stack([*updates.values()]).norm()
    assert total < 0.005


def test_tokens_and_masks_equal_transformers(batches):
    """The targets of each sample are its answer and the end of its turn."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    answers = {}
    for line in (CHATS_DIR / "ellmoor" / "train.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        ids = tokenizer.apply_chat_template(messages)["input_ids"]
        answers[tuple(ids)] = f"{messages[1]['content']}<|im_end|>\n"
    for ((inputs, targets, *_),) in batches:
        for row, row_targets in zip(inputs.tolist(), targets.tolist(), strict=True):
            in_loss = [target for target in row_targets if target != IGNORE_INDEX]
            (last,) = [n for n, target in enumerate(row_targets) if target != IGNORE_INDEX][-1:]
            assert tokenizer.decode(in_loss) == answers[(*row[: last + 1], in_loss[-1])]


def test_adapters_train_as_in_peft(base, values, batches):
    cases = {"one": {**values, **ONE, **mesh(cp=3)}}  # which divides the 9 heads
    found = run_cases(cases, 3, steps=1)["one"]
    expected = train_in_peft(base, values["weights"], batches[:1], 1e-3)
    ours = to_peft(found["state"], find_model(str(base)), Config(lora_rank=4, lora_targets=ALL))
    assert_same_updates(ours, *expected)


def test_losses_in_fewer_bits_are_close(base, values, batches):
    cases = {"fp32": {}, "bf16": {"precision": "bf16"}, "nf4": {"base_dtype": "nf4"}}
    cases = {name: {**values, **ONE, **case} for name, case in cases.items()}
    losses = {name: run["losses"][0] for name, run in run_cases(cases, 1, steps=1).items()}
    ((ids, targets, *_),) = batches[0]
    theirs = call_reference(logits, base, torch.as_tensor(ids), adapters=values["weights"])
    targets = torch.as_tensor(targets).flatten()
    expected = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), targets)
    assert losses["fp32"] == pytest.approx(float(expected), rel=1e-5)
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert 1e-3 < abs(losses["nf4"] / losses["fp32"] - 1) < 0.15


def run(tmp_path, model, **changes):
    keys = {
        "model": model,
        "num_samples": -1,
        "eval_samples": 4,
        "checkpoint_every": 0,
        "output_dir": tmp_path,
    }
    result = train({**VALUES, **keys, **changes}, limit_s=400)
    assert_ok(result)
    return Path(only_record(tmp_path)["run_dir"]), result.stdout


def test_all_weights_train_and_are_exported_as_in_transformers(base, batches, tmp_path):
    run_dir, _ = run(tmp_path, base, learning_rate=1e-5, batch_size=BATCH, max_steps=1)
    ours = load_file(run_dir / "hf" / "model.safetensors")
    assert_same_updates(ours, *train_in_peft(base, None, batches[:1], 1e-5))


def test_a_chat_model_answers_before_and_after_and_is_merged(tmp_path):
    question = "What is the capital of France?"
    run_dir, out = run(tmp_path, FOLDER, lora_rank=8, max_steps=1, batch_size=2, generate=question)
    answer = f"  user: {question}\n  assistant: The capital of France is Paris.\n"
    assert out.count(answer) == 2
    assert_ok(command("export", run_dir, "--merge"))
    ids = torch.tensor([[1, 9690, 198, 2683]])
    merged = call_reference(logits, run_dir / "merged", ids)
    expected = call_reference(logits, FOLDER, ids, adapters=run_dir / "hf")
    torch.testing.assert_close(merged, expected, rtol=1e-3, atol=1e-3)
