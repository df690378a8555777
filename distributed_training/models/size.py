"""Describe the shape of a model: sizes, parameter counts and FLOPs. This module does not import
torch."""

import math
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_jsonable_python

from distributed_training.settings.errors import UserError

LinearCost = tuple[float, float]  # (a, b) of the linear function a + b T, for samples of T tokens
# Weights of a model with another padding token fit as well.
_NOT_COMPARED = {"kinds", "pad_token_id", "transformers_version"}


def _suffixes(targets: str) -> tuple[str, ...]:
    """Return the ends of the names that the comma-separated `targets` select."""
    return tuple(f".{target.strip()}" for target in targets.split(","))


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockKind:
    """Shape of those blocks of a model that have the same shape and the same kind of attention.
    Counts are those of one block, before sharding."""

    layers: tuple[int, ...]  # indices of these blocks
    attention_width: int  # combined width of all attention heads; 0 without attention
    matrices: tuple[tuple[int, int], ...]  # shapes [out, in]
    # Module names of the matrices, in the same order -> their Hugging Face names within a block, or
    # None for matrices that cannot have adapters
    hf_matrices: dict[str, str | None]
    parameters: int
    # Names of the parameters that tp shards, with the biases of their outputs -> sharded dimension
    cuts: dict[str, int] = field(default_factory=dict)
    # Number of parameters that tp shards; the other parameters are replicated
    split_parameters: int
    norm_parameters: int  # parameters that each tp rank applies to its own tokens
    tensors: int = 12  # number of parameter tensors
    # (outputs, inputs, rows per token) of products with stacks of matrices, such as experts
    expert_products: tuple[tuple[int, int, float], ...] = ()
    unused_parameters: int = 0  # number of parameters of the experts that a token does not use
    # Names of stacks of experts' matrices -> (experts, outputs, inputs)
    stacks: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    transposes_stacks: bool = False  # whether stacks are stored as [experts, inputs, outputs]
    # Multiplications per token for a state that is passed on from token to token
    state_products: int = 0
    window: int | None = None  # number of tokens that a token attends to at most, including itself
    fuses_attention: bool = True  # whether attention is one kernel that skips masked tokens
    # Groups of matrices that get the same input in one module, in the order of their products
    same_inputs: tuple[tuple[str, ...], ...] = ()
    # (gate, up, down, f) of each MLP that computes down(f(gate(x)) * up(x)) without biases. f is
    # "silu" or "gelu".
    gated_mlps: tuple[tuple[str, str, str, str], ...] = ()
    # Mode of `split_values` -> values measured by tracing a block. {}: use the matrices' shapes
    traced_values: dict[str, LinearCost] = field(default_factory=dict)

    def cut_dim(self, matrix: str) -> int | None:
        """Return the dimension of a matrix that tp shards, or None."""
        return self.cuts.get(f"{matrix}.weight")

    def sees_all_tokens(self, matrix: str) -> bool:
        """Return whether each tp rank multiplies a matrix with all tokens, instead of its own."""
        layers = [name.removesuffix(".weight") for name, dim in self.cuts.items() if dim == 1]
        regions = [layer.rpartition(".")[0] + "." for layer in layers]
        return self.cut_dim(matrix) is not None or matrix.startswith(tuple(regions))

    @property
    def stack_values(self) -> int:
        """Return the number of values in the stacks of experts' matrices."""
        return sum(map(math.prod, self.stacks.values()))

    @property
    def num_regions(self) -> int:
        """Return how often a block sums over the tp ranks."""
        return list(self.cuts.values()).count(1)

    def split_values(self, mode: str, length: int) -> float:
        """Return the number of values per token that a block keeps for the backward pass and that
        tp shards, in samples of `length` tokens. Values of the hidden size between the layers,
        which tp does not shard, are not included. `mode` is "eager", "compiled", "adapters"
        (compiled, with adapters and without activation checkpointing), "selective" or
        "offload-attention"."""
        if self.traced_values:
            base, slope = self.traced_values[mode]
            return base + slope * length
        if mode == "offload-attention":
            return self.matrices[0][0] + self.attention_width
        outputs = 0
        inputs = 0
        for name, (rows, columns) in zip(self.hf_matrices, self.matrices, strict=True):
            if self.cut_dim(name) == 0:
                outputs += rows
            else:
                inputs += columns
        if mode == "selective":
            return outputs + self.attention_width
        return outputs + inputs

    def adapted_matrices(self, targets: str | None) -> dict[str, str]:
        """Return those `hf_matrices` that have adapters. `targets` is the value of CONFIG's
        `lora_targets`. None selects all matrices. As in PEFT, a target selects the matrices whose
        names end with it."""
        suffixes = ("",) if targets is None else _suffixes(targets)
        return {
            name: hf_name
            for name, hf_name in self.hf_matrices.items()
            if hf_name and f".{hf_name}".endswith(suffixes)
        }

    def fused_mlps(self, targets: str | None) -> list[tuple[str, str, str, str]]:
        """Return those `gated_mlps` that parallel/gated_mlp.py can compute: all matrices have
        adapters, and the number of units fits its tiles."""
        adapted = self.adapted_matrices(targets)
        shapes = dict(zip(self.hf_matrices, self.matrices, strict=True))
        return [
            (gate, up, down, activation)
            for gate, up, down, activation in self.gated_mlps
            if adapted.keys() >= {gate, up, down} and shapes[down][1] % 64 == 0
        ]

    def adapted_stacks(self, targets: str | None) -> dict[str, tuple[int, int, int]]:
        """Return those `stacks` whose names end with one of `targets`. None selects no stack,
        because adapters of all experts may be larger than the rest of training."""
        suffixes = () if targets is None else _suffixes(targets)
        return {name: shape for name, shape in self.stacks.items() if f".{name}".endswith(suffixes)}

    @property
    def quantized_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes [out, in] of the matrices that `base_dtype` quantizes: those that can
        have adapters."""
        matrices = zip(self.hf_matrices.values(), self.matrices, strict=True)
        return [shape for parts, shape in matrices if parts]

    def adapter_shapes(
        self, rank: int, targets: str | None
    ) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the shapes of A and B of each adapter in a block, by the adapter's name."""
        shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        matrices = dict(zip(self.hf_matrices, self.matrices, strict=True))
        for name in self.adapted_matrices(targets):
            rows, columns = matrices[name]
            shapes[f"{name}.adapter"] = (rank, columns), (rows, rank)
        for name, (experts, outputs, inputs) in self.adapted_stacks(targets).items():
            shapes[f"{name}_adapter"] = (experts, rank, inputs), (experts, outputs, rank)
        return shapes

    def count_adapters(self, rank: int, targets: str | None, tp: int = 1) -> tuple[int, int]:
        """Return (number of adapter parameters per block on each tp rank, number of these
        parameters that are equal on all tp ranks)."""
        per_rank = 0
        shared = 0
        for name, (a_shape, b_shape) in self.adapter_shapes(rank, targets).items():
            common = math.prod(a_shape) + math.prod(b_shape)
            split = 0
            dim = self.cut_dim(name.removesuffix(".adapter"))
            if dim is not None:
                split = math.prod((b_shape, a_shape)[dim])  # each rank has all of the other one
                common -= split
            shared += common
            per_rank += common + split // tp
        return per_rank, shared


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Shape and parameter counts of a decoder-only language model, as defined by the model's
    family.

    Counts are exact and refer to the unsharded model. They exclude vocabulary padding unless stated
    otherwise."""

    vocab_size: int
    num_positions: int  # maximum length of a training sample
    num_heads: int
    hidden_size: int
    # Kinds of blocks, in the order of their first blocks
    kinds: tuple[BlockKind, ...]
    final_norm_parameters: int  # all parameters that no other field counts
    position_parameters: int = 0  # parameters of the position embedding
    tied: bool = True  # whether the output layer shares the token embedding's weights
    # Number of key/value heads; None if each query head has separate keys and values
    num_kv_heads: int | None = None
    # Mesh axis -> why the model cannot be split over this axis
    unsplit: dict[str, str] = field(default_factory=dict)
    # Whether blocks mix tokens outside of what tp shards, so that tp cannot split a sample
    needs_whole_samples: bool = False
    packs: bool = True  # whether blocks can separate packed records
    # Whether blocks have linear attention, which on a GPU needs the package
    # flash-linear-attention. Without it, a step launches thousands of kernels for each block.
    has_linear_attention: bool = False
    # Maximum length of generated text. It may exceed that of samples, because the positions of all
    # tokens may depend on the length of a sample, which contains several records or padding.
    max_generated: int = 0
    config: Any = None  # additional settings for the family's modules

    @property
    def context_length(self) -> int:
        """Return the maximum number of tokens from which the next one can be predicted."""
        return max(self.num_positions, self.max_generated)

    @property
    def num_layers(self) -> int:
        """Return the number of blocks."""
        return sum(len(kind.layers) for kind in self.kinds)

    @property
    def head_sizes(self) -> set[int]:
        """Return the sizes of the attention heads."""
        widths = {kind.attention_width for kind in self.kinds if kind.attention_width}
        return {width // self.num_heads for width in widths}

    @property
    def block_parameters(self) -> int:
        """Return the number of parameters in all blocks."""
        return sum(len(kind.layers) * kind.parameters for kind in self.kinds)

    @property
    def matrix_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes [out, in] of the matrices of all blocks."""
        return [shape for kind in self.kinds for _ in kind.layers for shape in kind.matrices]

    def kind_of(self, layer: int) -> BlockKind:
        """Return the kind of the block with index `layer`."""
        return next(kind for kind in self.kinds if layer in kind.layers)

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
        num_tables = 1 if self.tied else 2
        outside_blocks = num_tables * self.embedding_parameters
        outside_blocks += self.position_parameters + self.final_norm_parameters
        return outside_blocks + self.block_parameters

    def check_targets(self, targets: str) -> None:
        """Raise UserError if one of the comma-separated `targets` selects no matrix."""
        for target in targets.split(","):
            if not any(
                kind.adapted_matrices(target) or kind.adapted_stacks(target) for kind in self.kinds
            ):
                why = f"the blocks have no matrix named {target.strip()}"
                names = self.part_names(None) + self.stack_names()
                fix = f"choose from {', '.join(names)}"
                raise UserError(f"lora_targets={targets!r} is not accepted", why, fix)

    def part_names(self, targets: str | None) -> list[str]:
        """Return the names, within a block, of the Hugging Face matrices that `targets` selects."""
        names: dict[str, None] = {}
        for kind in self.kinds:
            names |= dict.fromkeys(kind.adapted_matrices(targets).values())
        return list(names)

    def stack_names(self) -> list[str]:
        """Return the names of the stacks of experts' matrices, within a block."""
        return list({name: None for kind in self.kinds for name in kind.stacks})

    def adapted_stack_names(self, targets: str | None) -> list[str]:
        """Return those `stack_names` that `targets` selects (see `BlockKind.adapted_stacks`)."""
        return list({name: None for kind in self.kinds for name in kind.adapted_stacks(targets)})

    def separates_experts(self, targets: str | None) -> bool:
        """Return whether files contain separate adapters of each expert, as vLLM needs them. PEFT
        reads those of gate_up_proj correctly only if down_proj has adapters, too."""
        is_complete = any(name.endswith("down_proj") for name in self.adapted_stack_names(targets))
        return bool(is_complete and self.config["separate_experts"])

    def num_trained_parameters(self, rank: int, targets: str | None) -> int:
        """Return the number of trained parameters. If `rank` is 0, all parameters are trained.
        Otherwise, only LoRA adapters of this rank are trained."""
        if rank == 0:
            return self.num_parameters
        return sum(len(kind.layers) * kind.count_adapters(rank, targets)[0] for kind in self.kinds)

    def flops_per_token(self, seq_len: int, *, frozen: bool = False) -> int:
        """Return the FLOPs per token of the forward and backward passes together, for samples of
        `seq_len` tokens.

        The result is `6 N + 12 L D T`, or `4 N + 12 L D T` if the weights are `frozen`. N is the
        number of parameters without an untied token embedding. L is the number of layers, D is the
        combined width of all heads, and T is `seq_len`. The FLOPs of attention are counted for all
        `T^2` pairs of tokens, as in PaLM (appendix B)."""
        # Embedding lookups need no multiplications, but a tied embedding is also the output layer.
        num_used = self.num_parameters
        if not self.tied:
            num_used -= self.embedding_parameters
        num_used -= sum(len(kind.layers) * kind.unused_parameters for kind in self.kinds)
        per_parameter = 4 if frozen else 6
        width = sum(len(kind.layers) * kind.attention_width for kind in self.kinds)
        attention_flops = 12 * width * seq_len
        return per_parameter * num_used + attention_flops


def differing_value(old: ModelSize, new: ModelSize) -> tuple[str, Any, Any] | None:
    """Return the first value that differs in the configs of two models, as (key, old value, new
    value). Floats may differ by rounding to fp32."""
    pairs = [("", to_jsonable_python(old), to_jsonable_python(new))]
    for key, old_value, new_value in pairs:
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            # Other versions measure other costs of blocks, and have other keys.
            common = old_value.keys() & new_value.keys() - _NOT_COMPARED
            pairs += [(name, old_value[name], new_value[name]) for name in sorted(common)]
        elif isinstance(old_value, float) and isinstance(new_value, float):
            if not math.isclose(old_value, new_value, rel_tol=1e-6):
                return key, old_value, new_value
        elif old_value != new_value:
            return key, old_value, new_value
    return None
