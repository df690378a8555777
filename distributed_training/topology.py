"""Which process is which: ranks, the axes of the mesh, the device, the process group.

    world_size        == pp * dp_replicate * dp_shard * tp
    global_batch_size == micro_batch_size * grad_accum_steps * dp_replicate * dp_shard

Both are checked here and never rounded. tp varies fastest with the rank and pp slowest: what
communicates most lies closest together, inside a node. torch is imported only by the functions
that need a process group.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from distributed_training.config import RunConfig
from distributed_training.errors import UserError
from distributed_training.layout_rules import advise
from distributed_training.sizes import SIZES
from distributed_training.strategy import MESH_AXES, Strategy

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

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
    tp: int = 1
    """Processes that every layer is split over."""
    pp: int = 1
    """Processes that the layers are dealt out to."""
    device_type: str
    """"cuda" or "cpu"."""

    @property
    def dp_size(self) -> int:
        """Processes that work on different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def tp_rank(self) -> int:
        """Place along tp."""
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """Place among the processes that work on different samples."""
        return self.rank // self.tp % self.dp_size

    @property
    def pp_rank(self) -> int:
        """Place along pp; 0 holds the first layers."""
        return self.rank // (self.tp * self.dp_size)

    @property
    def axes(self) -> dict[str, int]:
        """Axis -> size, the slowest first."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    def build_mesh(self) -> DeviceMesh:
        """The axes in use as one DeviceMesh, and dp_shard in any case, which FSDP works over.
        Collective: of several axes each gets communicators of its own, unless it spans all
        processes.
        """
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {axis: size for axis, size in self.axes.items() if size > 1 or axis == "dp_shard"}
        return init_device_mesh(
            self.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )

    def new_pipeline_group(self) -> dist.ProcessGroup:
        """Another communicator over this process's pipeline, besides the mesh's. Collective."""
        import torch.distributed as dist

        apart = self.world_size // self.pp
        pipelines = [list(range(first, self.world_size, apart)) for first in range(apart)]
        own, _ = dist.new_subgroups_by_enumeration(pipelines)
        return own

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
    strategy: Strategy,
    *,
    world_size: int,
    rank: int,
    local_rank: int,
    device_type: str,
    config: RunConfig | None = None,
) -> Topology:
    """Fill in the mesh axis that is -1; raise UserError when the product is not `world_size`.

    The error suggests what `config` and its model go with; without them, what the mesh does.
    """
    axes = dict(strategy.mesh)
    open_axes = [axis for axis, size in axes.items() if size == -1]
    fixed = math.prod(size for size in axes.values() if size != -1)
    if len(open_axes) > 1 or fixed < 1 or any(size < 1 and size != -1 for size in axes.values()):
        raise UserError(
            f"mesh {show_axes(axes)} is not understood",
            "at most one axis may be -1",
            "give the others whole numbers of 1 or more",
        )
    if open_axes and world_size % fixed == 0:
        axes[open_axes[0]] = world_size // fixed
    if math.prod(axes.values()) != world_size:
        size = SIZES.get(config.model) if config is not None else None  # None for "auto", too
        advice = advise(strategy, world_size, config, size, numbers_first=True)
        raise UserError(
            f"mesh {show_axes(axes)} does not make {world_size} processes",
            fix=f"{advice} (the mesh is that of {strategy.source})",
        )
    return Topology(
        world_size=world_size, rank=rank, local_rank=local_rank, device_type=device_type, **axes
    )


def show_axes(axes: Mapping[str, int]) -> str:
    """ "dp_shard 2 x tp 2"; axes of size 1 are left out unless all are."""
    shown = {axis: size for axis, size in axes.items() if size != 1}
    return " x ".join(f"{axis} {size}" for axis, size in (shown or dict(axes)).items())


@contextlib.contextmanager
def process_group(topology: Topology, *, timeout: timedelta = COLLECTIVE_TIMEOUT) -> Iterator[None]:
    """Start the default process group (gloo for CPU tensors, NCCL for CUDA ones) and end it.

    Whoever waits longer than `timeout` for the others in that group fails; groups that are made
    later have torch's own limits (10 minutes over NCCL).

    The end comes after the caller has dropped engine and model: threads of gloo that outlive the
    interpreter abort it, so garbage is collected and all ranks meet before the group goes.
    """
    import torch
    import torch.distributed as dist

    if topology.device_type == "cuda":
        torch.cuda.set_device(topology.device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=topology.device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    try:
        yield
        gc.collect()
        dist.barrier()
    finally:
        dist.destroy_process_group()
