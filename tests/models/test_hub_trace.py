"""Compare traced sizes with the formulas for dense models, and test which strategies reject traced
models."""

from dataclasses import replace
from unittest.mock import ANY

import pytest
import transformers

from distributed_training.models import find_model
from distributed_training.models.hub import measure_size
from distributed_training.models.hub.dense import dense_size
from distributed_training.planner.choose import choose_model
from distributed_training.predict.predict import parse_cluster
from distributed_training.settings.request import build_config
from tests.models.hub_folders import make_folder
from tests.planner.helpers import UNSPLIT, lay_out
from tests.support import refused

SHAPE = {
    "vocab_size": 1000, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 2,
    "num_attention_heads": 8, "max_position_embeddings": 2048,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"rope_parameters": LLAMA3, "pad_token_id": 3}),
        ("Llama", {"num_key_value_heads": 8, "head_dim": 128, "hidden_act": "swish"}),
        ("Mistral", {"sliding_window": None, "max_position_embeddings": 100}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 72}),
    ],
)
def test_formulas_give_the_sizes_that_tracing_measures(kind, changes, tied):
    values = {**SHAPE, "num_key_value_heads": 4, "tie_word_embeddings": tied, **changes}
    config = getattr(transformers, f"{kind}Config")(**values)
    size = dense_size(config.to_dict(), "here")
    assert size == measure_size(size.config["document"])
    measured = measure_size(config.to_dict())
    assert size == replace(measured, config={**measured.config, "document": ANY})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_key_value_heads": 1}, "1 key/value heads"),
        ({"num_key_value_heads": 3}, "do not fit"),
        ({"intermediate_size": 1791}, "4 key/value heads"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "layer_types"),
        ({"model_type": "olmo2"}, "model_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_other_models_have_no_formula(changes, words):
    values = {"model_type": "llama", "num_key_value_heads": 4, **SHAPE, **changes}
    with refused("here: ", words):
        dense_size(values, "here")


def test_unfused_attention_saves_more_per_token_in_longer_samples(tmp_path):
    folder = make_folder("gemma2", tmp_path / "gemma2")
    size = find_model(str(folder)).size
    windowed, _ = size.kinds
    assert not windowed.fuses_attention
    short, long = (windowed.split_values("eager", length) for length in (64, 128))
    per_key = (long - short) / 64
    assert per_key >= 4 * 3  # heads x (at least scores, tanh and weights)
    assert windowed.attention_width == 4 * 8
    saved = [windowed.split_values("offload-attention", length) for length in (64, 128)]
    assert saved[0] == saved[1] == windowed.split_values("selective", 64) - 2 * 48  # gate and up

    model = str(folder)
    for name in (*UNSPLIT, "pp", "hybrid", "tp", "cp"):
        assert lay_out(2, f"strategy={name}", f"model={model}", "max_length=64").stages
    with refused("tp=4", "key/value heads"):
        lay_out(4, "strategy=tp", f"model={model}", "max_length=64")
    find_model(model).check_weights(folder)


def test_attention_with_narrow_values_is_fused_as_on_gpus(tmp_path):
    size = find_model(str(make_folder("deepseek_v3", tmp_path))).size
    assert all(kind.fuses_attention for kind in size.kinds)


def test_notes_say_which_blocks_have_adapters_and_what_linear_attention_needs(tmp_path):
    folder = make_folder("qwen3_5_text", tmp_path)
    config = {"model": str(folder), "lora_rank": 4, "lora_targets": "q_proj,v_proj"}
    notes: list[str] = []
    choose_model(build_config(config), parse_cluster("H200").machine, notes)
    assert any("1 of the model's 4 blocks" in note for note in notes)
    assert any("flash-linear-attention" in note for note in notes)


def test_matrices_that_fused_kernels_read_get_no_adapters(tmp_path):
    size = find_model(str(make_folder("falcon_h1", tmp_path))).size
    assert "mamba.in_proj" in size.part_names(None)
    assert "mamba.out_proj" not in size.part_names(None)
