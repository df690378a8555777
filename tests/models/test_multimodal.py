"""Test the text decoders of multimodal models: both forms of an export, and adapters for both."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from distributed_training.checkpoint.export import save_full_model
from distributed_training.checkpoint.trained import TrainedModel
from distributed_training.models import ModelSpec, find_model
from distributed_training.models.peft import Adapters, read_folder, save_adapters
from distributed_training.settings.config import Config
from tests.models.hub_folders import KINDS, randomize
from tests.models.theirs import logits, read_tensors
from tests.reference import call_reference
from tests.support import assert_near, read_model, refused

_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
# Type -> (kind of its text decoder, shape of its vision tower)
_TYPES = {
    "qwen3_5": ("qwen3_5_text", {"depth": 1, "hidden_size": 32, "out_hidden_size": 32}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"depth": 1, "hidden_size": 32, "out_hidden_size": 32}),
    "gemma3": ("gemma3_text", {**_TOWER, "num_attention_heads": 2, "image_size": 28}),
    "gemma4": ("gemma4_text", {**_TOWER, "num_attention_heads": 2, "head_dim": 16}),
    "mistral3": ("mistral-window", {**_TOWER, "num_attention_heads": 2, "image_size": 28}),
}
# The whole model does not scale its logits, as the class of the text decoder does.
_OTHER_LOGITS = {
    "llava": ("granite", {**_TOWER, "num_attention_heads": 2, "image_size": 28}),
    "cohere2_vision": ("granite", {**_TOWER, "num_attention_heads": 2, "image_size": 28}),
}
IDS = torch.arange(5, 25)[None]
# How vLLM renames tensors and adapters of these types (hf_to_vllm_mapper in gemma3_mm.py,
# gemma4_mm.py, mistral3.py and qwen3_vl.py in vllm/model_executor/models, read in November 2026)
_VLLM_PREFIXES = {
    "model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
    "model.visual.": "visual.", "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.embed_vision.": "embed_vision.",
}  # fmt: skip


def vllm_module(name: str) -> str:
    """Return the name of the module in vLLM to which a tensor or an adapter of a whole model
    belongs (parse_fine_tuned_lora_name in vllm/lora/utils.py)."""
    name = name.removeprefix("base_model.model.")
    for prefix, new_prefix in _VLLM_PREFIXES.items():
        if name.startswith(prefix):
            name = new_prefix + name.removeprefix(prefix)
            break
    return name.partition(".lora_")[0].removesuffix(".weight")


def make_whole(model_type: str, folder: Path) -> Path:
    """Save a tiny random multimodal model."""
    kind, tower = {**_TYPES, **_OTHER_LOGITS}[model_type]
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
def whole(request, tmp_path) -> tuple[Path, ModelSpec]:
    """Return (folder of a whole model, spec of its text decoder)."""
    folder = make_whole(request.param, tmp_path / "whole")
    return folder, find_model(str(folder))


@pytest.mark.processes
def test_exports_are_the_whole_model_or_its_text_decoder(whole, tokenizer, tmp_path):
    folder, spec = whole
    expected = call_reference(logits, folder, IDS, auto=AutoModelForImageTextToText)
    ours = read_model(spec, folder)
    assert_near(ours(IDS), expected)
    state = ours.state_dict()

    for file in (folder / "preprocessor_config.json", tmp_path / "secret"):
        file.write_text("{}")
    (folder / "video_preprocessor_config.json").symlink_to(tmp_path / "secret")
    trained = TrainedModel(spec=spec, weights=lambda name, _: state[name])
    for name, is_text in (("again", False), ("text", True)):
        path = tmp_path / name
        save_full_model(trained, tokenizer, False, folder, path, text=is_text)
        names = [file.name for file in path.glob("*processor_config.json")]
        assert names == ([] if is_text else ["preprocessor_config.json"])
    exported = load_file(tmp_path / "again" / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(values, exported[name]) for name, values in stored.items())
    for auto, path in (
        (AutoModelForImageTextToText, tmp_path / "again"),
        (AutoModelForCausalLM, tmp_path / "text"),
    ):
        name, _ = call_reference(read_tensors, path, auto)
        assert_near(call_reference(logits, path, IDS, auto=auto), expected)
    text_config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert "text_config" not in text_config
    assert text_config["architectures"] == [name]  # also the classes of vLLM
    modules = tuple(_VLLM_PREFIXES.values())
    assert all(f"{vllm_module(key)}.".startswith(modules) for key in exported)


@pytest.mark.parametrize("model_type", _OTHER_LOGITS)
def test_a_text_decoder_whose_logits_are_not_those_of_the_whole_model_is_refused(
    model_type, tmp_path
):
    with refused(model_type, "other logits"):
        find_model(str(make_whole(model_type, tmp_path)))


@pytest.mark.processes
def test_adapters_fit_the_whole_model_or_its_text_decoder(whole, tmp_path):
    folder, spec = whole
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
    expected = call_reference(logits, tmp_path / "merged", IDS)
    base = read_model(spec, folder)
    spec.save(lambda name, _: base.state_dict()[name], tmp_path / "text", **weights)
    for of_text, their_base, auto in (
        (False, folder, AutoModelForImageTextToText),
        (True, tmp_path / "text", AutoModelForCausalLM),
    ):
        path = tmp_path / f"adapters-{of_text}"
        save_adapters(adapters, path, str(folder), text=of_text)
        names = load_file(path / "adapter_model.safetensors")
        weights = load_file(their_base / "model.safetensors")
        assert {*map(vllm_module, names)} <= {*map(vllm_module, weights)}
        found = call_reference(logits, their_base, IDS, adapters=path, auto=auto)
        assert_near(found, expected)
        read = read_folder(spec, path).tensors
        assert all(torch.equal(values, read[name]) for name, values in tensors.items())
