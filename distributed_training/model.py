"""GPT-2 out of plain nn.Linear blocks. It knows nothing of parallelism.

Letters in the shape comments: B batch, T tokens, D hidden, H heads, K = D / H, V vocabulary,
P padded vocabulary. Source: Radford et al. 2019; initialisation as in the published code
(normal 0.02, residual projections scaled by 1 / sqrt(2 L)).
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.sizes import ModelSize

IGNORE_INDEX = -100


class Linear(nn.Linear):
    """nn.Linear in the dtype of its input, whatever dtype its weights are kept in.

    One rule gives every strategy the same arithmetic: fp32 weights are rounded at use (and their
    gradients arrive in fp32), weights that an engine keeps in bf16 are used as they are.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm in the dtype of its input; its statistics are fp32 inside the kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then a 4x MLP.

    The rows of `qkv` are ordered (head, q/k/v, K), so that a split over heads is a split of rows.
    """

    def __init__(self, size: ModelSize, dropout: float) -> None:
        super().__init__()
        d = size.hidden_size
        self.head_size = d // size.num_heads
        self.dropout = dropout
        self.norm_1 = LayerNorm(d)
        self.qkv = Linear(d, 3 * d)
        self.attention_out = Linear(d, d)
        self.norm_2 = LayerNorm(d)
        self.mlp_in = Linear(d, 4 * d)
        self.mlp_out = Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        x = x + self._drop(self.attention(self.norm_1(x)))
        hidden = F.gelu(self.mlp_in(self.norm_2(x)), approximate="tanh")
        return x + self._drop(self.mlp_out(hidden))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention, [B, T, D] -> [B, T, D]."""
        qkv = self.qkv(x)
        batch, tokens, _ = qkv.shape
        qkv = qkv.view(batch, tokens, -1, 3, self.head_size)  # (B, T, H, 3, K)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)  # each (B, H, T, K)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return self.attention_out(y.transpose(1, 2).reshape(batch, tokens, -1))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT2(nn.Module):
    """GPT-2 with its output layer tied to the token embedding.

    The embedding is stored padded to `size.padded_vocab_size` rows; the padding is cut off the
    logits before anything sees them, so it is never a target, a probability or a sample.
    """

    def __init__(self, size: ModelSize, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.size = size
        self.dropout = dropout
        # Dtype of the residual stream and so of all arithmetic; None keeps the parameters'.
        self.compute_dtype: torch.dtype | None = None
        # What follows the last norm: attributes, so that they can be compiled or replaced.
        self.loss = summed_cross_entropy
        self.project = project_to_vocabulary
        self.token_embedding = nn.Embedding(size.padded_vocab_size, size.hidden_size)
        self.position_embedding = nn.Embedding(size.num_positions, size.hidden_size)
        self.blocks = nn.ModuleDict({str(i): Block(size, dropout) for i in range(size.num_layers)})
        self.norm_out = LayerNorm(size.hidden_size)

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids [B, T] -> logits [B, T, V]; with targets [B, T], the summed loss instead.

        The loss is the fp32 sum of cross entropies over targets other than IGNORE_INDEX: a sum,
        so that the caller can divide by the number of real tokens of the whole global batch.
        Targets are already shifted: targets[:, t] follows input_ids[:, t].
        """
        x = self.embed(input_ids)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x, targets)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, T, D]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def head(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """[B, T, D] -> logits [B, T, V], or the summed loss when targets are given."""
        x = self.norm_out(x)
        weight = self.token_embedding.weight.to(x.dtype)
        if targets is None:
            return self.project(x, weight, self.size.vocab_size)
        return self.loss(x, weight, targets, self.size.vocab_size)


def project_to_vocabulary(x: torch.Tensor, weight: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Hidden states [B, T, D], output rows [P, D] -> logits [B, T, V]."""
    return F.linear(x, weight)[..., :vocab_size]


def summed_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Hidden states [B, T, D], output rows [P, D], targets [B, T] -> summed loss, fp32 scalar."""
    logits = project_to_vocabulary(x, weight, vocab_size)
    return F.cross_entropy(
        logits.float().view(-1, vocab_size),
        targets.view(-1),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


def build_model(size: ModelSize, *, dropout: float, seed: int) -> GPT2:
    """A GPT2 on the CPU in fp32 with random weights that depend on `seed` and nothing else.

    Each parameter has a generator of its own, so that they can be filled at the same time: drawing
    1.5 billion numbers on one core would take longer than loading them.
    """
    with torch.device("meta"):
        model = GPT2(size, dropout=dropout)
    model.to_empty(device="cpu")
    residual_std = 0.02 / math.sqrt(2 * size.num_layers)

    def fill(index: int, name: str, parameter: nn.Parameter) -> None:
        values = parameter.data
        if name.endswith("bias"):
            values.zero_()
        elif "norm" in name:
            values.fill_(1.0)
        else:
            residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            generator = torch.Generator().manual_seed(seed * 100_003 + index)
            values.normal_(0.0, residual_std if residual else 0.02, generator=generator)

    with ThreadPoolExecutor() as pool:
        named = list(model.named_parameters())
        list(pool.map(lambda item: fill(item[0], *item[1]), enumerate(named)))
    model.token_embedding.weight.data[size.vocab_size :].zero_()
    return model


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """AdamW's two groups: matrices decay; biases and norms (one-dimensional) do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
