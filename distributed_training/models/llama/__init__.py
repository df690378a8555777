"""Define the Llama model family and its Hugging Face format. The family also includes Mistral,
Qwen2 and Qwen3. This module imports torch only inside functions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, model_validator

from distributed_training.models.config_file import (
    CONFIG_FILE,
    Count,
    FamilyConfig,
    complete_config,
    read_config,
)
from distributed_training.models.size import BlockKind, ModelSize
from distributed_training.models.weights import is_tied, rename_parts
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import parse_as

if TYPE_CHECKING:
    import torch

ModelType = Literal["llama", "mistral", "qwen2", "qwen3"]
MODEL_TYPES = get_args(ModelType)
MODEL = "distributed_training.models.llama.model:Llama"
STORES_TRANSPOSED = False
SIZES: dict[str, ModelSize] = {}  # models/table.json has those of published models
HUB_IDS: dict[str, str] = {}
_FIX = "use a model without it, for example one in models/table.json"
# Our names -> Hugging Face names, except for tensors that combine several Hugging Face tensors
_NAMES = {
    "token_embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "norm_1": "input_layernorm",
    "norm_q": "self_attn.q_norm",
    "norm_k": "self_attn.k_norm",
    "attention_out": "self_attn.o_proj",
    "norm_2": "post_attention_layernorm",
    "mlp_out": "mlp.down_proj",
    "norm_out": "model.norm",
    "output_rows": "lm_head",
}


class Rope(BaseModel, strict=True, extra="forbid"):
    """The `rope_parameters` of a transformers config, which set the frequencies of the rotary
    position embedding."""

    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_type: Literal["default", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Remove redundant entries: the older name for `rope_type`, and a `partial_rotary_factor`
        of 1."""
        values = {key: value for key, value in values.items() if key != "type"}
        if values.get("partial_rotary_factor") == 1:
            del values["partial_rotary_factor"]
        return values


