"""What tests compare models of the suite with. These functions run in the process of references
(tests/reference.py), so this file imports nothing of the suite."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.models.hub_folders import randomize

NUM_POSITIONS = 4096
# Values of a config's keys, for those keys that a type has
_SMALL = {
    "vocab_size": 67, "hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate_size": 48,
    "ffn_dim": 48, "n_inner": 48, "decoder_ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2,
    "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": NUM_POSITIONS, "n_positions": NUM_POSITIONS,
    "max_seq_len": NUM_POSITIONS, "floor_scale": 2 * NUM_POSITIONS, "dff": 48,
    "linear_num_heads": 4, "linear_head_dim": 8, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 32, "moe_num_experts": 4,
    "moe_shared_expert_intermediate_size": 16,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0, "sliding_window": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rotary_dim": 4, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2,
    "state_size": 16, "shared_intermediate_size": 48, "word_embed_proj_dim": 32,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 67, "global_head_dim": 16,
    "num_kv_shared_layers": 0, "attention_chunk_size": 16, "intermediate_size_mlp": 48,
    "attn_layer_period": 2, "attn_layer_offset": 1, "block_types": ["recurrent", "attention"],
    "ffn_hidden_size": 48, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8,
}  # fmt: skip
_CHANGES = {
    # Without attention, transformers cannot continue text with a cache.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "prophetnet": {"max_position_embeddings": 64},  # builds tables of pairs of positions
}
_MAX_PARAMETERS = 20_000_000


class Step(NamedTuple):
    """Results of a forward and a backward pass."""

    logits: torch.Tensor
    loss: torch.Tensor  # sum over the targets
    gradients: dict[str, torch.Tensor | None]
    num_parameters: int


def load(
    folder: Path,
    adapters: Path | None = None,
    auto: Any = AutoModelForCausalLM,
    is_trainable: bool = False,
    **options: Any,
) -> Any:
    """Return the transformers model in a folder, with PEFT's adapters from another folder."""
    model = auto.from_pretrained(folder, **{"dtype": torch.float32, **options}).eval()
    if adapters is None:
        return model
    from peft import PeftModel  # takes seconds

    return PeftModel.from_pretrained(model, adapters, is_trainable=is_trainable).eval()


def logits(folder: Path, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return load(folder, **options)(input_ids=ids, use_cache=False).logits.detach()


def adapted_logits(
    folder: Path, adapters: Path, ids: torch.Tensor
) -> tuple[torch.Tensor, list[str]]:
    """Return the logits of a model with PEFT's adapters, and the names of the adapters' tensors
    that have no place in it or are missing in their file."""
    from peft import PeftConfig, PeftModel

    model = PeftModel(load(folder), PeftConfig.from_pretrained(adapters)).eval()
    keys = model.load_adapter(adapters, "default")
    found = model(input_ids=ids, use_cache=False).logits.detach()
    return found, [*keys.unexpected_keys, *keys.missing_keys]


def read_tensors(
    folder: Path, auto: Any = AutoModelForCausalLM, **options: Any
) -> tuple[str, dict[str, torch.Tensor]]:
    """Return (the class of the model in a folder, its tensors). Raises AssertionError if the folder
    does not contain exactly these."""
    options = {"dtype": torch.float32, **options, "output_loading_info": True}
    model, info = auto.from_pretrained(folder, **options)
    assert not info["missing_keys"] | info["unexpected_keys"], info
    return type(model).__name__, model.state_dict()


def generate(folder: Path, ids: torch.Tensor, **options: Any) -> list[int]:
    """Return the tokens with which a model continues `ids`."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return load(folder).generate(ids, **options)[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def generation_config(folder: Path) -> Any:
    return load(folder).generation_config


def sum_losses(folder: Path, samples: list[tuple[list[int], list[bool]]]) -> tuple[float, int]:
    """Return the summed loss of (token IDs, target mask) in nats, and the number of targets."""
    model = load(folder)
    total, count = 0.0, 0
    for ids, mask in samples:
        labels = torch.where(torch.tensor(mask), torch.tensor(ids), -100)[None]
        num_targets = int((labels[:, 1:] != -100).sum())
        with torch.inference_mode():
            total += float(model(torch.tensor([ids]), labels=labels).loss) * num_targets
        count += num_targets
    return total, count


def trained_values(folder: Path, adapters: Path | None = None) -> dict[str, torch.Tensor]:
    """Return the values that PEFT trains in a folder of adapters, keyed by their names in a file,
    or without adapters, all values."""
    return _trained_values(load(folder, adapters, is_trainable=True))


def _trained_values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.replace(".default", ""): values.detach().clone()
        for name, values in model.named_parameters()
        if values.requires_grad
    }


def train(
    folder: Path, adapters: Path | None, batches: list[tuple[Any, Any]], learning_rate: float
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train all parameters or, if there are any, adapters with torch's AdamW on (inputs, targets).
    Return their values before and after."""
    model = load(folder, adapters, is_trainable=True, attn_implementation="eager")
    before = _trained_values(model)
    parameters = [values for values in model.parameters() if values.requires_grad]
    groups = [{"params": x, "weight_decay": 0.01 if x.dim() > 1 else 0.0} for x in parameters]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate)
    for ids, targets in batches:
        logits = model(torch.as_tensor(ids)).logits
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), torch.as_tensor(targets).flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return before, _trained_values(model)


