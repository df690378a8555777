"""What ranks tell one another on the CPU, outside of training's own exchanges.

As JSON: a pickle would be run by whoever reads it.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


def gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank gives, by rank: whatever JSON can say, so that tuples come as lists.
    `group`: another one of all ranks. Collective."""
    data = _encode(mine)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)]), group)
    longest = max(int(size) for size in sizes)
    ranks = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(ranks, torch.nn.functional.pad(data, (0, longest - len(data))), group)
    return [_decode(rank[: int(size)]) for rank, size in zip(ranks, sizes, strict=True)]


def from_rank_0(value: Any) -> Any:
    """Rank 0's `value`, as `gather` would give it, on all ranks. Collective."""
    first = dist.get_rank() == 0
    data = _encode(value) if first else torch.zeros(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0)
    if not first:
        data = torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return _decode(data)


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def fails_anywhere(failure: str, consequence: str) -> bool:
    """Whether some rank says why it failed (this one with `failure`, "" if it did not); each then
    warns of the `consequence` for all. Collective over all processes."""
    failed = torch.tensor(int(bool(failure)))
    dist.all_reduce(failed)
    if failed:
        logger.warning("%s: %s", consequence, failure or "it failed on another rank")
    return bool(failed)
