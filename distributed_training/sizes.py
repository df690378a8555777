"""GPT-2's published sizes and the arithmetic that follows from them. No torch import."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_MULTIPLE = 128  # matrix units like multiples of 64; 128 leaves room for vocabulary splits


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Shape of one GPT-2; everything that a parameter count or a FLOP count needs."""

    vocab_size: int
    """Tokens the model knows; 50257 for the published sizes."""
    num_positions: int
    """Longest sequence, tokens."""
    num_layers: int
    num_heads: int
    hidden_size: int

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding as stored: `vocab_size` rounded up to `VOCAB_MULTIPLE`."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def num_parameters(self) -> int:
        """Exact parameter count without vocabulary padding, tied embedding counted once.

        Equals Hugging Face's count for `GPT2LMHeadModel`.
        """
        d = self.hidden_size
        block = 12 * d * d + 13 * d  # qkv 3d^2+3d, proj d^2+d, mlp 8d^2+5d, two norms 4d
        return (self.vocab_size + self.num_positions) * d + self.num_layers * block + 2 * d

    def flops_per_token(self, seq_len: int) -> int:
        """Forward plus backward FLOPs for one token of a `seq_len` sequence.

        6N + 12 L D T, the count of the PaLM paper's appendix B: 2N forward and 4N backward
        for the matrix products, and the two attention products over the full T x T square.
        """
        attention = 12 * self.num_layers * self.hidden_size * seq_len
        return 6 * self.num_parameters + attention


def _gpt2(num_layers: int, num_heads: int, hidden_size: int) -> ModelSize:
    return ModelSize(
        vocab_size=50257,
        num_positions=1024,
        num_layers=num_layers,
        num_heads=num_heads,
        hidden_size=hidden_size,
    )


SIZES: dict[str, ModelSize] = {
    # 0.3M parameters over the vocabulary of the tokenizer in assets/: for CPUs and tests.
    "gpt2-tiny": ModelSize(
        vocab_size=2048, num_positions=1024, num_layers=2, num_heads=4, hidden_size=64
    ),
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    # gpt2-xl's 25 heads split over 5 or 25 processes only: the same matrices with 20 heads of 80.
    # There are no published weights of this one.
    "gpt2-xl-20-heads": _gpt2(48, 20, 1600),
}

# Where the published weights and GPT-2's tokenizer live on the Hugging Face Hub.
HUB_IDS = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
