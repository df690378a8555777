"""Compare the results of the `eval` command with the loss that transformers computes for the same
text."""

import math
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from distributed_training.data.text_bytes import count_bytes
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from tests.conftest import assert_ok, heavy_pool, only_record, train
from tests.data.test_samples import jsonl
from tests.data.test_tokenizer import SAID, SAMPLES, folder  # noqa: F401
from tests.e2e.support import assert_refused
from tests.models.theirs import sum_losses
from tests.reference import call_reference

LENGTH = 16


@pytest.fixture(scope="module")
def model(folder):  # noqa: F811
    """Save a tiny model with a chat template in which answers end with a special token and a line
    feed. Return the folder."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"intermediate_size": 16, "vocab_size": 400, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.5)).save_pretrained(folder)
    return folder


def evaluated(model, file, *options):
    """Run `eval`, and return the printed numbers by name."""
    result = heavy_pool().script(["eval", model, "--dataset", file, *options])
    assert_ok(result)
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("  ")]
    rows_by_name = {row[0]: row for row in lines}
    return {
        "loss": float(rows_by_name["loss"][1]),
        "bits": float(rows_by_name["bits"][3]),
        "targets": int(rows_by_name["tokens"][1].replace(",", "")),
        "bytes": int(rows_by_name["tokens"][5].replace(",", "")),
    }


def assert_agrees(found, nats, count, text):
    num_bytes = len(text.encode())
    assert (found["targets"], found["bytes"]) == (count, num_bytes)
    assert found["loss"] == pytest.approx(nats / count, abs=2e-4)
    assert found["bits"] == pytest.approx(nats / math.log(2) / num_bytes, abs=2e-4)


def test_running_text_is_evaluated_to_its_end(model, tmp_path):
    text = "A list isn't a tuple. Ünïcödé 北京 is also text: 🙂.\n" * 4
    (tmp_path / "a.txt").write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(text)["input_ids"]  # the text does not have an end-of-text token
    parts = [ids[first : first + LENGTH + 1] for first in range(0, len(ids) - 1, LENGTH)]
    nats, count = call_reference(sum_losses, model, [(part, [True] * len(part)) for part in parts])
    assert count == len(ids) - 1
    # The first token, the start token, is never a target.
    assert_agrees(evaluated(model, tmp_path / "a.txt", "--max_length", LENGTH), nats, count, text)


def test_only_answers_of_chats_are_evaluated_without_template_marks(model, tmp_path):
    answers = ["One, zwei, 三.", "Yes"]
    rows = [{"messages": [SAID[0], {"role": "assistant", "content": one}]} for one in answers]
    jsonl(tmp_path, rows)
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = []
    for row in rows:
        chat_ids = tokenizer.apply_chat_template(row["messages"])["input_ids"]
        prompt_ids = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True)
        start = len(prompt_ids["input_ids"])
        samples.append((chat_ids, [place >= start for place in range(len(chat_ids))]))
    # The run packs records, which does not change the loss.
    text = "".join(f"{answer}\n" for answer in answers)
    found = evaluated(model, tmp_path / "a.jsonl", "--max_length", 60)
    assert_agrees(found, *call_reference(sum_losses, model, samples), text)


def test_records_of_a_model_that_cannot_pack_are_evaluated_separately(folder, tmp_path):  # noqa: F811
    """Bloom's attention cannot separate packed records. The weights are scaled until the loss
    depends on the context."""
    bloom = tmp_path / "bloom"
    shutil.copytree(folder, bloom)
    torch.manual_seed(0)
    network = BloomForCausalLM(
        BloomConfig(vocab_size=400, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    )
    network.save_pretrained(bloom)
    texts = [text for text in SAMPLES if text.strip()]
    rows = tmp_path / "rows"
    jsonl(rows, [{"text": text} for text in texts])
    tokenizer = AutoTokenizer.from_pretrained(bloom)
    samples = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        samples.append((ids, [True] * len(ids)))
    found = evaluated(bloom, rows, "--max_length", 512)
    assert_agrees(found, *call_reference(sum_losses, bloom, samples), "".join(texts))


def test_evaluating_a_run_repeats_its_last_evaluation(tmp_path):
    assert_ok(train({"output_dir": tmp_path, "max_steps": 2}))
    record = only_record(tmp_path)
    last = record["evaluations"][-1]
    bits = last["loss"] * last["num_targets"] / math.log(2) / last["num_bytes"]
    assert last["bits_per_byte"] == pytest.approx(bits)
    result = heavy_pool().script(["eval", tmp_path / "latest"])
    assert_ok(result)
    assert f"{last['loss']:.4f} nats per token" in result.stdout
    assert f"{last['bits_per_byte']:.4f}" in result.stdout
    text = tmp_path / "a.txt"
    text.write_text("A list isn't a tuple. " * 9)
    result = heavy_pool().script(["eval", tmp_path / "latest", "--dataset", text])
    assert "1024 tokens" in result.stdout  # as for a model without a run


def test_invalid_evaluations_are_refused(model, tmp_path):
    def refusal(*arguments):
        result = heavy_pool().script(["eval", *arguments])
        assert_refused(result)
        return result.stderr

    assert "--dataset" in refusal(model)
    assert "nothing" in refusal(tmp_path / "nothing", "--dataset", "embedded")
    assert "context length of 64" in refusal(model, "--dataset", "embedded", "--max_length", 65)
    (tmp_path / "a.txt").write_text("")
    assert "contains no text" in refusal(model, "--dataset", tmp_path / "a.txt")
    too_small = tmp_path / "too-small"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(too_small)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, too_small)
    (tmp_path / "a.txt").write_text("A list isn't a tuple.")
    message = refusal(too_small, "--dataset", tmp_path / "a.txt")
    assert all(word in message for word in ("401", "400", str(too_small)))


@pytest.mark.parametrize("place", [EMBEDDED_DIR, None])
def test_bytes_of_tokens_add_up_to_the_text(place, folder):  # noqa: F811
    tokenizer = Tokenizer(place or folder)
    bytes_per_token = count_bytes(tokenizer)
    assert (bytes_per_token[tokenizer.special_ids] == 0).all()
    for text in SAMPLES:
        (ids,) = tokenizer.encode_texts([text])
        assert bytes_per_token[ids].sum() == len(text.encode())
    assert np.flatnonzero(bytes_per_token == 0).tolist() == sorted(tokenizer.special_ids)
