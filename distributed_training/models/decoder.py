"""Define the base classes of decoder-only language models. Each family adds its blocks.

In shapes, B is the batch size, T the number of tokens and D the hidden size. V is the vocabulary
size and P the padded vocabulary size. H is the number of attention heads and K the head size."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models.attention import Documents, describe_documents
from distributed_training.models.initial_weights import Slices, WeightSource, hashed_normal
from distributed_training.models.private import local_part
from distributed_training.models.size import ModelSize

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
# Buffer with the number of rows up to the end of each expert's rows in the latest micro-batch
EXPERT_ENDS = "latest_ends"
Positions = int | torch.Tensor
"""Position of the first token, if positions are consecutive, or the positions of all tokens,
[B, T]."""
# Ends of the names of matrices whose outputs are added to the residual stream
_RESIDUAL = (".attention_out.weight", ".mlp_out.weight")
_TABLES = ("token_embedding.", "output_rows.")  # modules with one row per token id


class Linear(nn.Linear):
    """nn.Linear that computes in the dtype of its input.

    Weights in fp32 are rounded to that dtype at each use, but their gradients are fp32. The results
    are therefore the same with every strategy. A block must call each of its linear layers exactly
    once per forward pass, with an input [B, T, features]. The module parallel/zero_bubble.py relies
    on these calls."""

    # Factor of the bias in this rank's term of a sum over ranks: 0 if only another term has it, or
    # None if it is added to the sum
    bias_factor: float | None = 1.0
    # Function of (layer, x) that replaces `matmul`. All layers use the same function, because
    # torch.compile shares one graph only between blocks that call the same functions.
    matmul_override: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        # Module that maps (this layer, x) to an output (parallel/lora.py)
        self.adapter: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.adapter is None:
            return self.product(x)
        return self.adapter(self, x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output without an adapter."""
        if self.matmul_override is None:
            return self.matmul(x)
        return self.matmul_override(self, x)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x W^T`, plus the bias if this layer adds it."""
        return F.linear(x, local_part(self.weight).to(x.dtype), self.cast_bias(x))

    def cast_bias(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the bias that this layer adds for an input, in its dtype. Return None if the layer
        adds no bias."""
        if self.bias is None or self.bias_factor is None:
            return None
        bias = local_part(self.bias).to(x.dtype)
        return bias if self.bias_factor == 1 else bias * self.bias_factor


class KVCache:
    """Cache of the keys and values of all tokens that a model has processed. The model must not use
    tp or pp."""

    def __init__(self) -> None:
        self.length = 0
        self.cache: Any = None  # transformers' cache, for models that use its code
        self._by_block: dict[nn.Module, tuple[torch.Tensor, ...]] = {}

    def add(self, block: nn.Module, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Append a block's new keys and values to the cache. Return the block's keys and values of
        all tokens so far, concatenated along dimension 2."""
        if block in self._by_block:
            pairs = zip(self._by_block[block], tensors, strict=True)
            tensors = tuple(torch.cat(pair, dim=2) for pair in pairs)
        self._by_block[block] = tensors
        return tensors


class Decoder(nn.Module):
    """Token embedding, blocks, final norm and output layer of a whole model or a pipeline stage.

    The __init__ of a subclass sets the modules that this class declares and any other modules that
    `place` needs. It sets them in the order that the family's parameters should have. The first
    stage contains the modules that are set before the blocks, and the last stage contains the
    modules that are set after the blocks. The embedding has `size.padded_vocab_size` rows. Padding
    is removed or masked before the logits are used."""

    token_embedding: nn.Embedding
    blocks: nn.ModuleDict
    norm_out: nn.Module
    # Output layer, a table [P, D] like the embedding; set only if it is not tied
    output_rows: nn.Embedding

    def __init__(self, size: ModelSize, dropout: float) -> None:
        super().__init__()
        self.size = size
        self.dropout = dropout
        self.is_first = self.is_last = True
        # Dtype of the residual stream; None means the dtype of the parameters
        self.compute_dtype: torch.dtype | None = None
        # Maximum number of documents in a training micro-batch; None if unknown
        self.max_documents: int | None = None
        # Function applied after the final norm; the engine replaces or compiles it
        self.loss: Callable[..., torch.Tensor] = summed_cross_entropy
        # With pairs of answers, the function that compares their token losses (preference.py)
        self.pair_loss: Callable[..., torch.Tensor] | None = None

    def forward(
        self,
        x: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        past: KVCache | None = None,
    ) -> torch.Tensor:
        """Return logits [B, T, V] from token ids [B, T], or the loss if `targets` are given.

        The loss is an fp32 sum over targets [B, T] other than IGNORE_INDEX. The target at index
        [:, t] is the token after `x[:, t]`. With `past`, the ids follow the cached tokens, and the
        cache is extended. `positions` and `ends` describe packed records, and `values` pairs of
        answers, as in `Samples.batch`. With pairs, the loss is the result of `pair_loss`.
        All stages except the first accept hidden states [B, T, D], and all stages except the last
        return hidden states."""
        start: Positions = 0 if past is None else past.length
        documents = None
        if positions is not None:
            start = positions
            if ends is not None:
                documents = self.describe_documents(positions, ends)
        x = self.run(x, start, documents, past)
        if not self.is_last:
            return x
        result = self.apply_head(x, targets)
        if self.pair_loss is None or targets is None:
            return result
        return self.pair_loss(result, targets, ends, values)

    def run(
        self,
        x: torch.Tensor,
        positions: Positions,
        documents: Documents | None,
        past: KVCache | None,
    ) -> torch.Tensor:
        """Run this stage's blocks, after the embedding if this is the first stage. Return hidden
        states [B, T, D]."""
        if self.is_first:
            x = self.embed(x, positions)
        for block in self.blocks.values():
            x = block(x, past=past, documents=documents)
        if past is not None:
            past.length += x.shape[1]
        return x

    @property
    def describe_documents(self) -> Callable[[torch.Tensor, torch.Tensor], Documents]:
        """Return a function that describes packed documents in the form that this model's attention
        needs."""
        return functools.partial(
            describe_documents,
            dtype=self.compute_dtype or torch.float32,
            head_sizes=self.size.head_sizes,
            dropout=self.dropout,
            max_documents=self.max_documents if self.training else None,
        )

    def embed(self, ids: torch.Tensor, positions: Positions = 0) -> torch.Tensor:
        """Return the embeddings of token ids at `positions`, [B, T] -> [B, T, D]."""
        return self.place(self.token_embedding(ids), positions)

    def apply_head(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the final norm and the output layer, [B, T, D] -> logits [B, T, V]. With targets
        [B, T], return the summed loss instead."""
        x = self.norm_out(x)
        weight = self.output_weight.to(x.dtype)
        if targets is None:
            return project_to_vocabulary(x, weight, self.size.vocab_size)
        return self.loss(x, weight, targets, self.size.vocab_size)

    def place(self, x: torch.Tensor, positions: Positions = 0) -> torch.Tensor:
        """Cast token embeddings to the compute dtype and apply dropout, [B, T, D] -> [B, T, D].
        Families with learned position embeddings add them here."""
        return F.dropout(x.to(self.compute_dtype or x.dtype), self.dropout, self.training)

    @property
    def output_weight(self) -> torch.Tensor:
        """Return the weight of the output layer, [P, D]. The last stage has this weight. If the
        weight is tied, the first stage also has it."""
        return self.token_embedding.weight if self.size.tied else self.output_rows.weight

    def stage(self, blocks: range) -> "Decoder":
        """Return the pipeline stage that contains a range of blocks. Parameters keep the names that
        they have in the whole model.

        The first stage includes the modules before the blocks. The last stage includes the modules
        after the blocks. The stage shares its modules with this model. However, a last stage that
        is not also the first gets a copy of a tied embedding."""
        stage = copy.copy(self)
        nn.Module.__init__(stage)  # the new stage starts without modules and hooks
        stage.is_first = blocks.start == 0
        stage.is_last = blocks.stop == self.size.num_layers
        modules = list(self.named_children())
        index = modules.index(("blocks", self.blocks))
        first_modules = modules[:index] if stage.is_first else []
        for name, module in first_modules:
            setattr(stage, name, module)
        stage.blocks = nn.ModuleDict({str(i): self.blocks[str(i)] for i in blocks})
        if stage.is_last and self.size.tied and not stage.is_first:
            weight = self.token_embedding.weight.detach().clone()
            stage.token_embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        last_modules = modules[index + 1 :] if stage.is_last else []
        for name, module in last_modules:
            setattr(stage, name, module)
        return stage

    def random_source(self, seed: int, device: torch.device, *, hashed: bool) -> WeightSource:
        """Return a source of random weights that depend only on `seed` and `hashed`.

        Values of matrices are normally distributed with a standard deviation of 0.02. The standard
        deviation is smaller for matrices whose results are added to the residual stream (Radford et
        al. 2019). Biases and vocabulary padding are 0, and the weights of norms are 1. With
        `hashed`, `hashed_normal` draws matrices on `device`, and each rank computes only its shard.
        Otherwise, torch's generator draws whole matrices on the CPU."""
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        indices = {name: index for index, name in enumerate(shapes)}
        padded = self.vocabulary_parameters()

        def draw(name: str, slices: Slices) -> torch.Tensor:
            shape = shapes[name]
            if len(shape) < 2:
                values = torch.empty(shape, device=device)[slices]
                return values.fill_(0.0 if name.endswith("bias") else 1.0)
            deviation = 0.02
            if name.endswith(_RESIDUAL):
                deviation /= math.sqrt(2 * self.size.num_layers)
            key = seed * 100_003 + indices[name]
            if hashed:
                values = hashed_normal(shape, slices, key, device).mul_(deviation)
            else:
                values = torch.empty(shape, device="cpu")
                values.normal_(0.0, deviation, generator=torch.Generator().manual_seed(key))
                values = values[slices]
            if name in padded:
                first = slices[0].start if slices else 0
                num_real = max(0, self.size.vocab_size - first)
                values[num_real:].zero_()
            return values

        return draw

    def vocabulary_parameters(self) -> list[str]:
        """Return the names of the parameters that have one row per token id, followed by rows of
        padding."""
        return [name for name, _ in self.named_parameters() if name.startswith(_TABLES)]


def project_to_vocabulary(
    x: torch.Tensor, weight: torch.Tensor, vocab_size: int, cap: float = 0.0
) -> torch.Tensor:
    """Return logits [B, T, V] from hidden states [B, T, D] and the output layer's weight [P, D]. A
    nonzero `cap` limits the logits to between -cap and cap."""
    return softcap(F.linear(x, weight)[..., :vocab_size], cap)


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Limit logits smoothly to between -cap and cap. A cap of 0 leaves the logits unchanged."""
    if cap == 0:
        return logits
    return torch.tanh(logits / cap) * cap


def summed_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, cap: float = 0.0
) -> torch.Tensor:
    """Return the summed loss, an fp32 scalar, for hidden states [B, T, D], the output layer's
    weight [P, D] and targets [B, T]."""
    logits = F.linear(x, weight).float().flatten(0, -2)
    logits = softcap(logits, cap)
    if logits.shape[1] > vocab_size:
        # Slicing off the padding would be slower, because the rows would no longer be aligned.
        columns = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(columns >= vocab_size, -torch.inf)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def is_block_matrix(name: str, size: ModelSize) -> bool:
    """Return whether the parameter `name` is a matrix in a block that can have adapters, or a stack
    of experts' matrices. The code of other matrices may read their weights."""
    blocks, _, parameter = name.partition(".")
    if blocks != "blocks":
        return False
    layer, _, matrix = parameter.partition(".")
    kind = size.kind_of(int(layer))
    return bool(kind.hf_matrices.get(matrix.removesuffix(".weight"))) or matrix in kind.stacks
