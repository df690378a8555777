"""GPT-2's published sizes, and what its blocks hold. No torch import."""

from __future__ import annotations

from distributed_training.models.size import ModelSize


def gpt2_size(
    *, vocab_size: int, num_positions: int, num_layers: int, num_heads: int, hidden_size: int
) -> ModelSize:
    """A GPT-2; `num_parameters` equals Hugging Face's count for `GPT2LMHeadModel`."""
    matrices = 12 * hidden_size**2  # attention 3 d^2 + d^2, MLP 4 d^2 + 4 d^2
    return ModelSize(
        vocab_size=vocab_size,
        num_positions=num_positions,
        num_layers=num_layers,
        num_heads=num_heads,
        hidden_size=hidden_size,
        block_matrix_parameters=matrices,
        block_parameters=matrices + 13 * hidden_size,  # biases 9 d, two norms 4 d
        block_parameters_split=matrices + 7 * hidden_size,
        block_norm_parameters=4 * hidden_size,
        final_norm_parameters=2 * hidden_size,
        position_parameters=num_positions * hidden_size,
    )


_SHAPES = {  # vocabulary, blocks, heads, hidden size
    # 0.3M parameters over the vocabulary of the tokenizer in assets/: for CPUs and tests.
    "gpt2-tiny": (2048, 2, 4, 64),
    "gpt2": (50257, 12, 12, 768),
    "gpt2-medium": (50257, 24, 16, 1024),
    "gpt2-large": (50257, 36, 20, 1280),
    "gpt2-xl": (50257, 48, 25, 1600),
    # gpt2-xl's 25 heads split over 5 or 25 processes only: the same matrices with 20 heads of 80.
    # There are no published weights of this one.
    "gpt2-xl-20-heads": (50257, 48, 20, 1600),
}
SIZES = {
    name: gpt2_size(vocab_size=v, num_positions=1024, num_layers=n, num_heads=h, hidden_size=d)
    for name, (v, n, h, d) in _SHAPES.items()
}

# Where the published weights and GPT-2's tokenizer live on the Hugging Face Hub.
HUB_IDS = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
