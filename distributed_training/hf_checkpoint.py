"""GPT-2 folders in Hugging Face's format: read into our model, and written from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from distributed_training.errors import UserError
from distributed_training.hf_format import check_hf_folder
from distributed_training.model import GPT2
from distributed_training.sizes import ModelSize

# Our name -> Hugging Face's. Their linear layers are Conv1D: weights stored [in, out].
_BLOCK = {
    "norm_1": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "norm_2": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
_LINEAR = ("qkv", "attention_out", "mlp_in", "mlp_out")


def _pairs(size: ModelSize) -> Iterator[tuple[str, str, str]]:
    """(our parameter, their parameter, kind) with kind plain | embedding | linear | qkv."""
    yield "token_embedding.weight", "wte.weight", "embedding"
    yield "position_embedding.weight", "wpe.weight", "plain"
    for layer in range(size.num_layers):
        for ours, theirs in _BLOCK.items():
            kind = "qkv" if ours == "qkv" else "linear" if ours in _LINEAR else "plain"
            for part in ("weight", "bias"):
                yield f"blocks.{layer}.{ours}.{part}", f"h.{layer}.{theirs}.{part}", kind
    for part in ("weight", "bias"):
        yield f"norm_out.{part}", f"ln_f.{part}", "plain"


def _to_hf(tensor: torch.Tensor, kind: str, size: ModelSize) -> torch.Tensor:
    if kind == "embedding":
        return tensor[: size.vocab_size]
    if kind == "qkv":  # rows (head, q/k/v, K) -> (q/k/v, head, K)
        k = size.hidden_size // size.num_heads
        rows = tensor.view(size.num_heads, 3, k, *tensor.shape[1:])
        tensor = rows.transpose(0, 1).reshape(tensor.shape)
    return tensor.T if kind in ("qkv", "linear") and tensor.dim() == 2 else tensor


def _from_hf(tensor: torch.Tensor, kind: str, size: ModelSize) -> torch.Tensor:
    if kind == "embedding":
        padding = size.padded_vocab_size - tensor.shape[0]
        return torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])])
    if kind in ("qkv", "linear") and tensor.dim() == 2:
        tensor = tensor.T
    if kind == "qkv":
        k = size.hidden_size // size.num_heads
        rows = tensor.reshape(3, size.num_heads, k, *tensor.shape[1:])
        tensor = rows.transpose(0, 1).reshape(tensor.shape)
    return tensor


def load_hf_weights(model: GPT2, folder: Path) -> None:
    """Copy a Hugging Face GPT-2 folder's weights into `model`, in fp32.

    Raises UserError when the folder holds no such checkpoint or one of another shape.
    """
    check_hf_folder(folder, model.size)
    try:
        theirs = load_file(folder / "model.safetensors")
    except Exception as error:  # safetensors raises its own, undocumented classes
        raise UserError(
            f"weights {folder}: model.safetensors cannot be read", str(error), "fetch it again"
        ) from None
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    own = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    state = {}
    for ours, name, kind in _pairs(model.size):
        if name not in theirs:
            raise UserError(f"weights {folder}: tensor {name} is missing", "not a GPT-2 checkpoint")
        expected = _to_hf(own[ours], kind, model.size).shape
        if theirs[name].shape != expected or not theirs[name].is_floating_point():
            raise UserError(
                f"weights {folder}: shapes differ",
                f"{name} ({ours} here) is {theirs[name].dtype} {list(theirs[name].shape)} and "
                f"should be a float {list(expected)}",
            )
        state[ours] = _from_hf(theirs[name].float(), kind, model.size)
    model.load_state_dict(state)


def save_hf_folder(
    state: dict[str, torch.Tensor], size: ModelSize, folder: Path, *, eos_token_id: int
) -> None:
    """Write full fp32 `state` (our names, on the CPU) as a folder that
    `GPT2LMHeadModel.from_pretrained` opens. The tied output layer is not stored twice.
    """
    from transformers import GPT2Config

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"transformer.{theirs}": _to_hf(state[ours], kind, size).contiguous()
        for ours, theirs, kind in _pairs(size)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    GPT2Config(
        vocab_size=size.vocab_size,
        n_positions=size.num_positions,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        n_embd=size.hidden_size,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
        architectures=["GPT2LMHeadModel"],
        dtype="float32",
    ).save_pretrained(folder)
