"""Define Llama and similar models without any parallelism.

The letters in shapes are defined in decoder.py. In addition, G is the number of groups of heads
that share keys and values. The sources are Touvron et al. (arXiv 2302.13971) for Llama, Su et al.
(arXiv 2104.09864) for rotary positions, Ainslie et al. (arXiv 2305.13245) for groups, and Shazeer
(arXiv 2002.05202) for SwiGLU."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.models.decoder import Block, Decoder, Linear, Positions
from distributed_training.models.llama import Config, Rope, unit_size
from distributed_training.models.private import MapTensor, MovedModule
from distributed_training.models.size import ModelSize


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that returns its output in the dtype of its input. The kernel computes in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Rotary(MovedModule):
    """Rotary position embedding with a table of cosines and sines, fp32 [2, positions, K / 2].

    All blocks share this module. The table moves with the model to other devices, and stays in fp32
    for all parameter dtypes."""

    table: torch.Tensor

    def __init__(self, rope: Rope, positions: int, head_size: int) -> None:
        super().__init__()
        self.settings = (rope, positions, head_size)
        self.register_buffer("table", cos_sin_table(*self.settings), persistent=False)

    def forward(self, x: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Rotate pairs of numbers in `x` [B, T, ..., K] by the angles of the tokens' `positions`.
        The two numbers of a pair are K / 2 apart in the last dimension."""
        if isinstance(positions, int):
            table = self.table[:, None, positions : positions + x.shape[1]]
        else:
            table = self.table[:, positions]
        # The table is now [2, B or 1, T, K / 2]. All heads use the same angles.
        head_axes = [1] * (x.dim() - 3)
        cos, sin = table.unflatten(-1, (*head_axes, -1)).unbind(0)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)

    def move(self, function: MapTensor, recurse: bool) -> None:
        device = function(self.table).device
        if device != self.table.device:
            with device:
                self.table = cos_sin_table(*self.settings)


def cos_sin_table(rope: Rope, positions: int, head_size: int) -> torch.Tensor:
    """Return the cosines and sines of the rotation angles, fp32 [2, positions, K / 2].

    With Llama 3's scaling, frequencies with fewer than `low_freq_factor` turns in the original
    context are divided by `factor`. Frequencies with more than `high_freq_factor` turns stay
    unchanged, and frequencies in between are interpolated."""
    frequencies = rope.rope_theta ** -(torch.arange(0, head_size, 2).float() / head_size)
    if rope.rope_type == "llama3":
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        low = rope.low_freq_factor
        unscaled = ((turns - low) / (rope.high_freq_factor - low)).clamp(0, 1)
        frequencies = frequencies * (unscaled + (1 - unscaled) / rope.factor)
    angle = torch.arange(positions)[:, None] * frequencies
    return torch.stack([angle.cos(), angle.sin()])


class LlamaBlock(Block):
    """Attention, then a gated MLP.

    The rows of `qkv` are ordered by group. Each group has K rows for each of its q heads, then K
    rows for k and K rows for v. The rows of `mlp_in` are ordered by unit. Each unit has its gate
    rows first, then its up-projection rows. If tp splits the rows, each rank therefore gets whole
    groups or units."""

    # Function of (block, x) that replaces `mlp` (parallel/lora_mlp.py). All blocks have the same
    # function, so that torch.compile can share their graph.
    mlp_override: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    def __init__(self, config: Config, rotary: Rotary, dropout: float) -> None:
        super().__init__(dropout)
        d = config.hidden_size
        hidden = config.intermediate_size
        heads = config.num_attention_heads
        groups = config.num_key_value_heads
        norm = partial(RMSNorm, eps=config.rms_norm_eps)
        norm_heads = norm if config.has_qk_norm else nn.Identity
        self.queries_per_group = heads // groups  # query heads per group
        self.head_size = config.head_dim
        self.unit_size = unit_size(hidden)
        self.rotary = rotary
        self.norm_1 = norm(d)
        self.qkv = Linear(d, (heads + 2 * groups) * self.head_size, bias=config.has_qkv_bias)
        self.norm_q = norm_heads(self.head_size)
        self.norm_k = norm_heads(self.head_size)
        self.attention_out = Linear(heads * self.head_size, d, bias=False)
        self.norm_2 = norm(d)
        self.mlp_in = Linear(d, 2 * hidden, bias=False)
        self.mlp_out = Linear(hidden, d, bias=False)

    def heads(self, x: torch.Tensor, positions: Positions) -> Sequence[torch.Tensor]:
        rows = self.qkv(x).unflatten(-1, (-1, self.queries_per_group + 2, self.head_size))
        # (B, T, G, H / G, K), (B, T, G, 1, K), (B, T, G, 1, K)
        q, k, v = rows.split([self.queries_per_group, 1, 1], dim=-2)
        q = self.rotary(self.norm_q(q), positions)
        k = self.rotary(self.norm_k(k), positions)
        if isinstance(self.norm_k, nn.Identity):
            # As a view, v would keep q and k before the rotation in memory until the backward pass.
            v = v.contiguous()
        return [x.flatten(2, 3).transpose(1, 2) for x in (q, k, v)]

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self.mlp_override is not None:
            return self.mlp_override(self, x)
        units = self.mlp_in(x).unflatten(-1, (-1, 2, self.unit_size))
        gate, up = units.unbind(-2)
        return self.mlp_out((F.silu(gate) * up).flatten(-2))


class Llama(Decoder):
    """Decoder with rotary positions, RMSNorm and a gated MLP."""

    roles = {"blocks.*.norm_[qk]": "heads"}  # noqa: RUF012

    def __init__(self, size: ModelSize, dropout: float) -> None:
        super().__init__(size, dropout)
        config = size.config
        rotary = Rotary(config.rope_parameters, size.num_positions, config.head_dim)
        self.token_embedding = nn.Embedding(
            size.padded_vocab_size, size.hidden_size, size.padding_id
        )
        blocks = {str(i): LlamaBlock(config, rotary, dropout) for i in range(size.num_layers)}
        self.blocks = nn.ModuleDict(blocks)
        self.norm_out = RMSNorm(size.hidden_size, config.rms_norm_eps)
        if not size.tied:
            self.output_rows = nn.Embedding(size.padded_vocab_size, size.hidden_size)
