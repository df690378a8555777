import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from distributed_training.models import ModelSpec
from distributed_training.models.gpt2 import build as build_model
from tests.models.test_model import SIZE, random_model
from tests.support import refused


def hf_model(size, seed=0):
    """Hugging Face's GPT-2 with every parameter random, biases and norms too."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size.vocab_size,
            n_positions=size.num_positions,
            n_layer=size.num_layers,
            n_head=size.num_heads,
            n_embd=size.hidden_size,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ids_for(size):
    return torch.randint(size.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))


def save(model, folder, size=SIZE):
    spec = ModelSpec(label="", family="gpt2", size=size)
    spec.save(dict(model.state_dict()), folder, eos_token_id=0)
    return folder


def load(folder, size=SIZE):
    model = build_model(size, dropout=0.0, seed=1)
    ModelSpec(label="", family="gpt2", size=size).load(model, folder)
    return model


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path):
    return save(random_model(), tmp_path / "hf")


def test_logits_after_loading_equal_hugging_faces(tmp_path):
    theirs = hf_model(SIZE)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    ids = ids_for(SIZE)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-4)


def test_a_saved_folder_opens_in_hugging_face_with_equal_logits(folder):
    ours = random_model()
    theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
    ids = ids_for(SIZE)
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-4)
    assert theirs.lm_head.weight.data_ptr() == theirs.transformer.wte.weight.data_ptr()
    assert theirs.transformer.wte.weight.shape == (SIZE.vocab_size, SIZE.hidden_size)
    assert theirs.dtype == torch.float32


def test_half_precision_weights_are_loaded_in_fp32(folder):
    edit_tensors(folder, lambda t: t.update({name: x.bfloat16() for name, x in t.items()}))
    model = load(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    expected = random_model().position_embedding.weight.bfloat16().float()
    assert torch.equal(model.position_embedding.weight, expected)


def test_names_without_the_transformer_prefix_load(folder):
    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    before = load(folder)
    edit_tensors(folder, strip)
    after = load(folder)
    ids = ids_for(SIZE)
    assert torch.equal(before(ids), after(ids))


@pytest.mark.parametrize(("key", "field"), [("vocab_size", "vocab_size"), ("n_head", "num_heads")])
def test_another_size_names_what_differs(key, field, folder):
    value = getattr(SIZE, field)
    other = dataclasses.replace(SIZE, **{field: 2 * value})
    with refused(f"{field}={value} but the model has {2 * value}", "set model to the size"):
        load(folder, other)


@pytest.mark.parametrize("keep", [4, 0.99])
def test_truncated_weights(keep, folder):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with refused("model.safetensors cannot be read", "fetch it again"):
        load(folder)


FC = "h.1.mlp.c_fc.bias"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (FC, None, "is missing"),
        (FC, lambda tensor: tensor.to(torch.int8), "int8"),
        ("ln_f.bias", lambda _: torch.zeros(31), "[31]"),
        # Fewer rows than the vocabulary: zeros would be put in.
        ("wte.weight", lambda _: torch.zeros(250, 32), "[250, 32]"),
        ("wte.weight", lambda _: torch.zeros(300), "[300]"),  # else an IndexError
        ("h.0.attn.c_attn.bias", lambda _: torch.zeros(97), "[97]"),  # else a RuntimeError
    ],
)
def test_tensors_that_do_not_fit_are_named(name, change, words, folder):
    def edit(tensors):
        tensor = tensors.pop(f"transformer.{name}")
        if change is not None:
            tensors[f"transformer.{name}"] = change(tensor)

    edit_tensors(folder, edit)
    with refused(str(folder), "shapes differ", name, words):
        load(folder)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("activation_function", "gelu_new", "relu"),
        ("layer_norm_epsilon", 1e-5, 1e-6),
        ("n_inner", None, 7),
        ("n_inner", 4 * SIZE.hidden_size, 2 * SIZE.hidden_size),
        ("scale_attn_weights", True, False),
        ("scale_attn_by_inverse_layer_idx", False, True),
        ("tie_word_embeddings", True, False),
    ],
)
def test_weights_of_another_function_are_refused(key, good, bad, folder):
    edit_config(folder, **{key: good})
    load(folder)
    edit_config(folder, **{key: bad})
    with refused(str(folder), f"{key}={bad!r}", "GPT-2"):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)
