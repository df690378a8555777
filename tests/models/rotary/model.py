"""The modules; imported when one is built."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.models.decoder import Decoder, Linear, build_decoder

__all__ = ["Rotary", "build_decoder"]


class Scale(nn.Module):
    """RMSNorm: no mean, no bias."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


def rotate(x):
    """Turn each pair of numbers of a head [B, H, T, K] by its position times its frequency."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Layer(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        d = size.hidden_size
        self.width, self.dropout = d // size.num_heads, dropout
        self.before_mixing = Scale(d)
        self.heads_in = Linear(d, 3 * d, bias=False)  # rows (head, q/k/v, K)
        self.heads_out = Linear(d, d, bias=False)
        self.before_mlp = Scale(d)
        self.gate_and_value = Linear(d, 4 * d, bias=False)  # rows (unit, gate/value)
        self.down = Linear(2 * d, d, bias=False)

    def forward(self, x):
        x = x + F.dropout(self.mix(self.before_mixing(x)), self.dropout, self.training)
        gate, value = self.gate_and_value(self.before_mlp(x)).unflatten(-1, (-1, 2)).unbind(-1)
        return x + F.dropout(self.down(F.silu(gate) * value), self.dropout, self.training)

    def mix(self, x):
        heads = self.heads_in(x).unflatten(-1, (-1, 3, self.width))
        q, k, v = heads.permute(3, 0, 2, 1, 4).unbind(0)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, dropout_p=rate)
        return self.heads_out(y.transpose(1, 2).flatten(2))


class Rotary(Decoder):
    attention = "mix"
    roles = {  # noqa: RUF012
        "blocks.*.before_mixing": "whole",
        "blocks.*.heads_in": "column",
        "blocks.*.heads_out": "row",
        "blocks.*.before_mlp": "whole",
        "blocks.*.gate_and_value": "column",
        "blocks.*.down": "row",
    }

    def __init__(self, size, *, dropout=0.0):
        super().__init__(size, dropout=dropout)
        d = size.hidden_size
        self.token_embedding = nn.Embedding(size.padded_vocab_size, d)
        self.blocks = nn.ModuleDict({str(i): Layer(size, dropout) for i in range(size.num_layers)})
        self.norm_out = Scale(d)
        if not size.tied:
            self.output_rows = nn.Embedding(size.padded_vocab_size, d)
