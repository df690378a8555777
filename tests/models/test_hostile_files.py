"""Test that invalid adapters are rejected quickly with a one-line error."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from distributed_training.models import find_model, peft
from distributed_training.models.adapters import base_folder
from distributed_training.planner.choose import choose_model
from distributed_training.settings.request import build_config
from tests.parity.test_lora import made_by_peft
from tests.support import CPU_MACHINE, edit_json, refused


@pytest.fixture
def adapters(tmp_path):
    """Return a model and a folder with PEFT's adapters for it, of rank 2."""
    base, folder = made_by_peft(tmp_path, "gpt2", r=2, target_modules=["c_attn", "mlp.c_proj"])
    return find_model(str(base)), folder


A = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
B = "base_model.model.transformer.h.1.mlp.c_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        ({A: torch.zeros(2, 33)}, {}, [A, "[2, 32]"]),
        ({B: None}, {}, [B]),
        ({A.replace("h.0", "h.7"): torch.zeros(2, 32)}, {}, ["h.7.attn.c_attn.lora_A"]),
        ({}, {"r": 3}, [A, "[3, 32]"]),
    ],
)
def test_inconsistent_adapters_are_refused(tensors, config, words, adapters):
    spec, folder = adapters
    all_tensors = {**load_file(folder / "adapter_model.safetensors"), **tensors}
    saved_tensors = {name: tensor for name, tensor in all_tensors.items() if tensor is not None}
    save_file(saved_tensors, folder / "adapter_model.safetensors")
    edit_json(folder / "adapter_config.json", **config)
    with refused(*words):
        peft.read_folder(spec, folder)


def test_adapters_with_an_unavailable_base_are_refused(adapters):
    _, folder = adapters
    base = "/home/me/llama"
    edit_json(folder / "adapter_config.json", base_model_name_or_path=base)
    with refused(str(folder), repr(base)):
        base_folder(folder)
    config = build_config({"weights": str(folder)})
    with refused(str(folder), repr(base)):
        choose_model(config, CPU_MACHINE, [])


@pytest.mark.parametrize("damage", ["absent", "cut"])
def test_unreadable_adapter_files_are_refused(damage, adapters):
    spec, folder = adapters
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(content[:100])
    # An older PEFT wrote adapter_model.bin.
    with refused(str(file), "PEFT"):
        peft.read_folder(spec, folder)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("gpt2", "n_layer"), ("llama", "num_hidden_layers"), ("mixtral", "num_labels")],
)
def test_configs_whose_lists_fill_the_memory_are_refused(model_type, key, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, key: 10**9}))
    with refused(str(tmp_path), key):
        find_model(str(tmp_path))


def test_weights_in_pipes_are_refused(adapters):
    spec, folder = adapters
    base = base_folder(folder)
    for file in (folder / "adapter_model.safetensors", base / "model.safetensors"):
        file.unlink()
        os.mkfifo(file)
        with refused(str(file), "not a regular file"):
            peft.read_folder(spec, folder) if file.parent == folder else spec.check_weights(base)
