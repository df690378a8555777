"""GPT-2 folders in Hugging Face's format: described, read and written. torch comes with tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.models.gpt2.sizes import gpt2_size
from distributed_training.models.size import ModelSize
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json, shown

if TYPE_CHECKING:
    import torch

    from distributed_training.models.decoder import Decoder

# Our field -> Hugging Face's, with what GPT2Config takes where config.json says nothing.
HF_KEYS = {
    "vocab_size": ("vocab_size", 50257),
    "num_positions": ("n_positions", 1024),
    "num_layers": ("n_layer", 12),
    "num_heads": ("n_head", 12),
    "hidden_size": ("n_embd", 768),
}
# The same tensors can make another function: our model computes the published one only.
_FORM: dict[str, Any] = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
# Our module -> Hugging Face's. Those called c_ are Conv1D: weights stored [in, out].
_BLOCK = {
    "norm_1": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "norm_2": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}


def read_size(folder: Path) -> ModelSize:
    """The size that `folder`/config.json describes; UserError where it is not our GPT-2's."""
    config = load_json(folder / "config.json", "model")
    if not isinstance(config, dict) or config.get("model_type") != "gpt2":
        raise UserError(f"{folder}: config.json is not a GPT-2's", "model_type is not gpt2")
    values = {field: config.get(key, usual) for field, (key, usual) in HF_KEYS.items()}
    for (key, _), value in zip(HF_KEYS.values(), values.values(), strict=True):
        if type(value) is not int or value < 1:
            raise UserError(f"{folder}: {key}={shown(value)} is not a whole number of 1 or more")
    heads, width = values["num_heads"], values["hidden_size"]
    if width % heads:
        raise UserError(f"{folder}: n_head={heads} does not divide n_embd={width}")
    if config.get("n_inner") is None:
        config["n_inner"] = 4 * width
    for key, published in {**_FORM, "n_inner": 4 * width}.items():
        if config.get(key, published) != published:
            raise UserError(
                f"{folder}: {key}={shown(config[key])} but the published GPT-2, which is what this "
                f"suite trains, has {published!r}",
                fix="give a GPT-2 of the published form, or set weights to random",
            )
    return gpt2_size(**values)


def load(model: Decoder, folder: Path) -> None:
    """Copy the weights in `folder` into `model`, in fp32; raise UserError where they do not fit."""
    from safetensors.torch import load_file

    theirs = load_file(folder / "model.safetensors")
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    state = model.state_dict()
    for ours, name in _pairs(model.size):
        if name not in theirs:
            raise UserError(f"weights {folder}: tensor {name} is missing", "not a GPT-2 checkpoint")
        tensor, expected = theirs[name], _to_hf(name, state[ours].to("meta"), model.size).shape
        if tensor.shape != expected or not tensor.is_floating_point():
            found = f"{name} ({ours} here) is {tensor.dtype} {list(tensor.shape)}"
            why = f"{found} and should be a float {list(expected)}"
            raise UserError(f"weights {folder}: shapes differ", why)
        state[ours] = _from_hf(name, tensor.float(), model.size)
    model.load_state_dict(state)


def save(
    state: dict[str, torch.Tensor], size: ModelSize, folder: Path, *, eos_token_id: int
) -> None:
    """Write full fp32 `state` (our names, on the CPU) as a folder that
    `GPT2LMHeadModel.from_pretrained` opens."""
    from safetensors.torch import save_file
    from transformers import GPT2Config

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"transformer.{theirs}": _to_hf(theirs, state[ours], size).contiguous()
        for ours, theirs in _pairs(size)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    GPT2Config(
        **{key: getattr(size, field) for field, (key, _) in HF_KEYS.items()},
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
        architectures=["GPT2LMHeadModel"],
        dtype="float32",
    ).save_pretrained(folder)


def _pairs(size: ModelSize) -> Iterator[tuple[str, str]]:
    """(our parameter, Hugging Face's)"""
    yield "token_embedding.weight", "wte.weight"
    yield "position_embedding.weight", "wpe.weight"
    blocks = [
        (f"blocks.{i}.{ours}", f"h.{i}.{theirs}")
        for i in range(size.num_layers)
        for ours, theirs in _BLOCK.items()
    ]
    for ours, theirs in (*blocks, ("norm_out", "ln_f")):
        for part in ("weight", "bias"):
            yield f"{ours}.{part}", f"{theirs}.{part}"


def _to_hf(name: str, tensor: torch.Tensor, size: ModelSize) -> torch.Tensor:
    if name == "wte.weight":
        return tensor[: size.vocab_size]
    if ".c_attn." in name:  # rows (head, q/k/v, K) -> (q/k/v, head, K)
        tensor = tensor.unflatten(0, (size.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return tensor.t() if ".c_" in name else tensor


def _from_hf(name: str, tensor: torch.Tensor, size: ModelSize) -> torch.Tensor:
    if name == "wte.weight":
        padded = tensor.new_zeros(size.padded_vocab_size, size.hidden_size)
        padded[: size.vocab_size] = tensor
        return padded
    tensor = tensor.t() if ".c_" in name else tensor
    if ".c_attn." in name:
        tensor = tensor.unflatten(0, (3, size.num_heads, -1)).transpose(0, 1).flatten(0, 2)
    return tensor
