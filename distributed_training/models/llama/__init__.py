"""Llama, Mistral, Qwen2, Qwen3: one model family, in Hugging Face's format. No torch import."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, model_validator

from distributed_training.models import ModelSize
from distributed_training.models.config_file import CONFIG_FILE, read_config
from distributed_training.models.weights import is_tied
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import parse_as

if TYPE_CHECKING:
    import torch

    from distributed_training.models.decoder import Decoder

Kind = Literal["llama", "mistral", "qwen2", "qwen3"]
Count = Annotated[int, Field(ge=1, le=2**24)]
SLIDING = "sliding_attention"
LayerType = Literal["full_attention", "sliding_attention"]
MODEL_TYPES = get_args(Kind)
STORES_TRANSPOSED = False
_FIX = "give a model without it, of those in models/llama/sizes.json for example"
# Our names -> Hugging Face's, but for what holds several of theirs.
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
    """How fast the pairs of a head turn with the position: `rope_parameters` of transformers."""

    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    # Up to max_position_embeddings, beyond which no sequence goes here, "dynamic" is the default.
    rope_type: Literal["default", "linear", "llama3", "dynamic"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Leave out an older file's name of `rope_type`, and the whole as a part of itself."""
        others = {"type": given.get("type"), "partial_rotary_factor": 1.0}
        return {k: v for k, v in given.items() if k not in others or v != others[k]}


