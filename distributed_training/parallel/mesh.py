"""Which process is which: ranks, the axes of the mesh, the device, the process group.

tp varies fastest with the rank and pp slowest: what communicates most lies closest together, inside
a node. torch is imported only by the functions that need a process group."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from distributed_training.plan.schedules import P2P_CHANNELS
from distributed_training.settings.strategies import MESH_AXES

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """This process's place among all of them, with the sizes of the mesh's axes."""

    world_size: int
    rank: int
    local_rank: int
    dp_replicate: int
    dp_shard: int
    tp: int = 1
    pp: int = 1
    device_type: str  # "cuda" or "cpu"

    @property
    def dp_size(self) -> int:
        """Processes that work on different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def tp_rank(self) -> int:
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
        Collective: makes communicators for each axis that does not span all processes."""
        from torch.distributed.device_mesh import init_device_mesh

        used = {axis: size for axis, size in self.axes.items() if size > 1 or axis == "dp_shard"}
        return init_device_mesh(self.device_type, tuple(used.values()), mesh_dim_names=tuple(used))

    def new_pipeline_group(self) -> dist.ProcessGroup:
        """Another communicator over this process's pipeline, besides the mesh's. Collective."""
        import torch.distributed as dist

        apart = self.world_size // self.pp
        pipelines = [list(range(first, self.world_size, apart)) for first in range(apart)]
        own, _ = dist.new_subgroups_by_enumeration(pipelines)
        return own

    @property
    def device(self) -> torch.device:
        import torch

        on_gpu = self.device_type == "cuda"
        return torch.device("cuda", self.local_rank) if on_gpu else torch.device("cpu")


def limit_channels(*compressions: str) -> None:
    """Let NCCL use few channels for messages, unless these `gradient_compression`s exchange all to
    all; the environment's NCCL_MAX_P2P_NCHANNELS counts more."""
    if "topk-int8" not in compressions:
        os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", str(P2P_CHANNELS))


@contextlib.contextmanager
def process_group(
    device: torch.device, store: dist.Store, *, minutes: float = 30
) -> Iterator[None]:
    """The default process group: gloo for CPU tensors, NCCL for CUDA ones. Groups that are made
    later have torch's own timeouts. The caller has dropped engine and model at the end."""
    import torch
    import torch.distributed as dist

    options: dict[str, Any] = {"timeout": timedelta(minutes=minutes), "store": store}
    options |= {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")}
    store.set_timeout(options["timeout"])  # which torch only does with a store of its own
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
    try:
        yield
        # Threads of gloo that outlive the interpreter abort it.
        gc.collect()
        dist.barrier()
    finally:
        dist.destroy_process_group()
