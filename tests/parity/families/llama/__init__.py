"""Small shapes of Qwen 3."""

from distributed_training.models.llama import *  # noqa: F403
from distributed_training.models.llama import Config, llama_size


def shape(vocab_size, num_layers, num_kv_heads, hidden_size, head_dim, intermediate_size):
    return llama_size(
        Config(
            model_type="qwen3",
            vocab_size=vocab_size,
            max_position_embeddings=128,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=num_kv_heads,
            hidden_size=hidden_size,
            head_dim=head_dim,
            intermediate_size=intermediate_size,
        )
    )


def sizes(folder=None):
    return {
        "eight-wide-layers-2050": shape(2050, 8, 4, 120, 32, 320),
        "two-layers": shape(2048, 2, 2, 64, 16, 64),
    }
