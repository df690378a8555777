"""Test that weights that are published quantized are read as transformers dequantizes them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, FineGrainedFP8Config, Mxfp4Config

from distributed_training.models import find_model
from distributed_training.models.weights import stored_dtype
from tests.models.hub_folders import make_folder
from tests.models.test_multimodal import make_whole
from tests.models.theirs import read_tensors
from tests.reference import call_reference
from tests.support import edit_json, read_model, refused


def quantize_to_fp8(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Store the matrices of blocks in fp8 with one scale for 16 x 16 values."""
    stored = {}
    for name, values in state.items():
        if name.endswith("_proj.weight"):
            scales = values.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).abs().amax((1, 3)) / 448
            whole = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
            stored[name] = (values / whole).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
        else:
            stored[name] = values.to(torch.bfloat16)
    return stored


def quantize_to_mxfp4(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Store random experts in mxfp4, with one scale for 32 values."""
    stored = {}
    for name, values in state.items():
        if name.endswith("_proj"):  # [experts, inputs, outputs]
            experts, num_inputs, num_outputs = values.shape
            shape = (experts, num_outputs, num_inputs // 32)
            stored[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(120, 125, shape, dtype=torch.uint8)
        else:
            stored[name] = values.to(torch.bfloat16)
    return stored


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "quantize", "config"),
    [
        ("ministral3", quantize_to_fp8, FineGrainedFP8Config(weight_block_size=(16, 16))),
        ("gpt_oss", quantize_to_mxfp4, Mxfp4Config()),
    ],
)
def test_quantized_files_are_dequantized_as_in_transformers(kind, quantize, config, tmp_path):
    folder = make_folder(kind, tmp_path)
    file = folder / "model.safetensors"
    save_file(quantize(load_file(file)), file, {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=json.loads(config.to_json_string()))
    config.dequantize = True
    options = {"quantization_config": config, "dtype": torch.bfloat16}
    _, expected = call_reference(read_tensors, folder, **options)
    spec = find_model(str(folder))
    assert stored_dtype(folder) == "bfloat16"
    ours = read_model(spec, folder)
    for name, values in ours.named_parameters():
        their_name, _ = spec.code.to_hf(name, values, spec.size)
        assert torch.equal(values.to(torch.bfloat16), expected.pop(their_name))
    assert not expected
    assert "quantization_config" not in spec.code.to_config(spec.size, 0)


@pytest.mark.processes
@pytest.mark.parametrize("plain", ["vision_tower", "nothing"])
def test_parts_of_a_multimodal_model_are_quantized(plain, tmp_path):
    folder = make_whole("mistral3", tmp_path / "whole")
    file = folder / "model.safetensors"
    state = load_file(file)
    quantized = {name: values for name, values in state.items() if plain not in name}
    others = {name: state[name].to(torch.bfloat16) for name in state.keys() - quantized.keys()}
    save_file({**quantize_to_fp8(quantized), **others}, file, {"format": "pt"})
    config = FineGrainedFP8Config(weight_block_size=(16, 16))
    edit_json(folder / "config.json", quantization_config=json.loads(config.to_json_string()))
    spec = find_model(str(folder))
    ours = read_model(spec, folder).state_dict()
    weights = {"eos_token_id": 0, "dtype": torch.bfloat16, "original": folder}
    spec.save(lambda name, _: ours[name], tmp_path / "again", **weights)
    config.dequantize = True
    options = {"auto": AutoModelForImageTextToText, "dtype": torch.bfloat16}
    quantized = {**options, "quantization_config": config}
    _, expected = call_reference(read_tensors, folder, **quantized)
    _, again = call_reference(read_tensors, tmp_path / "again", **options)
    assert all(torch.equal(values, expected[name]) for name, values in again.items())


def test_other_quantized_weights_are_refused(tmp_path: Path):
    folder = make_folder("olmo2", tmp_path)
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with refused(str(folder), "gptq", "unquantized"):
        find_model(str(folder))
