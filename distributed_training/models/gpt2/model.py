"""GPT-2 out of plain nn.Linear blocks. It knows nothing of parallelism.

Letters as in decoder.py; H heads, K = D / H. Source: Radford et al. 2019.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.models import ModelSize
from distributed_training.models.decoder import Decoder, Linear, Past


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm in the dtype of its input; its statistics are fp32 inside the kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype)
        bias = self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then a 4x MLP. The rows of `qkv` are ordered
    (head, q/k/v, K), so that a split over heads is a split of rows."""

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

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        x = x + F.dropout(self.attention(self.norm_1(x), past), self.dropout, self.training)
        hidden = F.gelu(self.mlp_in(self.norm_2(x)), approximate="tanh")
        return x + F.dropout(self.mlp_out(hidden), self.dropout, self.training)

    def attention(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """Causal self-attention, [B, T, D] -> [B, T, D]."""
        qkv = self.qkv(x)
        batch, tokens, _ = qkv.shape
        qkv = qkv.view(batch, tokens, -1, 3, self.head_size)  # (B, T, H, 3, K)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)  # each (B, H, T, K)
        start = past.length if past is not None else 0
        if past is not None:
            k, v = past.add(self, k, v)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0, dropout_p=rate)
        return self.attention_out(y.transpose(1, 2).reshape(batch, tokens, -1))


class GPT2(Decoder):
    """GPT-2 with learnt positions, its output layer tied to the token embedding."""

    first_modules = ("token_embedding", "position_embedding")
    roles = {  # noqa: RUF012
        "blocks.*.norm_1": "whole",
        "blocks.*.qkv": "column",
        "blocks.*.attention_out": "row",
        "blocks.*.norm_2": "whole",
        "blocks.*.mlp_in": "column",
        "blocks.*.mlp_out": "row",
        "position_embedding": "positions",
    }

    def __init__(self, size: ModelSize, *, dropout: float = 0.0) -> None:
        super().__init__(size, dropout=dropout)
        d = size.hidden_size
        self.token_embedding = nn.Embedding(size.padded_vocab_size, d)
        self.position_embedding = nn.Embedding(size.num_positions, d)
        self.blocks = nn.ModuleDict({str(i): Block(size, dropout) for i in range(size.num_layers)})
        self.norm_out = LayerNorm(d)

    def place(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Add positions, [B, T, D] -> [B, T, D]."""
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        return super().place(x + self.position_embedding(positions))
