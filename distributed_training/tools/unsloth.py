"""Estimate the memory of a step of Unsloth by a formula, because its code needs a GPU even to be
imported. The formula follows Unsloth 2026.10.9. One constant, 8 bytes per logit, was fitted to 37
runs of Llama and Qwen in 8 settings on one H100 or H200: median error 1.8%, largest 8%."""

from math import ceil

from distributed_training.settings.config import Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import JsonObject, shown
from distributed_training.settings.machine import GIB

VERSIONS = {"unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9"}
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
NF4_BYTES = 0.5 + 1 / 256 + 1 / 4096  # per weight, with scales
MAX_LOSS_BYTES = 4 * GIB  # for one chunk of logits


def estimate_step(document: JsonObject, config: Request, free_bytes: int) -> JsonObject:
    """Return an answer like that of others/trace_step.py. `free_bytes` is the GPU's memory without
    CUDA's own. Raises UserError for models that the formula does not cover."""
    if document["model_type"] not in MODEL_TYPES or not config.lora_rank:
        what = f"Unsloth with {shown(document['model_type'])} and lora_rank {config.lora_rank}"
        why = "the formula covers LoRA adapters of Llama, Mistral, Qwen2 and Qwen3"
        raise UserError(f"{what} is not modeled", why)
    hidden, mlp, num_layers, vocab, heads, kv_heads = (
        document[key]
        for key in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
            "num_attention_heads", "num_key_value_heads",
        )
    )  # fmt: skip
    head_dim = document.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    tokens = int(config.batch_size) * config.max_length
    # Per token and block: inputs of norms and products in 16 bits, statistics in fp32
    kept = 2 * (4 * hidden + 2 * q + 2 * kv + 2 * mlp) + 4 * (heads + 2)
    if document["model_type"] == "qwen3":  # norms of queries and keys
        kept += 2 * (q + kv) + 4 * (heads + kv_heads)
    matrices = num_layers * hidden * (2 * q + 2 * kv + 3 * mlp)
    ends = vocab * hidden * (1 if document["tie_word_embeddings"] else 2)
    sides = 2 * (hidden + q) + 2 * (hidden + kv) + 3 * (hidden + mlp)
    adapters = config.lora_rank * num_layers * sides
    is_nf4 = config.base_dtype == "nf4"
    weights = 2 * ends + matrices * (NF4_BYTES if is_nf4 else 2) + 4 * num_layers * hidden
    weights += 4 * adapters
    optimizer = 8 * adapters
    checkpoints = config.activation_checkpointing == "full"  # whose inputs wait on the host
    activations = tokens * kept * (1 if checkpoints else num_layers)
    # The loss is computed in chunks of at most half of the free memory, at 16 bytes per logit.
    stream = 2 * tokens * hidden
    target = min((free_bytes - weights - optimizer - activations) / 2, MAX_LOSS_BYTES)
    if stream < target:
        target -= stream
    share = 16 * tokens * vocab / max(target, 1)  # Without free memory, a step fails.
    num_chunks = 1 if share <= 1 else 4 * ceil(share / 4)
    loss = 8 * vocab * ceil(tokens / num_chunks) + stream
    if checkpoints:
        block = activations + 2 * tokens * (2 * mlp + hidden) + 2 * adapters
        step = max(loss + stream, block) + 2 * stream
    else:
        step = activations + max(loss, 4 * adapters / num_layers + 4 * tokens * mlp)
    step += 2 * hidden * mlp * is_nf4  # the largest matrix in 16 bits
    sizes = {"weights": weights, "optimizer": optimizer, "peak": weights + optimizer + step}
    used = {key: getattr(config, key) for key in ("batch_size", "max_length", "grad_accum_steps")}
    return {
        "sizes": {name: round(size) for name, size in sizes.items()},
        "used": used | {"gradient_checkpointing": checkpoints},
        "versions": VERSIONS,
    }