class Config(FamilyConfig):
    """Keys of a config.json that affect the computation, as transformers reads them
    (models/config_file.py). Models with other values, such as sliding windows, use transformers'
    code (models/hub/)."""

    model_type: ModelType
    vocab_size: Count
    max_position_embeddings: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    hidden_size: Count
    intermediate_size: Count
    rope_parameters: Rope = Rope()
    rms_norm_eps: float = Field(1e-6, gt=0)
    tie_word_embeddings: bool = False
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    hidden_act: Literal["silu", "swish"] = "silu"  # two names for the same function
    sliding_window: None = None
    layer_types: None = None

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, raw_values: dict[str, Any]) -> dict[str, Any]:
        """Remove values that transformers ignores for this model type, and add `head_dim` if it is
        missing."""
        values = {key: value for key, value in raw_values.items() if value is not None}
        model_type = values.get("model_type")
        heads = values.get("num_attention_heads") or 1
        values.setdefault("head_dim", values.get("hidden_size", 0) // heads)
        if model_type not in ("llama", "qwen3"):
            values.pop("attention_bias", None)
        layers = values.get("layer_types", ())
        if model_type not in ("qwen2", "qwen3") or set(layers) == {"full_attention"}:
            values.pop("layer_types", None)
        if model_type != "mistral" and "layer_types" not in values:
            values.pop("sliding_window", None)
        return values

    @property
    def has_qkv_bias(self) -> bool:
        """Return whether q, k and v have a bias."""
        return self.model_type == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """Return whether each head of q and k is normalized."""
        return self.model_type == "qwen3"


def llama_size(config: Config) -> ModelSize:
    """Return the ModelSize that a Llama config describes. Its `num_parameters` equals the parameter
    count of the model in transformers."""
    d = config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    qkv = heads + 2 * kv
    hidden = config.intermediate_size
    matrices = ((qkv, d), (d, heads), (2 * hidden, d), (d, hidden))
    split = sum(rows * columns for rows, columns in matrices)
    num_biases = 0
    if config.has_qkv_bias:
        split += qkv
        num_biases = 1
    norms = [d, d]
    if config.has_qk_norm:
        norms += [config.head_dim, config.head_dim]
    # q and k after rotation. Without a norm of q and k, which needs the matrix's output, only q, k
    # and a copy of v are kept: as many values as the output has.
    kept = heads + kv if config.has_qk_norm else 0
    # k and v for each head replace k after rotation or, without a norm, the copies of k and v.
    repeated = 0
    if kv < heads:
        repeated = 2 * heads - (kv if config.has_qk_norm else 2 * kv)
    kind = BlockKind(
        layers=tuple(range(config.num_hidden_layers)),
        attention_width=heads,
        matrices=matrices,
        hf_matrices={
            "qkv": {"self_attn.q_proj": heads, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
            "attention_out": {_NAMES["attention_out"]: d},
            "mlp_in": {"mlp.gate_proj": hidden, "mlp.up_proj": hidden},
            "mlp_out": {_NAMES["mlp_out"]: d},
        },
        parameters=split + sum(norms),
        split_parameters=split,
        norm_parameters=sum(norms),
        tensors=len(matrices) + len(norms) + num_biases,
        gated_mlps=(("mlp_in", "mlp_in", "mlp_out", "silu"),),
        kept_values=kept,
        repeated_values=repeated,
    )
    return ModelSize(
        vocab_size=config.vocab_size,
        num_positions=config.max_position_embeddings,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        mlp_units=hidden // unit_size(hidden),
        hidden_size=d,
        kinds=(kind,),
        final_norm_parameters=d,
        tied=config.tie_word_embeddings,
        config=config,
    )


def listed_size(entry: dict[str, Any]) -> ModelSize:
    """Return the size of a model in models/table.json."""
    return llama_size(Config(**complete_config(entry["config"])))


def read_size(folder: Path) -> ModelSize:
    """Return the size of the model in a Hugging Face folder. Raises UserError if this family does
    not support the architecture."""
    document = read_config(folder)
    config = parse_as(Config, document, str(folder / CONFIG_FILE), _FIX)
    heads = config.num_attention_heads
    groups = config.num_key_value_heads
    if heads % groups or config.head_dim % 2:
        what = f"{folder}: num_attention_heads={heads}, num_key_value_heads={groups} and "
        what += f"head_dim={config.head_dim} do not fit together"
        why = "num_key_value_heads must divide num_attention_heads, and head_dim must be even"
        raise UserError(what, why, "correct its config.json")
    tied = is_tied(folder, config.tie_word_embeddings, f"{_NAMES['token_embedding']}.weight")
    size = llama_size(config.model_copy(update={"tie_word_embeddings": tied}))
    return replace(size, padding_id=document.get("pad_token_id"))


def to_hf(our_name: str, tensor: torch.Tensor, size: ModelSize) -> dict[str, torch.Tensor]:
    """Return views of the Hugging Face tensors that this package's tensor `our_name` contains,
    keyed by name. Each row of `tensor` may have any shape."""
    name = rename_parts(our_name, _NAMES)
    if our_name.startswith(("token_embedding", "output_rows")):
        return {name: tensor[: size.vocab_size]}
    config = size.config
    if ".qkv." in our_name:
        queries_per_group = config.num_attention_heads // config.num_key_value_heads
        shape = (config.num_key_value_heads, queries_per_group + 2, config.head_dim)
        groups = tensor.unflatten(0, shape)
        rows_by_key = {
            "q": groups[:, :queries_per_group],
            "k": groups[:, queries_per_group],
            "v": groups[:, -1],
        }
        return {
            name.replace("qkv", f"self_attn.{key}_proj"): rows for key, rows in rows_by_key.items()
        }
    if ".mlp_in." in our_name:
        units = tensor.unflatten(0, (-1, 2, unit_size(config.intermediate_size)))
        return {
            name.replace("mlp_in", "mlp.gate_proj"): units[:, 0],
            name.replace("mlp_in", "mlp.up_proj"): units[:, 1],
        }
    return {name: tensor}


def to_config(size: ModelSize, eos_token_id: int) -> dict[str, Any]:
    """Return a config.json for transformers' `AutoModelForCausalLM`. Older versions of transformers
    can also read the result."""
    config = size.config
    rope = config.rope_parameters
    document = config.model_dump(exclude={"rope_parameters"}) | {"rope_theta": rope.rope_theta}
    if rope.rope_type != "default":
        document["rope_scaling"] = rope.model_dump(exclude={"rope_theta"}, exclude_unset=True)
    del document["layer_types"]
    architecture = f"{config.model_type.capitalize()}ForCausalLM"
    tokens = {"eos_token_id": eos_token_id, "pad_token_id": size.padding_id}
    return {**document, **tokens, "architectures": [architecture]}


def unit_size(hidden: int) -> int:
    """Return the number of gate rows in each unit of `mlp_in`. In a unit, the gate rows are
    followed by the same number of up-projection rows. Units are small enough for tp to distribute
    them over ranks, and large enough for efficient GPU reads."""
    return math.gcd(hidden, 16)