def train_step(folder: Path, inputs: torch.Tensor, targets: torch.Tensor) -> Step:
    model = load(folder)
    logits = model(input_ids=inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(logits.detach(), loss.detach(), gradients, model.num_parameters())


def gpt_oss_attention(
    qkv: list[torch.Tensor], sinks: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, ...]:
    """Return the attention of gpt_oss, and the gradients of the sum of its squares."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module = SimpleNamespace(num_key_value_groups=3, sinks=sinks, training=True)
    y, _ = eager_attention_forward(module, *qkv, mask, scaling=scale)
    return (y.detach(), *torch.autograd.grad(y.square().sum(), [*qkv, sinks]))


def small_config(model_type: str) -> Any:
    """Return a tiny config with one block of each kind, twice if there are two kinds."""
    config_class = CONFIG_MAPPING[model_type]
    defaults = config_class().to_dict()
    keys = defaults.keys() | config_class.attribute_map.keys()
    values: dict[str, Any] = {key: value for key, value in _SMALL.items() if key in keys}
    if "qk_rope_head_dim" in keys:  # the size of heads follows from it
        values.pop("head_dim", None)
        values["num_key_value_heads"] = 4
    kinds = list(dict.fromkeys(defaults.get("layer_types") or []))
    if model_type in _CHANGES:
        values |= _CHANGES[model_type]
    elif kinds:
        values["num_hidden_layers"] = max(2, len(kinds))
        values["layer_types"] = (2 * kinds)[: values["num_hidden_layers"]]
    return config_class(**values)


def save_type(model_type: str, folder: Path, ids: torch.Tensor) -> str:
    """Save a tiny random model of a type that transformers runs on `ids`, or return why there is
    none. Matrices are stored in bf16, and other tensors in fp32."""
    try:
        config = small_config(model_type)
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(config).parameters()
        if sum(parameter.numel() for parameter in parameters) > _MAX_PARAMETERS:
            return "the config has no keys that make it small"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomize(model)
        embedding: Any = model.get_input_embeddings()
        if embedding.padding_idx is not None:  # Youtu sets this row to zero when it reads files.
            embedding.weight.data[embedding.padding_idx] = 0
        model(input_ids=ids, use_cache=False)
        model.save_pretrained(folder)
        file = folder / "model.safetensors"
        stored = load_file(file)
        halves = {name: x.bfloat16() for name, x in stored.items() if x.dim() > 1}
        save_file(stored | halves, file, {"format": "pt"})
    except Exception as error:  # transformers may raise any exception
        return type(error).__name__
    return ""
