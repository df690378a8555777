"""Create model folders in transformers' format for tiny random decoders of more than thirty
kinds."""

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY = 2048  # vocabulary size of the tokenizer in assets/
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_HEADS = {"head_dim": 8}
_MIXED = {
    **_SHAPE, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_LINEAR_ATTENTION = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
_SHAPE_WITHOUT_KV_HEADS = {
    key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"
}
# Name -> (class, config values that differ from the defaults). Windows are shorter than samples.
KINDS: dict[str, tuple[str, dict]] = {
    "gemma": ("Gemma", {**_SHAPE, **_HEADS}),
    "gemma2": ("Gemma2", {
        **_SHAPE, **_HEADS, "sliding_window": 16, "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    }),
    "gemma3_text": ("Gemma3Text", {**_MIXED, **_HEADS}),
    "phi3": ("Phi3", _SHAPE),
    "phi": ("Phi", {**_SHAPE, "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2", _SHAPE),
    "granite": ("Granite", {
        **_SHAPE, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    }),
    "gpt_neox": ("GPTNeoX", {**_SHAPE_WITHOUT_KV_HEADS, "rotary_pct": 0.5}),
    "falcon": ("Falcon", {
        **_SHAPE_WITHOUT_KV_HEADS, "new_decoder_architecture": True, "num_kv_heads": 2,
        "ffn_hidden_size": 48,
    }),
    "falcon-alibi": ("Falcon", {**_SHAPE_WITHOUT_KV_HEADS, "alibi": True, "multi_query": True}),
    "opt": ("OPT", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 96, "word_embed_proj_dim": 24,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0,
    }),
    "mistral-window": ("Mistral", {**_SHAPE, "sliding_window": 16}),
    "nemotron": ("Nemotron", {**_SHAPE, **_HEADS}),
    "xglm": ("XGLM", {
        "vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 48, "num_layers": 2,
        "attention_heads": 4, "max_position_embeddings": 96, "pad_token_id": 1,
        "bos_token_id": 0, "eos_token_id": 0,
    }),
    "mpt": ("Mpt", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 96,
    }),
    "granite_swa": ("GraniteSWA", _MIXED),  # has attention sinks
    "biogpt": ("BioGpt", _SHAPE_WITHOUT_KV_HEADS),  # names its dropout options dropout_prob
    "qwen3_5_text": ("Qwen3_5Text", {
        **_SHAPE, **_HEADS, **_LINEAR_ATTENTION, "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                            "mrope_section": [1, 1, 0]},
    }),
    "gemma4_text": ("Gemma4Text", {
        **_MIXED, **_HEADS, "num_hidden_layers": 6, "layer_types": 3 * _MIXED["layer_types"],
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2, "global_head_dim": 16,
    }),
    "apertus": ("Apertus", {**_SHAPE, "hidden_act": "xielu"}),
    "falcon_h1": ("FalconH1", {
        **_SHAPE, **_HEADS, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_d_state": 16, "mamba_chunk_size": 16,
    }),
    "lfm2": ("Lfm2", {
        **_SHAPE, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
    }),
    "nemotron_h": ("NemotronH", {
        **_SHAPE, **_HEADS, "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2,
    }),
    "granitemoehybrid": ("GraniteMoeHybrid", {
        **_SHAPE, "num_local_experts": 0, "shared_intermediate_size": 48, "mamba_n_heads": 8,
        "mamba_d_head": 8, "mamba_d_state": 16, "layer_types": ["mamba", "attention"],
    }),
    "ministral3": ("Ministral3", {**_SHAPE, **_HEADS}),
    "qwen3_moe": ("Qwen3Moe", {
        **_SHAPE, **_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    }),
    "qwen3_next": ("Qwen3Next", {
        **_SHAPE, **_HEADS, **_LINEAR_ATTENTION, "num_hidden_layers": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {
        **_SHAPE, **_HEADS, **_LINEAR_ATTENTION, "num_hidden_layers": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                            "mrope_section": [1, 1, 0]},
    }),
    "deepseek_v3": ("DeepseekV3", {
        **_SHAPE, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1,
    }),
    "llama4_text": ("Llama4Text", {
        **_SHAPE, **_HEADS, "intermediate_size_mlp": 48, "num_local_experts": 2,
        "attention_chunk_size": 16, "interleave_moe_layer_step": 1,
        "no_rope_layers": [1, 0],
    }),
    "gpt_oss": ("GptOss", {
        **_SHAPE, **_HEADS, **_MIXED, "intermediate_size": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }),
    # tests/parity/test_lora.py also uses these.
    "llama": ("Llama", _SHAPE),
    "qwen2": ("Qwen2", {**_SHAPE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**_SHAPE, **_HEADS}),
}  # fmt: skip

# GPT-2's matrices are not linear layers, so it has no transformers' code in this package.
_GPT2 = ("GPT2", {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96,
    "bos_token_id": 0, "eos_token_id": 0,
})  # fmt: skip


def random_model(config: transformers.PretrainedConfig) -> torch.nn.Module:
    """Return transformers' fp32 model for `config` with random values."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Add random numbers to all that files contain, including norms, biases and buffers."""
    stored = model.state_dict(keep_vars=True)
    for values in {id(tensor): tensor for tensor in stored.values()}.values():
        if values.is_floating_point():
            values.add_(0.1 * torch.randn_like(values))


def make_folder(kind: str, folder: Path, **changes: object) -> Path:
    """Save a model of the given kind, gpt2 or one of KINDS, to `folder`, and return `folder`. Its
    parameters are random. `changes` replace values of the config."""
    name, values = {**KINDS, "gpt2": _GPT2}[kind]
    config = getattr(transformers, f"{name}Config")(**{**values, **changes})
    random_model(config).save_pretrained(folder)
    return folder
