"""Define the GPT-2 model family: its sizes and the Hugging Face format of its weights. This module
imports torch only inside functions.

CONTRIBUTING.md describes the exports of a family."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from distributed_training.models.config_file import CONFIG_FILE, Count, FamilyConfig, read_config
from distributed_training.models.size import BlockKind, ModelSize
from distributed_training.models.weights import is_tied, rename_parts
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import parse_as

if TYPE_CHECKING:
    import torch

# Our names -> Hugging Face names
_NAMES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "blocks": "transformer.h",
    "norm_1": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "norm_2": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
    "norm_out": "transformer.ln_f",
    "output_rows": "lm_head",
}
# Dimensions of the parameters that tp shards
_CUTS = {
    "qkv.weight": 0,
    "qkv.bias": 0,
    "attention_out.weight": 1,
    "mlp_in.weight": 0,
    "mlp_in.bias": 0,
    "mlp_out.weight": 1,
}


def gpt2_size(
    *, num_positions: int = 1024, num_layers: int, hidden_size: int, **shape: Any
) -> ModelSize:
    """Return the ModelSize of a GPT-2 model. Its `num_parameters` equals the parameter count of
    `GPT2LMHeadModel` in transformers."""
    d = hidden_size
    kind = BlockKind(
        layers=tuple(range(num_layers)),
        attention_width=d,
        matrices=((3 * d, d), (d, d), (4 * d, d), (d, 4 * d)),  # attention, MLP
        hf_matrices={name: _NAMES[name] for name in ("qkv", "attention_out", "mlp_in", "mlp_out")},
        cuts=_CUTS,
        parameters=12 * d**2 + 13 * d,  # matrices, biases (9 d) and two norms (4 d)
        split_parameters=12 * d**2 + 7 * d,
        norm_parameters=4 * d,
    )
    return ModelSize(
        **shape,
        num_positions=num_positions,
        hidden_size=d,
        kinds=(kind,),
        final_norm_parameters=2 * d,
        position_parameters=num_positions * d,
    )


# Some sizes are not published. The tiny ones, for CPUs and tests, have the vocabulary of the
# tokenizer in assets/. gpt2-xl-20-heads has gpt2-xl's matrices, but its heads can be sharded over
# 2, 4, 5, 10 or 20 ranks. gpt2-xl's 25 heads can be sharded only over 5 or 25 ranks.
_NAMED = json.loads((Path(__file__).parent / "sizes.json").read_text())
HUB_IDS = {name: shape.pop("hub_id") for name, shape in _NAMED.items() if "hub_id" in shape}
SIZES = {name: gpt2_size(**shape) for name, shape in _NAMED.items()}
MODEL_TYPES = ("gpt2",)
MODEL = "distributed_training.models.gpt2.model:GPT2"
STORES_TRANSPOSED = True  # Hugging Face's Conv1D stores weights as [in, out].


class _Config(FamilyConfig, populate_by_name=True):
    """Keys of a config.json that affect the computation. Options that differ from GPT-2's published
    architecture are rejected."""

    model_type: Literal["gpt2"]
    vocab_size: Count
    num_positions: Count = Field(alias="n_positions")
    num_layers: Count = Field(alias="n_layer")
    num_heads: Count = Field(alias="n_head")
    hidden_size: Count = Field(alias="n_embd")
    n_inner: int | None = None
    # two names for the same function
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    layer_norm_epsilon: float = Field(1e-5, ge=1e-5, le=1e-5)
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tied: bool = Field(True, alias="tie_word_embeddings")


def read_size(folder: Path) -> ModelSize:
    """Return the size of the model in a Hugging Face folder. Raises UserError if the model's
    architecture differs from the published architecture."""
    fix = "use a GPT-2 model with the published architecture, or set weights to random"
    config = parse_as(_Config, read_config(folder), str(folder / CONFIG_FILE), fix)
    heads = config.num_heads
    width = config.hidden_size
    if width % heads:
        raise UserError(f"{folder}: n_embd={width} is not divisible by n_head={heads}", fix=fix)
    if config.n_inner not in (None, 4 * width):
        what = f"{folder}: n_inner={config.n_inner} is not 4 x n_embd = {4 * width}"
        raise UserError(what, fix=fix)
    shape = {"vocab_size", "num_positions", "num_layers", "num_heads", "hidden_size"}
    tied = is_tied(folder, config.tied, "transformer.wte.weight")
    return gpt2_size(**config.model_dump(include=shape), tied=tied)


def to_hf(our_name: str, tensor: torch.Tensor, size: ModelSize) -> tuple[str, torch.Tensor]:
    """Return the Hugging Face name of this package's tensor `our_name`, and a view of it with
    Hugging Face's order of rows. Each row of `tensor` may have any shape."""
    name = rename_parts(our_name, _NAMES)
    if our_name.startswith(("token_embedding", "output_rows")):
        tensor = tensor[: size.vocab_size]
    if ".qkv." in our_name:  # (head, q/k/v, K) -> (q/k/v, head, K)
        tensor = tensor.unflatten(0, (size.num_heads, 3, -1)).transpose(0, 1)
    return name, tensor


def to_config(size: ModelSize, eos_token_id: int) -> dict[str, Any]:
    """Return a config.json for transformers' GPT2LMHeadModel."""
    shape = {**asdict(size), "num_layers": size.num_layers}
    document = _Config(model_type="gpt2", **shape).model_dump(by_alias=True)
    tokens = {"bos_token_id": eos_token_id, "eos_token_id": eos_token_id}
    return {**document, **tokens, "architectures": ["GPT2LMHeadModel"]}
