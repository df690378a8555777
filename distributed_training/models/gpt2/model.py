"""Define GPT-2 (Radford et al. 2019) without any parallelism.

The letters in shapes are defined in decoder.py, and K = D / H."""

from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.models.attention import Documents, attend
from distributed_training.models.decoder import Decoder, KVCache, Linear, Positions
from distributed_training.models.size import ModelSize


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm that returns its output in the dtype of its input. The mean and the variance are
    computed in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype)
        bias = self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class GPT2Block(nn.Module):
    """Causal attention, then an MLP with four times the hidden size, each after a norm. The rows of
    `qkv` are ordered (head, q/k/v, K), so splitting the rows splits the heads."""

    exchange: Any = None  # with cp, the all-to-alls around attention (parallel/context.py)

    def __init__(self, size: ModelSize, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        d = size.hidden_size
        self.head_size = d // size.num_heads
        self.norm_1 = LayerNorm(d)
        self.qkv = Linear(d, 3 * d)
        self.attention_out = Linear(d, d)
        self.norm_2 = LayerNorm(d)
        self.mlp_in = Linear(d, 4 * d)
        self.mlp_out = Linear(4 * d, d)

    def forward(
        self, x: torch.Tensor, past: KVCache | None = None, documents: Documents | None = None
    ) -> torch.Tensor:
        """Return the block's output for hidden states, [B, T, D] -> [B, T, D]."""
        y = self.attention(self.norm_1(x), past, documents)
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.mlp_out(F.gelu(self.mlp_in(self.norm_2(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout, self.training)

    def attention(
        self, x: torch.Tensor, past: KVCache | None, documents: Documents | None
    ) -> torch.Tensor:
        """Return the output of causal self-attention, [B, T, D] -> [B, T, D]. With `documents`,
        each token attends only within its document."""
        start = 0 if past is None else past.length
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))  # (B, T, H, 3, K)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        if past is not None:
            k, v = past.add(self, k, v)
        rate = self.dropout if self.training else 0.0
        attend_heads = partial(attend, documents=documents, is_causal=start == 0, dropout=rate)
        if self.exchange is not None:
            attend_heads = partial(self.exchange, attend_heads)
        return self.attention_out(attend_heads(q, k, v).flatten(2))


class GPT2(Decoder):
    """GPT-2 with learned position embeddings. Its output layer is tied to the token embedding
    unless `size.tied` is False."""

    def __init__(self, size: ModelSize, dropout: float) -> None:
        super().__init__(size, dropout)
        d = size.hidden_size
        self.token_embedding = nn.Embedding(size.padded_vocab_size, d)
        self.position_embedding = nn.Embedding(size.num_positions, d)
        blocks = {str(i): GPT2Block(size, dropout) for i in range(size.num_layers)}
        self.blocks = nn.ModuleDict(blocks)
        self.norm_out = LayerNorm(d)
        if not size.tied:
            self.output_rows = nn.Embedding(size.padded_vocab_size, d)

    def place(self, x: torch.Tensor, positions: Positions = 0) -> torch.Tensor:
        """Add position embeddings and apply dropout, [B, T, D] -> [B, T, D]."""
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + x.shape[1], device=x.device)
        return super().place(x + self.position_embedding(positions))
