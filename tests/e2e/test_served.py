"""Test the settings that servers read from an exported folder: the dtype, the tokens that end an
answer, and padding."""

import shutil
from pathlib import Path

import torch
import transformers

from tests.conftest import assert_ok, heavy_pool, only_record, train
from tests.data import test_tokenizer
from tests.data.test_samples import jsonl
from tests.data.test_tokenizer import SAID
from tests.models.theirs import generate, generation_config, read_tensors
from tests.reference import call_reference
from tests.support import edit_json, tiny_qwen2

folder = test_tokenizer.folder


def test_an_exported_chat_model_has_the_dtype_of_its_base_and_stops_after_an_answer(
    folder, tmp_path
):
    base = tiny_qwen2().bfloat16()
    base.generation_config = transformers.GenerationConfig(eos_token_id=7, do_sample=True, top_k=5)
    base.save_pretrained(tmp_path / "base")
    saved = tmp_path / "base/generation_config.json"
    edit_json(saved, _from_model_config=True)  # most published models have this key
    shutil.copytree(folder, tmp_path / "base", dirs_exist_ok=True)
    jsonl(tmp_path / "rows", [{"messages": SAID[:2]}] * 30)
    values = {"model": tmp_path / "base", "weights": tmp_path / "base", "tokenizer": "auto"}
    values |= {"dataset": tmp_path / "rows", "max_length": 64, "num_samples": -1}
    values |= {"learning_rate": 0, "max_steps": 1, "checkpoint_every": 0, "output_dir": tmp_path}
    assert_ok(train(values))
    exported = Path(only_record(tmp_path)["run_dir"], "hf")

    _, tensors = call_reference(read_tensors, exported, dtype="auto")
    for name, weight in base.state_dict().items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], weight), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>"), 7]
    generation = call_reference(generation_config, exported)
    assert generation.eos_token_id == stops
    assert generation.bos_token_id == tokenizer.bos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id
    assert generation.top_k == 5
    assert not generation._from_model_config


def test_generate_stops_where_transformers_stops(folder, tmp_path):
    """With temperature 0, `generate` prints the text that transformers generates. It also stops at
    end tokens that only generation_config.json lists. Llama 3 has such tokens."""
    torch.manual_seed(0)
    model = tiny_qwen2(vocab_size=400, initializer_range=1.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    question = tokenizer.apply_chat_template(
        SAID[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model.save_pretrained(tmp_path)
    ids = call_reference(generate, tmp_path, question["input_ids"], max_new_tokens=12)
    position = max(index for index, token in enumerate(ids) if token not in ids[:index])
    model.generation_config.eos_token_id = [399, ids[position]]
    model.generation_config.save_pretrained(tmp_path)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    arguments = ["--prompt", SAID[0]["content"], "--temperature", 0, "--max_new_tokens", 12]
    result = heavy_pool().script(["generate", tmp_path, *arguments])
    assert_ok(result)
    answer = tokenizer.decode(ids[:position], skip_special_tokens=True)
    assert (position > 2, result.stdout) == (True, f"assistant: {answer.lstrip()}\n")
