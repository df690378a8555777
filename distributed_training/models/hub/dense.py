"""Compute the sizes of Llama, Mistral, Qwen2 and Qwen3 from their configs, so that planning needs
neither torch nor transformers. Sizes equal those that models/hub/trace.py measures."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from distributed_training.models.config_file import Count, FamilyConfig
from distributed_training.models.size import BlockKind, ModelSize
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import parse_as

ModelType = Literal["llama", "mistral", "qwen2", "qwen3"]
_FIX = "use a model without it, for example one in models/table.json"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUT = "self_attn.o_proj"
_GATE, _UP, _DOWN = _MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class _Rope(BaseModel, strict=True, extra="forbid"):
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


class _Config(FamilyConfig):
    """Keys of a config.json that affect the computation, as transformers reads them
    (models/config_file.py). Models with other values, such as sliding windows, are measured."""

    model_type: ModelType
    vocab_size: Count
    max_position_embeddings: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    hidden_size: Count
    intermediate_size: Count
    rope_parameters: _Rope = _Rope()
    rms_norm_eps: float = Field(1e-6, gt=0)
    tie_word_embeddings: bool = False
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    hidden_act: Literal["silu", "swish"] = "silu"  # two names for the same function
    sliding_window: None = None
    layer_types: None = Field(None, exclude=True)
    pad_token_id: int | None = None

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
    def document(self) -> dict[str, Any]:
        """Return these keys with names that older versions of transformers can also read."""
        rope = self.rope_parameters
        document = self.model_dump(exclude={"rope_parameters"}) | {"rope_theta": rope.rope_theta}
        if rope.rope_type != "default":
            scaling = rope.model_dump(exclude={"rope_theta"}, exclude_unset=True)
            document["rope_scaling"] = scaling
        return document


def dense_size(document: dict[str, Any], origin: object) -> ModelSize:
    """Return the size of a model with the values `document` of the config.json `origin`. Raises
    UserError if the model has other blocks than those that this module knows."""
    config = parse_as(_Config, document, str(origin), _FIX)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head_size = config.head_dim
    if heads % groups or head_size % 2:
        what = f"{origin}: num_attention_heads={heads}, num_key_value_heads={groups} and "
        what += f"head_dim={head_size} do not fit together"
        why = "num_key_value_heads must divide num_attention_heads, and head_dim must be even"
        raise UserError(what, why, "correct its config.json")
    d, units = config.hidden_size, config.intermediate_size
    if math.gcd(groups, units) == 1:
        raise UserError(
            f"{origin}: tp cannot split a model with {groups} key/value heads", fix=_FIX
        )
    q, kv = heads * head_size, groups * head_size
    matrices = {
        **dict(zip(_QKV, ((q, d), (kv, d), (kv, d)), strict=True)),
        _OUT: (d, q),
        **dict(zip(_MLP, ((units, d), (units, d), (d, units)), strict=True)),
    }
    cuts = {f"{name}.weight": int(name in (_OUT, _DOWN)) for name in matrices}
    split = sum(rows * columns for rows, columns in matrices.values())
    norms = [d, d]
    kept = eager = 0  # values that norms of q and k keep in addition
    if config.model_type == "qwen2":
        cuts |= {f"{name}.bias": 0 for name in _QKV}
        split += q + 2 * kv
    if config.model_type == "qwen3":
        norms += [head_size, head_size]
        kept = q + kv
        eager = 3 * kept + 2 * (heads + groups)
    attention = 2 * q + 2 * kv + 2 * heads  # q, k, v, the output, and fp32 statistics
    with_adapters = attention + kept + 2 * units - 2 * d
    traced = {
        "eager": attention + eager + 4 * units + 4 * d + 4,
        "compiled": with_adapters + units + 2 * d,
        "adapters": with_adapters,
        "selective": attention + 2 * units,
        "offload-attention": attention,
    }
    kind = BlockKind(
        layers=tuple(range(config.num_hidden_layers)),
        attention_width=q,
        matrices=tuple(matrices.values()),
        hf_matrices={name: name for name in matrices},
        parameters=split + sum(norms),
        cuts=cuts,
        split_parameters=split,
        norm_parameters=sum(norms),
        tensors=len(cuts) + len(norms),
        same_inputs=(_QKV, (_GATE, _UP)),
        gated_mlps=((*_MLP, "silu"),),
        traced_values={mode: (float(values), 0.0) for mode, values in traced.items()},
    )
    return ModelSize(
        vocab_size=config.vocab_size,
        num_positions=config.max_position_embeddings,
        max_generated=config.max_position_embeddings,
        num_heads=heads,
        num_kv_heads=groups,
        hidden_size=d,
        kinds=(kind,),
        final_norm_parameters=d,
        tied=config.tie_word_embeddings,
        config={
            "document": config.document,
            "class": f"{config.model_type.capitalize()}ForCausalLM",
            "blocks": "model.layers",
            "embedding": "model.embed_tokens.weight",
            "head": {"scale": 1.0, "cap": 0.0},
            "separate_experts": False,
            "before_blocks": ["model.embed_tokens", "model.rotary_emb"],
            "block_outputs": 0,
        },
    )
