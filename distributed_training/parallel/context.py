"""Implement context parallelism with DeepSpeed-Ulysses attention (arXiv 2309.14509). The tokens of
each sample are split over R ranks.

models/decoder.py defines the other letters in shapes, and models/attention.py defines G. Each rank
has T / R consecutive tokens of every sample, and computes everything except attention for them. An
all-to-all before attention gives each rank all tokens of H / R query heads, so that packed
documents are whole. Another all-to-all after attention returns each token to its rank."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from distributed_training.models.attention import Documents
from distributed_training.models.decoder import Decoder, Positions
from distributed_training.parallel.exchanges import all_to_all


def apply_cp(model: Decoder, cp: int) -> None:
    """Split the tokens of each sample over groups of `cp` consecutive ranks, in place. The model's
    inputs are still whole samples, and its loss is the sum over this rank's targets. All ranks must
    call this function, because it creates communicators."""
    group, _ = dist.new_subgroups(cp)
    assert group is not None
    exchange = HeadExchange(group)
    for block in model.blocks.values():
        for module in block.modules():
            module.exchange = exchange  # type: ignore[assignment]
    model.forward = partial(_forward_own_tokens, model, group)  # type: ignore[method-assign]


def _forward_own_tokens(
    model: Decoder,
    group: dist.ProcessGroup,
    ids: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's part of `Decoder.forward`'s summed loss. The arguments are those of
    `Decoder.forward`, for whole samples."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(group.size(), dim=1)[group.rank()]

    own_positions: Positions = group.rank() * (ids.shape[1] // group.size())
    documents = Documents(own_positions)
    if positions is not None and ends is not None:
        own_positions = own(positions)
        documents = model.describe_documents(positions, ends)
    x = model.run(own(ids), own_positions, documents, past=None)
    result = model.apply_head(x, own(targets))
    if model.pair_loss is None:
        return result
    return model.pair_loss(result, own(targets), ends, values, group=group)


class HeadExchange:
    """All-to-alls around attention. models/hub/attention.py and GPT-2's blocks call this object if
    it is their attribute `exchange`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group_name = group.group_name
        self.num_ranks = group.size()
        self.rank = group.rank()

    def own_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor with one row per query head."""
        return x.chunk(self.num_ranks)[self.rank]

    def __call__(
        self,
        attend_heads: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attention of this rank's tokens: q [B, H, T / R, K], k and v [B, G, T / R, K]
        and the result [B, T / R, H, K]. The heads of v may have another size. `attend_heads`
        computes attention for all tokens of H / R query heads, whose result is [B, T, H / R, K]."""
        # Each rank needs the same number of key/value heads, and these must be the ones that its
        # query heads use.
        repeats = self.num_ranks // math.gcd(k.shape[1], self.num_ranks)
        k = k.repeat_interleave(repeats, dim=1)
        v = v.repeat_interleave(repeats, dim=1)
        # For each rank, its heads of q, k and v: [R, B, T / R, values]
        parts = []
        for x in (q, k, v):
            by_rank = x.transpose(1, 2).flatten(2).unflatten(2, (self.num_ranks, -1))
            parts.append(by_rank.movedim(2, 0))
        received = all_to_all(torch.cat(parts, dim=3), self.group_name)
        whole = received.movedim(0, 1).flatten(1, 2)  # [B, T, values]
        own = whole.split([part.shape[3] for part in parts], dim=2)
        q, k, v = (
            values.unflatten(2, (-1, x.shape[-1])).transpose(1, 2)
            for values, x in zip(own, (q, k, v), strict=True)
        )
        y = attend_heads(q, k, v)
        by_rank = y.unflatten(1, (self.num_ranks, -1)).movedim(1, 0)
        returned = all_to_all(by_rank, self.group_name)
        return returned.movedim(0, 2).flatten(2, 3)
