"""What a model's shape says about it, for any family: parameters, FLOPs. No torch import."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_MULTIPLE = 128  # matrix units like multiples of 64; 128 leaves room for vocabulary splits


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Shape of one decoder-only language model; its family fills in what its blocks hold.

    Counts are exact, and of the whole model, without vocabulary padding unless it says so.
    """

    vocab_size: int
    num_positions: int  # tokens of the longest sequence
    num_layers: int
    num_heads: int
    hidden_size: int
    block_matrix_parameters: int  # of one block, each of which multiplies every token once
    block_parameters: int
    block_parameters_split: int  # those that tp divides; the others every process holds whole
    block_norm_parameters: int  # those that each process of tp uses on its own tokens
    final_norm_parameters: int
    position_parameters: int = 0  # of the position embedding
    tied: bool = True  # whether the output layer has the token embedding's weights

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding as stored: `vocab_size` rounded up to `VOCAB_MULTIPLE`."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def embedding_parameters(self) -> int:
        """Of the token embedding, and of an output layer that is not tied to it."""
        return self.vocab_size * self.hidden_size

    @property
    def padded_embedding_parameters(self) -> int:
        """The same as stored, padding included."""
        return self.padded_vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Exact parameter count, a tied embedding counted once."""
        ends = self.embedding_parameters * (1 if self.tied else 2)
        ends += self.position_parameters + self.final_norm_parameters
        return ends + self.num_layers * self.block_parameters

    def flops_per_token(self, seq_len: int) -> int:
        """Forward plus backward FLOPs for one token of a `seq_len` sequence: 6N + 12 L D T (PaLM,
        appendix B), the two attention products over the full T x T square."""
        # Looking tokens up multiplies nothing; a tied embedding's rows do so at the output.
        used = self.num_parameters - (0 if self.tied else self.embedding_parameters)
        return 6 * used + 12 * self.num_layers * self.hidden_size * seq_len

    def block_flops(self, seq_len: int) -> int:
        """FLOPs of one block for one token, forward and backward."""
        return 6 * self.block_matrix_parameters + 12 * self.hidden_size * seq_len

    def output_flops(self) -> int:
        """FLOPs of the output layer for one token, forward and backward."""
        return 6 * self.padded_embedding_parameters
