"""Compare GPT-2, and the dense models whose sizes are computed, with transformers."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from distributed_training.models import config_file, find_model, gpt2, weights
from tests.models.hub_folders import make_folder, random_model
from tests.models.theirs import logits, read_tensors, train_step
from tests.reference import call_reference
from tests.support import assert_near, edit_json, read_model, refused, save_model

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
IDS = torch.randint(300, (2, 41), generator=torch.Generator().manual_seed(0))
PADDING_ID = int(IDS[0, 1])  # both an input and a target
OPTIONS = {
    "gpt2": ("GPT2", {}),
    "llama": ("Llama", {}),
    "llama-one-head-of-k-and-v": ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-padding": ("Llama", {"pad_token_id": PADDING_ID}),
    "llama-padding-tied": ("Llama", {"pad_token_id": PADDING_ID, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
}  # fmt: skip


def theirs(name: str, folder: Path) -> torch.nn.Module:
    """Build a transformers model with random parameters, including norms and biases. Save the model
    to `folder`, and return it."""
    class_name, options = OPTIONS[name]
    model = random_model(getattr(transformers, f"{class_name}Config")(**{**SHAPE, **options}))
    model.save_pretrained(folder)
    return model


def ours(folder: Path, spec=None):
    return read_model(spec or find_model(str(folder)), folder)


def exported(state, folder: Path) -> Path:
    """Save our weights, and return the folder."""
    save_model(find_model(str(folder)), state, folder / "ours")
    return folder / "ours"


def their_logits(folder: Path) -> torch.Tensor:
    return call_reference(logits, folder, IDS)


@pytest.mark.processes
@pytest.mark.parametrize("name", OPTIONS)
def test_logits_loss_gradients_and_exports_equal_transformers(name, tmp_path):
    theirs(name, tmp_path)
    model = ours(tmp_path)
    inputs, targets = IDS[:, :-1].contiguous(), IDS[:, 1:].contiguous()
    expected = call_reference(train_step, tmp_path, inputs, targets)
    assert model.size.num_parameters == expected.num_parameters
    assert_near(model(inputs), expected.logits)
    loss = model(inputs, targets)
    loss.backward()
    assert_near(loss, expected.loss)
    # `save` converts names and shapes to the Hugging Face format, so it also works for gradients.
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    _, found = call_reference(read_tensors, exported(gradients, tmp_path))
    class_name, _ = call_reference(read_tensors, exported(model.state_dict(), tmp_path))
    assert_near(call_reference(logits, tmp_path / "ours", inputs), expected.logits)
    document = json.loads((tmp_path / "ours" / "config.json").read_text())
    # A config that has an end token keeps it.
    end = 2 if name.endswith("one-head-of-k-and-v") else 7
    assert (document["eos_token_id"], document["architectures"]) == (end, [class_name])
    for key, gradient in expected.gradients.items():
        assert_near(found[key], gradient)
        assert gradient.norm() > 0


QWEN2 = {"model_type": "qwen2"}
# Values in published config.json files, in addition to SHAPE
SPELLINGS = {
    "rope-theta": {"rope_theta": 1e6},
    "rope-llama3-original-apart": {
        "original_max_position_embeddings": 16,
        "rope_scaling": {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    },
    "swish": {"hidden_act": "swish"},
    "sliding-window-of-another-family": {"sliding_window": 4, "use_sliding_window": True},
    "qwen2-no-layer-slides": {
        **QWEN2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2,
    },
    "qwen2-biases": {**QWEN2, "attention_bias": True, "head_dim": 12},
    "qwen3-head-size": {"model_type": "qwen3"},
    "gpt2-names-of-others": {
        "model_type": "gpt2", "n_ctx": 64, "activation_function": "gelu_pytorch_tanh",
        "n_inner": 128,
    },
    "gpt2-untied": {"model_type": "gpt2", "tie_word_embeddings": False},
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_config_gives_the_same_model_as_in_transformers(name, tmp_path):
    config = {"model_type": "llama", **SHAPE, **SPELLINGS[name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    random_model(transformers.AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    find_model(str(tmp_path)).check_weights(tmp_path)
    model = ours(tmp_path)
    expected = their_logits(tmp_path)
    assert_near(model(IDS), expected)
    assert_near(their_logits(exported(model.state_dict(), tmp_path)), expected)
    assert find_model(str(tmp_path / "ours")).size == model.size


# Read only with transformers: names of other families
NEEDS_TRANSFORMERS = {
    "gpt2-names-of-others", "gpt2-untied", "rope-llama3-original-apart",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SPELLINGS.keys() - NEEDS_TRANSFORMERS))
def test_a_config_gives_the_same_size_without_transformers(name, tmp_path, monkeypatch):
    config = {"model_type": "llama", **SHAPE, **SPELLINGS[name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = find_model(str(tmp_path)).size
    monkeypatch.setattr(config_file, "find_spec", lambda _: None)
    assert find_model(str(tmp_path)).size == size


@pytest.mark.processes
def test_the_weights_decide_whether_the_output_layer_is_tied(tmp_path):
    for name in ("llama", "gpt2"):
        folder = tmp_path / name
        theirs(name, folder)
        tensors = load_file(folder / "model.safetensors")
        embedding = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
        edit_json(folder / "config.json", tie_word_embeddings=True)
        own_head = {**tensors, "lm_head.weight": torch.randn(300, 32)}
        same = {**tensors, "lm_head.weight": tensors[embedding].clone()}
        head_alone = {key: value for key, value in same.items() if key != embedding}
        for saved, tied in ((own_head, False), (same, True), (head_alone, True)):
            save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
            model = ours(folder)
            assert model.size.tied == tied
            expected = their_logits(folder)
            assert_near(model(IDS), expected)
            assert_near(their_logits(exported(model.state_dict(), folder)), expected)
        edit_json(folder / "config.json", tie_word_embeddings=False)
        tensors.pop("lm_head.weight", None)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with refused("lm_head.weight is missing"):
            find_model(str(folder)).check_weights(folder)


@pytest.mark.processes
def test_weight_files_are_chosen_as_in_transformers(tmp_path):
    theirs("qwen2", tmp_path)
    expected = their_logits(tmp_path)
    file = tmp_path / "model.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}}))
    assert_near(ours(tmp_path)(IDS), expected)  # a stale index is ignored
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**load_file(file), **buffer}, file, metadata={"format": "pt"})
    assert_near(ours(tmp_path)(IDS), expected)
    save_file({**load_file(file), "score.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    with refused("score.weight", "does not have", "save_pretrained"):
        ours(tmp_path)
    file.rename(tmp_path / "consolidated.safetensors")
    with refused("model-00001-of-00002.safetensors"):
        ours(tmp_path)
    index.unlink()
    with refused(str(tmp_path), "model.safetensors", "weights to random", "save_pretrained"):
        ours(tmp_path)


@pytest.mark.processes
def test_sharded_16_bit_weights_load(tmp_path):
    reference, folder = (theirs("qwen2", tmp_path / "one"), tmp_path / "parts")
    reference.bfloat16().save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = ours(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_near(model(IDS), their_logits(folder))
    next(folder.glob("*00002-of-*")).unlink()
    with refused("00002-of", "cannot be read", "Download"):
        ours(folder)


def edited(folder, edit):
    """Save a GPT-2 model and call `edit` on its saved tensors. Return the logits of the original
    model, and our model loaded from the edited folder."""
    theirs("gpt2", folder)
    expected = their_logits(folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return expected, ours(folder)


@pytest.mark.processes
def test_names_without_the_transformer_prefix_load(tmp_path):
    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    expected, model = edited(tmp_path, strip)
    assert_near(model(IDS), expected)


FC = "h.1.mlp.c_fc.bias"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (FC, None, "is missing"),
        (FC, torch.zeros(128, dtype=torch.int8), "I8"),
        ("ln_f.bias", torch.zeros(31), "[31]"),
        # Missing vocabulary rows must not be filled with zeros.
        ("wte.weight", torch.zeros(250, 32), "[250, 32]"),
        ("wte.weight", torch.zeros(300), "[300]"),  # raised an IndexError in the past
    ],
)
def test_tensors_that_do_not_fit_are_named(name, tensor, words, tmp_path):
    def edit(tensors):
        del tensors[f"transformer.{name}"]
        if tensor is not None:
            tensors[f"transformer.{name}"] = tensor

    with refused(str(tmp_path), "do not fit", name, words):
        edited(tmp_path, edit)


def test_weights_of_another_config_are_refused_by_its_key(tmp_path):
    folder = make_folder("qwen3", tmp_path)
    spec = find_model(str(folder))
    own = json.loads((folder / "config.json").read_text())["rms_norm_eps"]
    edit_json(folder / "config.json", rms_norm_eps=float(np.float32(own)))
    spec.check_weights(folder)
    edit_json(folder / "config.json", rms_norm_eps=2 * own)
    with refused(f"rms_norm_eps={2 * own}", f"has {own}"):
        spec.check_weights(folder)


def test_weights_of_another_size_or_truncated_are_refused(tmp_path):
    theirs("gpt2", tmp_path)
    spec = find_model(str(tmp_path))
    wider = dataclasses.replace(spec.size, vocab_size=600)
    with refused("vocab_size"):
        dataclasses.replace(spec, size=wider).check_weights(tmp_path)
    file = tmp_path / "model.safetensors"
    for kept in (file.stat().st_size - 99, 4):
        os.truncate(file, kept)
        with refused("model.safetensors"):
            ours(tmp_path)


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
GPT2 |= {"vocab_size": 300}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 2}, ("layer_types",)),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, ("no sliding_window",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config",)),
        ({"num_attention_heads": 0}, ("config.json",)),
        ({"head_dim": 0}, ("config.json", "ZeroDivisionError")),
        ({"hidden_size": "32"}, ("hidden_size", "expected int")),
        ({"rope_scaling": [4.0]}, ("config.json",)),
        (
            {"num_key_value_heads": 3},
            ("num_attention_heads=4", "num_key_value_heads=3", "do not fit"),
        ),
        ({**GPT2, "n_embd": "16"}, ("n_embd", "expected int")),
        ({**GPT2, "n_head": 3}, ("n_embd=32", "n_head=3")),
        ({**GPT2, "n_inner": 64}, ("n_inner=64", "128")),
        ({**GPT2, "activation_function": "relu"}, ("activation_function='relu'",)),
        ({**GPT2, "layer_norm_epsilon": 1e-6}, ("layer_norm_epsilon=1e-06",)),
        ({**GPT2, "scale_attn_weights": False}, ("scale_attn_weights=False",)),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx",)),
        ({**GPT2, "add_cross_attention": True}, ("add_cross_attention=True",)),
    ],
)
def test_configs_of_an_unsupported_function_are_refused(changes, words, tmp_path):
    shape = SHAPE if changes.get("model_type") != "gpt2" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape, **changes}))
    with refused(str(tmp_path), *words):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{}", ("weight_map is missing",)),
        ('{"weight_map": ["a"]}', ("weight_map",)),
        ('{"weight_map": {"a": 3}}', ("weight_map.a=3",)),
        ("[" * 2000 + "]" * 2000, ("Recursion limit",)),
    ],
)
def test_unusable_indices_and_shards_are_refused(index, words, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with refused(str(tmp_path), *words):
        weights.open_weights(tmp_path)


# Numbers of parameters, from the models' pages or counted by transformers
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-135M-Instruct": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-0.6B": 596_049_920,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Qwen2.5-7B": 7_615_616_512,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
}


def test_known_sizes_need_no_download():
    assert {name: find_model(name).size.num_parameters for name in PARAMETERS} == PARAMETERS
    assert find_model("Qwen/Qwen3-0.6B") == find_model("Qwen3-0.6B")


def test_parameters_and_flops_match_hand_counts():
    shape = {"vocab_size": 10, "num_positions": 4, "num_layers": 2, "num_heads": 1}
    size = gpt2.gpt2_size(hidden_size=3, **shape)
    # embeddings: 14 x 3; two blocks: 12 x 9 + 13 x 3 each; final norm: 6
    assert size.num_parameters == 42 + 2 * 147 + 6
    assert size.padded_vocab_size == 128
    assert size.flops_per_token(4) == 6 * 342 + 12 * 2 * 3 * 4
