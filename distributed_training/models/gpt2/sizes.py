"""GPT-2's published sizes, and what its blocks hold. No torch import."""

from __future__ import annotations

from typing import Any

from distributed_training.models.size import ModelSize


def gpt2_size(*, num_positions: int = 1024, hidden_size: int, **shape: Any) -> ModelSize:
    """A GPT-2; `num_parameters` equals Hugging Face's count for `GPT2LMHeadModel`."""
    matrices = 12 * hidden_size**2  # attention 3 d^2 + d^2, MLP 4 d^2 + 4 d^2
    return ModelSize(
        **shape,
        num_positions=num_positions,
        hidden_size=hidden_size,
        block_matrix_parameters=matrices,
        block_parameters=matrices + 13 * hidden_size,  # biases 9 d, two norms 4 d
        block_parameters_split=matrices + 7 * hidden_size,
        block_norm_parameters=4 * hidden_size,
        final_norm_parameters=2 * hidden_size,
        position_parameters=num_positions * hidden_size,
    )


SIZES = {
    # 0.3M parameters over the vocabulary of the tokenizer in assets/: for CPUs and tests.
    "gpt2-tiny": gpt2_size(vocab_size=2048, num_layers=2, num_heads=4, hidden_size=64),
    "gpt2": gpt2_size(vocab_size=50257, num_layers=12, num_heads=12, hidden_size=768),
    "gpt2-medium": gpt2_size(vocab_size=50257, num_layers=24, num_heads=16, hidden_size=1024),
    "gpt2-large": gpt2_size(vocab_size=50257, num_layers=36, num_heads=20, hidden_size=1280),
    "gpt2-xl": gpt2_size(vocab_size=50257, num_layers=48, num_heads=25, hidden_size=1600),
    # Unpublished: gpt2-xl's 25 heads split over 5 or 25 processes only; the same matrices here.
    "gpt2-xl-20-heads": gpt2_size(vocab_size=50257, num_layers=48, num_heads=20, hidden_size=1600),
}
# Where the published weights and GPT-2's tokenizer live on the Hugging Face Hub.
HUB_IDS = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
