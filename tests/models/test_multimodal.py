"""Test the text decoders of multimodal models: both forms of an export, and adapters for both."""

from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from distributed_training.models import ModelSpec, find_model
from distributed_training.models.peft import Adapters, read_folder, save_adapters
from distributed_training.settings.config import Config
from tests.models.hub_folders import KINDS, randomize
from tests.support import assert_near, read_model

_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
# Type -> (kind of its text decoder, shape of its vision tower)
_TYPES = {
    "qwen3_5": ("qwen3_5_text", {"depth": 1, "hidden_size": 32, "out_hidden_size": 32}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"depth": 1, "hidden_size": 32, "out_hidden_size": 32}),
    "gemma3": ("gemma3_text", {**_TOWER, "num_attention_heads": 2, "image_size": 28}),
    "gemma4": ("gemma4_text", {**_TOWER, "num_attention_heads": 2, "head_dim": 16}),
    "mistral3": ("mistral-window", {**_TOWER, "num_attention_heads": 2, "image_size": 28}),
}
IDS = torch.arange(5, 25)[None]


def make_whole(model_type: str, kind: str, folder: Path) -> Path:
    """Save a tiny random multimodal model, with a text decoder of the given kind."""
    _, tower = _TYPES[model_type]
    name, values = KINDS[kind]
    text = getattr(transformers, f"{name}Config")(**{**values, "pad_token_id": 0}).to_dict()
    audio = {"audio_config": None} if model_type == "gemma4" else {}
    config = CONFIG_MAPPING[model_type](
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=bool(text.get("tie_word_embeddings")),
        **audio,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=_TYPES)
def whole(request, tmp_path) -> tuple[Path, torch.nn.Module, ModelSpec]:
    """Return (folder of a whole model, the model in transformers, spec of its text decoder)."""
    folder = make_whole(request.param, _TYPES[request.param][0], tmp_path / "whole")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return folder, model, find_model(str(folder))


def test_exports_are_the_whole_model_or_its_text_decoder(whole, tmp_path):
    folder, model, spec = whole
    expected = model(input_ids=IDS).logits
    ours = read_model(spec, folder)
    assert_near(ours(IDS), expected)
    state = ours.state_dict()

    def save(name: str, original: Path | None) -> Path:
        weights = {"eos_token_id": 0, "dtype": torch.float32, "original": original}
        spec.save(lambda name, _: state[name], tmp_path / name, **weights)
        return tmp_path / name

    exported = load_file(save("again", folder) / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(values, exported[name]) for name, values in stored.items())
    options = {"output_loading_info": True, "dtype": torch.float32}
    for auto, path in (
        (AutoModelForImageTextToText, tmp_path / "again"),
        (AutoModelForCausalLM, save("text", None)),
    ):
        read, info = auto.from_pretrained(path, **options)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert_near(read.eval()(input_ids=IDS).logits, expected)
    assert "text_config" not in (tmp_path / "text" / "config.json").read_text()


def test_adapters_fit_the_whole_model_or_its_text_decoder(whole, tmp_path):
    folder, model, spec = whole
    config = Config(lora_rank=2, lora_alpha=8)
    tensors = {}
    for layer in range(spec.size.num_layers):
        kind = spec.size.kind_of(layer)
        for matrix, (rows, columns) in zip(kind.hf_matrices, kind.matrices, strict=True):
            name = f"blocks.{layer}.{matrix}.adapter"
            tensors[f"{name}.a"] = 0.1 * torch.randn(2, columns)
            tensors[f"{name}.b"] = 0.1 * torch.randn(rows, 2)
    adapters = Adapters(
        spec=spec, tensors=tensors, config=config, base_fingerprint=None, origin=folder
    )
    merged = adapters.merged(spec.weights_source(folder))
    weights = {"eos_token_id": 0, "dtype": torch.float32}
    spec.save(merged, tmp_path / "merged", **weights)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(IDS).logits
    base = read_model(spec, folder)
    spec.save(lambda name, _: base.state_dict()[name], tmp_path / "text", **weights)
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    for of_text, their_base in ((False, model), (True, text)):
        path = tmp_path / f"adapters-{of_text}"
        save_adapters(adapters, path, str(folder), text=of_text)
        with_adapters = PeftModel.from_pretrained(their_base, path).eval()
        assert_near(with_adapters(input_ids=IDS).logits, expected)
        read = read_folder(spec, path).tensors
        assert all(torch.equal(values, read[name]) for name, values in tensors.items())
