"""Describe the shape of a model: sizes, parameter counts and FLOPs. This module does not import
torch."""

from dataclasses import dataclass, field
from typing import Any

from distributed_training.settings.errors import UserError

LinearCost = tuple[float, float]  # (a, b) of the linear function a + b T, for samples of T tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Shape and parameter counts of a decoder-only language model, as defined by the model's
    family.

    Counts are exact and refer to the unsharded model. They exclude vocabulary padding unless stated
    otherwise."""

    vocab_size: int
    num_positions: int  # maximum sequence length
    num_layers: int
    num_heads: int
    hidden_size: int
    attention_width: int  # combined width of all attention heads
    # Shapes of the matrices in one block. tp shards them alternately by rows and by columns.
    block_matrices: tuple[tuple[int, int], ...]
    # Their module names, in the same order -> the Hugging Face matrices that each matrix contains,
    # in the order of `to_hf`: their names within a block and numbers of rows
    hf_matrices: dict[str, dict[str, int]]
    block_parameters: int
    # Number of parameters per block that tp shards; the other parameters are replicated
    block_parameters_split: int
    block_norm_parameters: int  # parameters that each tp rank applies to its own tokens
    final_norm_parameters: int
    position_parameters: int = 0  # parameters of the position embedding
    tied: bool = True  # whether the output layer shares the token embedding's weights
    # Number of key/value heads; None if each query head has separate keys and values
    num_kv_heads: int | None = None
    # Number of groups of hidden units that tp keeps together; None if there are no groups
    mlp_units: int | None = None
    block_tensors: int = 12  # number of parameter tensors in a block
    splits: bool = True  # whether tp can shard the model and pp can partition it
    fuses_attention: bool = True  # whether attention is one kernel that skips masked tokens
    packs: bool = True  # whether attention can separate packed records
    # Values per token that a block keeps for the backward pass, in addition to the inputs of its
    # matrix multiplications
    kept_values: int = 0
    # Additional values per token if attention needs k and v for each query head (attention.py)
    repeated_values: int = 0
    # Mode of `split_values` -> values measured by tracing a block. {}: use the matrices' shapes
    traced_values: dict[str, LinearCost] = field(default_factory=dict)
    # Id whose row of the token embedding has no gradient from the input, as with transformers'
    # `padding_idx`; None if there is none. Weights of a model with another such id fit as well.
    padding_id: int | None = field(default=None, compare=False)
    config: Any = None  # additional settings for the family's modules

    def split_values(self, mode: str, length: int) -> float:
        """Return the number of values per token that a block keeps for the backward pass and that
        tp shards, in samples of `length` tokens. Values of the hidden size between the layers,
        which tp does not shard, are not included. `mode` is "eager", "compiled" or "selective"."""
        if self.traced_values:
            base, slope = self.traced_values[mode]
            return base + slope * length
        # The matrices are [out, in]. tp shards the outputs of every first matrix and the inputs of
        # every second one.
        outputs = sum(rows for rows, _ in self.block_matrices[::2])
        if mode == "selective":
            return outputs + self.attention_width
        inputs = sum(columns for _, columns in self.block_matrices[1::2])
        return outputs + inputs + self.kept_values

    @property
    def padded_vocab_size(self) -> int:
        """Return the number of embedding rows, including padding."""
        # GPUs multiply matrices fastest if their sizes are multiples of 64. If the size is a
        # multiple of 128, each half under tp=2 is also a multiple of 64.
        return -(-self.vocab_size // 128) * 128

    @property
    def embedding_parameters(self) -> int:
        """Return the number of parameters in the token embedding. An untied output layer has the
        same number."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Return the exact parameter count. A tied embedding is counted once."""
        outside_blocks = self.embedding_parameters * (1 if self.tied else 2)
        outside_blocks += self.position_parameters + self.final_norm_parameters
        return outside_blocks + self.num_layers * self.block_parameters

    def adapted_parts(self, targets: str | None) -> dict[str, dict[str, int]]:
        """Return the Hugging Face matrices with adapters, as the part of `hf_matrices` that
        `targets` selects. `targets` is the value of `lora_targets` in CONFIG. None selects all
        matrices. As in PEFT, a target selects the matrices whose names end with it. Raises
        UserError for a target that selects no matrix."""
        if targets is None:
            return self.hf_matrices
        suffixes = [f".{target.strip()}" for target in targets.split(",")]
        names = [f".{name}" for parts in self.hf_matrices.values() for name in parts]
        for suffix in suffixes:
            if not any(name.endswith(suffix) for name in names):
                why = f"the blocks have no matrix named {suffix[1:]}"
                fix = f"choose from {', '.join(name[1:] for name in names)}"
                raise UserError(f"lora_targets={targets!r} is not accepted", why, fix)
        selected = {
            our_name: {
                name: rows for name, rows in parts.items() if f".{name}".endswith(tuple(suffixes))
            }
            for our_name, parts in self.hf_matrices.items()
        }
        return {our_name: parts for our_name, parts in selected.items() if parts}

    def count_adapters(self, rank: int, targets: str | None, tp: int = 1) -> tuple[int, int]:
        """Return (number of adapter parameters per block on each tp rank, number of these
        parameters that are equal on all tp ranks)."""
        adapted = self.adapted_parts(targets)
        per_rank = shared = 0
        for index, name in enumerate(self.hf_matrices):
            columns = self.block_matrices[index][1]
            for rows in adapted.get(name, {}).values():
                split, common = (rows, columns) if index % 2 == 0 else (columns, rows)
                shared += rank * common
                per_rank += rank * (common + split // tp)
        return per_rank, shared

    def num_trained_parameters(self, rank: int, targets: str | None) -> int:
        """Return the number of trained parameters. If `rank` is 0, all parameters are trained.
        Otherwise, only LoRA adapters of this rank are trained."""
        if rank == 0:
            return self.num_parameters
        return self.num_layers * self.count_adapters(rank, targets)[0]

    def flops_per_token(self, seq_len: int, *, frozen: bool = False) -> int:
        """Return the FLOPs per token of the forward and backward passes together, for samples of
        `seq_len` tokens.

        The result is `6 N + 12 L D T`, or `4 N + 12 L D T` if the weights are `frozen`. N is the
        number of parameters without an untied token embedding. L is the number of layers, D is the
        combined width of all heads, and T is `seq_len`. The FLOPs of attention are counted for all
        `T^2` pairs of tokens, as in PaLM (appendix B)."""
        # Embedding lookups need no multiplications, but a tied embedding is also the output layer.
        num_used = self.num_parameters - (0 if self.tied else self.embedding_parameters)
        return (
            4 if frozen else 6
        ) * num_used + 12 * self.num_layers * self.attention_width * seq_len
