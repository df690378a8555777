"""Which process is which: ranks, the data-parallel axes, the device, the process group.

    world_size        == dp_replicate * dp_shard
    global_batch_size == micro_batch_size * grad_accum_steps * dp_replicate * dp_shard

Both are checked here and never rounded. torch is imported only by the functions that start and
end the process group.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from distributed_training.errors import UserError
from distributed_training.strategy import Strategy

if TYPE_CHECKING:
    import torch

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """This process's place among all of them."""

    world_size: int
    rank: int
    local_rank: int
    dp_replicate: int
    """Groups that hold a full copy each."""
    dp_shard: int
    """Processes that one copy is divided over."""
    device_type: str
    """"cuda" or "cpu"."""

    @property
    def dp_size(self) -> int:
        """Processes that work on different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """Place among them; equals `rank`, as both axes are data parallel."""
        return self.rank

    @property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        import torch

        return (
            torch.device("cuda", self.local_rank)
            if self.device_type == "cuda"
            else (torch.device("cpu"))
        )


def build_topology(
    strategy: Strategy, *, world_size: int, rank: int, local_rank: int, device_type: str
) -> Topology:
    """Fill in the mesh axis that is -1; raise UserError when the product is not `world_size`."""
    axes = dict(strategy.mesh)
    open_axes = [axis for axis, size in axes.items() if size == -1]
    fixed = 1
    for size in axes.values():
        fixed *= 1 if size == -1 else size
    product = " x ".join(f"{axis} {size}" for axis, size in axes.items())
    if len(open_axes) > 1 or fixed < 1 or any(size < 1 and size != -1 for size in axes.values()):
        raise UserError(f"mesh {product} is not understood", "at most one axis may be -1")
    if open_axes and world_size % fixed == 0:
        axes[open_axes[0]] = world_size // fixed
        fixed = world_size
    if fixed != world_size:
        raise UserError(
            f"mesh {product} does not make {world_size} processes",
            fix=f"start {'a multiple of ' if open_axes else ''}{fixed} processes or change "
            f"{strategy.source}",
        )
    return Topology(
        world_size=world_size, rank=rank, local_rank=local_rank, device_type=device_type, **axes
    )


@contextlib.contextmanager
def process_group(topology: Topology) -> Iterator[None]:
    """Start the default process group (gloo for CPU tensors, NCCL for CUDA ones) and end it.

    The end comes after the caller has dropped engine and model: threads of gloo that outlive the
    interpreter abort it, so garbage is collected and all ranks meet before the group goes.
    """
    import torch
    import torch.distributed as dist

    if topology.device_type == "cuda":
        torch.cuda.set_device(topology.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", timeout=COLLECTIVE_TIMEOUT, device_id=topology.device
        )
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        yield
        gc.collect()
        dist.barrier()
    finally:
        dist.destroy_process_group()
