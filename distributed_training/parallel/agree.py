"""What all ranks do, or none of them."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


def fails_anywhere(failure: str, consequence: str) -> bool:
    """Whether some rank says why it failed (this one with `failure`, "" if it did not); each then
    warns of the `consequence` for all. Collective over all processes."""
    failed = torch.tensor(int(bool(failure)))
    dist.all_reduce(failed)
    if failed:
        logger.warning("%s: %s", consequence, failure or "it failed on another rank")
    return bool(failed)