class Config(BaseModel, strict=True):
    """A config.json as transformers reads it (models/config_file.py), as far as the function that
    is computed depends on it."""

    model_type: Kind
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
    attention_bias: bool = False
    mlp_bias: Literal[False] = False
    hidden_act: Literal["silu", "swish"] = "silu"  # two names of one function
    sliding_window: Count | None = None  # tokens that each token sees, in layers that slide
    layer_types: tuple[LayerType, ...] | None = Field(None, strict=False)  # None: all alike
    quantization_config: None = Field(None, exclude=True)
    auto_map: None = Field(None, exclude=True)  # somebody's code

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Leave out the values that transformers' model of this type does not look at."""
        values = {key: value for key, value in given.items() if value is not None}
        kind = values.get("model_type")
        heads = values.get("num_attention_heads") or 1
        values.setdefault("head_dim", values.get("hidden_size", 0) // heads)
        if kind not in ("llama", "qwen3"):
            values.pop("attention_bias", None)
        layers = values.get("layer_types") or ["full_attention"]
        if kind not in ("qwen2", "qwen3"):
            values.pop("layer_types", None)
        elif set(layers) == {"full_attention"}:
            values.pop("layer_types", None)
            values.pop("sliding_window", None)
        elif "sliding_window" not in values and SLIDING in layers:
            raise ValueError("layers with a sliding window and no sliding_window")
        if kind == "llama":
            values.pop("sliding_window", None)
        return values

    @property
    def num_positions(self) -> int:
        """Length of the longest sequence of which each token sees all before it."""
        return min(self.max_position_embeddings, self.sliding_window or 2**62)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether there is one after q, k and v, and after attention."""
        return self.attention_bias or self.model_type == "qwen2", self.attention_bias

    @property
    def norms_heads(self) -> bool:
        """Whether each head of q and k is normalised."""
        return self.model_type == "qwen3"


def llama_size(config: Config) -> ModelSize:
    """Its `num_parameters` equals Hugging Face's count."""
    d = config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    qkv = heads + 2 * config.num_key_value_heads * config.head_dim
    hidden = config.intermediate_size
    matrices = ((qkv, d), (d, heads), (2 * hidden, d), (d, hidden))
    split_bias = qkv if config.biases[0] else 0
    whole_bias = d if config.biases[1] else 0
    split = sum(rows * columns for rows, columns in matrices) + split_bias
    norms = [d, d]
    kept = 0
    if config.norms_heads:
        norms += [config.head_dim, config.head_dim]
        kept = (heads + qkv) // 2  # q and k before their norms
    return ModelSize(
        vocab_size=config.vocab_size,
        num_positions=config.num_positions,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        mlp_units=hidden // unit_size(hidden),
        hidden_size=d,
        block_matrices=matrices,
        block_parameters=split + whole_bias + sum(norms),
        block_parameters_split=split,
        block_norm_parameters=sum(norms),
        block_tensors=len(matrices) + len(norms) + config.biases.count(True),
        kept_values=kept,
        final_norm_parameters=d,
        tied=config.tie_word_embeddings,
        config=config,
    )


def sizes(folder: Path | None = None) -> dict[str, ModelSize]:
    """The named sizes, or a Hugging Face folder's; UserError where we compute something else."""
    if folder is None:
        return SIZES
    config = parse_as(Config, read_config(folder), str(folder / CONFIG_FILE), _FIX)
    heads = config.num_attention_heads
    groups = config.num_key_value_heads
    if heads % groups or config.head_dim % 2:
        what = f"{folder}: {heads} heads of {config.head_dim} numbers with {groups} of k and v"
        raise UserError(f"{what} cannot be divided")
    tied = is_tied(folder, config.tie_word_embeddings, f"{_NAMES['token_embedding']}.weight")
    return {folder.name: llama_size(config.model_copy(update={"tie_word_embeddings": tied}))}


def build(size: ModelSize, *, dropout: float, seed: int) -> Decoder:
    """The model on the CPU in fp32, with random weights that depend on `seed` alone."""
    from distributed_training.models.decoder import build_decoder
    from distributed_training.models.llama.model import Llama

    return build_decoder(Llama, size, dropout, seed)


def to_hf(ours: str, tensor: torch.Tensor, size: ModelSize) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors, as views of one of ours; rows may have two or three axes."""
    name = ".".join(_NAMES.get(part, part) for part in ours.split("."))
    if ours.startswith(("token_embedding", "output_rows")):
        return {name: tensor[: size.vocab_size]}
    config = size.config
    if ".qkv." in ours:
        q = config.num_attention_heads // config.num_key_value_heads
        groups = tensor.unflatten(0, (config.num_key_value_heads, q + 2, config.head_dim))
        parts = {"q": groups[:, :q], "k": groups[:, q], "v": groups[:, q + 1]}
        return {name.replace("qkv", f"self_attn.{key}_proj"): rows for key, rows in parts.items()}
    if ".mlp_in." in ours:
        units = tensor.unflatten(0, (-1, 2, unit_size(config.intermediate_size)))
        parts = {"gate": units[:, 0], "up": units[:, 1]}
        return {name.replace("mlp_in", f"mlp.{key}_proj"): rows for key, rows in parts.items()}
    return {name: tensor}


def to_config(size: ModelSize, eos_token_id: int) -> dict[str, Any]:
    """The config.json that `AutoModelForCausalLM` reads, older versions of it, too."""
    config = size.config
    rope = config.rope_parameters
    document = config.model_dump(exclude={"rope_parameters"}) | {"rope_theta": rope.rope_theta}
    if rope.rope_type != "default":
        document["rope_scaling"] = rope.model_dump(exclude={"rope_theta"}, exclude_unset=True)
    if config.layer_types is None:
        del document["layer_types"]
    else:
        document["use_sliding_window"] = True
    architecture = f"{config.model_type.capitalize()}ForCausalLM"
    return {**document, "architectures": [architecture], "eos_token_id": eos_token_id}


def unit_size(hidden: int) -> int:
    """Rows of the gate, and then of what it multiplies, that lie together in `mlp_in`: few, so that
    tp can split them, but enough for GPUs to read them at once."""
    return math.gcd(hidden, 16)


_PUBLISHED = json.loads((Path(__file__).parent / "sizes.json").read_text())
SIZES = {name: llama_size(Config(**config)) for name, config in _PUBLISHED.items()}
HUB_IDS = {name: config["hub_id"] for name, config in _PUBLISHED.items()}
