"""Compare runs with a plain loop that shares no code with the suite (reference.py). The runs have
20 steps, large weight decay, clipping that takes effect, and a learning rate that changes at every
step. Answers have very different lengths, the last batch of an epoch is smaller, and the vocabulary
is padded."""

import functools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from distributed_training.data.tokenizer import EMBEDDED_DIR
from tests.conftest import assert_ok, heavy_pool, only_record, train
from tests.e2e.support import metrics
from tests.parity import reference
from tests.parity.reference import Settings
from tests.reference import call_reference

SETTINGS = Settings(
    max_length=32, global_batch_size=8, max_steps=20, seed=3, learning_rate=5e-3, warmup_steps=5,
    weight_decay=2.0, max_grad_norm=2.2, eval_every=4,
)  # fmt: skip
NUM_RECORDS = 70  # 9 steps per epoch; the last step has 6 records
WORDS = ("red", "green", "blue", "one", "two", "three")
VOCABULARY = 2050  # two tokens more than the tokenizer has; padded to 2176


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with initial weights in the Hugging Face format and a file of questions and
    answers."""
    folder = tmp_path_factory.mktemp("reference")
    torch.manual_seed(0)
    shape = {"n_positions": SETTINGS.max_length, "n_embd": 32, "n_layer": 2, "n_head": 4}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape, **rates))
    model.save_pretrained(folder / "model")
    draw = random.Random(0)
    for name, count in (("train", NUM_RECORDS), ("held-out", 9)):
        rows = []
        for _ in range(count):
            words = [draw.choice(WORDS) for _ in range(60)]
            answer = "".join(f" {word}" for word in words[: draw.choice((1, 1, 2, 3, 60))])
            prompt = f"{' '.join(words[: draw.randint(1, 12)])}?"
            rows.append(json.dumps({"prompt": prompt, "completion": answer}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


def follow(algorithm, folder, **options):
    return call_reference(reference.follow, algorithm, folder, EMBEDDED_DIR, SETTINGS, **options)


def run(folder, output_dir, num_processes=2, **changes):
    """Run the script with SETTINGS and `changes`, and return the results. The global batch size
    does not depend on `num_processes`."""
    values = {
        **vars(SETTINGS), "model": folder / "model", "weights": folder / "model",
        "tokenizer": "embedded", "dataset": folder / "train.jsonl", "pack": False,
        "validation_dataset": folder / "held-out.jsonl", "precision": "fp32", "num_samples": -1,
        "epochs": 3, "eval_samples": -1, "checkpoint_every": 0, "output_dir": output_dir, **changes,
    }  # fmt: skip
    values["batch_size"] = values.pop("global_batch_size") // num_processes
    assert_ok(train(values, num_processes=num_processes))
    record = only_record(output_dir)
    steps = metrics(Path(record["run_dir"]))
    return {
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "evaluations": {row["step"]: row["loss"] for row in record["evaluations"]},
        "state": load_file(*Path(record["run_dir"], "hf").glob("*model.safetensors")),
    }


@functools.cache
def one_process(folder):
    return follow(reference.train, folder)


def assert_follows(found, expected, *, far=5e-5):
    """Check that losses, evaluations and final weights agree. If the expected results include
    gradient norms, check these as well."""
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    if "grad_norms" in expected:
        assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)
    for step, loss in expected["evaluations"].items():
        assert found["evaluations"][step] == pytest.approx(loss, rel=1e-5), f"after {step} steps"
    assert set(found["state"]) == set(expected["state"]) - {"lm_head.weight"}
    for name, weight in found["state"].items():
        error = (weight - expected["state"][name]).norm() / weight.norm()
        # The gradients of key biases are only rounding errors, which AdamW scales to full steps.
        assert error <= (20 * far if name.endswith("c_attn.bias") else far), f"{name}: {error:.1e}"


@pytest.mark.parametrize("strategy", ["dp", "zero2", "tp", "pp"])
def test_a_strategy_follows_a_plain_loop(strategy, folder, tmp_path):
    assert_follows(run(folder, tmp_path, strategy=strategy), one_process(folder))


def test_bf16_gradients_are_rounded_when_sent_and_when_added(folder, tmp_path):
    options = {"num_replicas": 2, "exchange": reference.sum_in_bf16}
    expected = follow(reference.train, folder, **options)
    found = run(folder, tmp_path, strategy="dp", gradient_compression="bf16")
    # If a gradient is close to the midpoint of two bf16 values, a different order of summation may
    # round it differently. Without rounding in the reference, weights differ about ten times as
    # much.
    assert_follows(found, expected, far=1e-3)


@pytest.mark.parametrize(
    ("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)], ids=["local-sgd", "diloco"]
)
def test_local_steps_follow_their_papers(rate, momentum, folder, tmp_path):
    """Local SGD and DiLoCo match the algorithms in their papers, even if an epoch ends and the
    model is evaluated between two exchanges."""
    options = {"local_steps": 4, "outer_lr": rate, "outer_momentum": momentum}
    expected = follow(reference.train_with_local_steps, folder, num_replicas=2, **options)
    found = run(folder, tmp_path, strategy="local_sgd", **options)
    assert_follows(found, expected)


ROWS, COLUMNS, STEPS = 12, 10, 30


def exchanged(gradients, **options):
    """Return each step's gradient after the exchange, as a tensor of shape [STEPS, ROWS, COLUMNS].
    `gradients` has shape [processes, STEPS, ROWS, COLUMNS]."""
    job = {"gradients": gradients, "options": options}
    return heavy_pool().call("tests.parity.cases:exchange", job, num_processes=len(gradients))


def random_gradients(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def test_powersgd_sends_low_rank_matrices_with_error_feedback():
    """Test error feedback (arXiv 1905.13727, algorithm 2): the compression error of a step is added
    to the gradient of the next step. The sum of the updates therefore stays close to the sum of the
    gradients, which are constant."""
    gradients = random_gradients(2, 1, ROWS, COLUMNS).expand(-1, STEPS, -1, -1)
    found = exchanged(gradients, compression_rank=2)
    for step in found:
        values = torch.linalg.svdvals(step)
        assert values[1] > 1e-2 * values[0]
        assert values[2] < 1e-5 * values[0]
    mean = gradients[:, 0].mean(dim=0)
    assert (found.sum(dim=0) - STEPS * mean).norm() < 0.2 * STEPS * mean.norm()


def test_topk_int8_equals_its_formula():
    gradients = random_gradients(3, STEPS, ROWS, COLUMNS)
    share = 0.1
    found = exchanged(gradients, compression="topk-int8", compression_k=share)
    expected = topk_int8(gradients.double().flatten(2).numpy(), share)
    np.testing.assert_allclose(found.flatten(1), expected, rtol=1e-4, atol=1e-5)


def topk_int8(gradients, share):
    """Return the mean of the processes' gradients as the exchange computes it. `gradients` has
    shape [processes, steps, values], and the result has shape [steps, values].

    Each process sends its shard number `p` to process `p`, which returns the mean. In both
    directions, the `k` values with the largest magnitudes are exact. The other values are rounded
    to multiples of 1/127 of the largest remaining magnitude. The rounding errors are added to the
    values of the next step."""
    num_processes, num_steps, num_values = gradients.shape
    part = num_values // num_processes
    k = round(share * part)

    def send(values):
        order = np.argsort(-abs(values))
        level = abs(values[order[k]]) / 127
        sent = np.round(values / level) * level
        sent[order[:k]] = values[order[:k]]
        return sent

    found = np.zeros((num_steps, num_values))
    lost, lost_of_means = np.zeros((num_processes, num_values)), np.zeros(num_values)
    for step in range(num_steps):
        for first in range(0, num_values, part):
            own = slice(first, first + part)
            wanted = gradients[:, step, own] + lost[:, own]
            sent = np.stack([send(values) for values in wanted])
            lost[:, own] = wanted - sent
            mean = sent.mean(axis=0) + lost_of_means[own]
            found[step, own] = send(mean)
            lost_of_means[own] = mean - found[step, own]
    return found
