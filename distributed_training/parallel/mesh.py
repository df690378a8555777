"""Define a process's ranks along the mesh axes, its device and its process groups.

The innermost mesh axis is tp, and the outermost is pp, so the ranks that communicate most are
usually on the same node."""

import contextlib
import gc
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distributed_training.plan.schedules import P2P_CHANNELS
from distributed_training.settings.strategies import MESH_AXES


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Rank of this process and sizes of the mesh axes."""

    world_size: int
    rank: int
    local_rank: int
    dp_replicate: int
    dp_shard: int
    cp: int = 1
    tp: int = 1
    pp: int = 1
    device_type: str  # "cuda" or "cpu"

    @property
    def dp_size(self) -> int:
        """Number of ranks along the data-parallel axes, `dp_replicate * dp_shard`."""
        return self.dp_replicate * self.dp_shard

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """Rank along the data-parallel axes. Processes with different data-parallel ranks train on
        different samples."""
        return self.rank // (self.tp * self.cp) % self.dp_size

    @property
    def pp_rank(self) -> int:
        """Rank along pp. Rank 0 has the first layers."""
        return self.rank // (self.tp * self.cp * self.dp_size)

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis, from the outermost to the innermost."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    def shares_position(self, rank: int, axes: Collection[str]) -> bool:
        """Return whether `rank` has the same position as this process along each of the axes."""
        stride = 1
        for axis, size in reversed(self.axes.items()):
            if axis in axes and rank // stride % size != self.rank // stride % size:
                return False
            stride *= size
        return True

    def build_mesh(self) -> DeviceMesh:
        """Return a DeviceMesh of all axes with more than one rank. The mesh always includes
        dp_shard, because FSDP needs this axis. FSDP also shards over cp, so cp is part of the
        mesh's dp_shard. All ranks must call this method, because it creates a communicator for each
        axis that does not span all processes."""
        mesh_axes = self.axes
        mesh_axes["dp_shard"] *= mesh_axes.pop("cp")
        mesh_axes = {
            axis: size for axis, size in mesh_axes.items() if size > 1 or axis == "dp_shard"
        }
        return init_device_mesh(
            self.device_type, tuple(mesh_axes.values()), mesh_dim_names=tuple(mesh_axes)
        )

    def new_pipeline_group(self) -> Any:
        """Create and return a communicator for this process's pipeline. It is separate from the
        mesh's communicator for pp. All ranks must call this method."""
        num_pipelines = self.world_size // self.pp
        pipelines = [
            list(range(first, self.world_size, num_pipelines)) for first in range(num_pipelines)
        ]
        group, _ = dist.new_subgroups_by_enumeration(pipelines)
        return group

    @property
    def device(self) -> torch.device:
        on_gpu = self.device_type == "cuda"
        return torch.device("cuda", self.local_rank) if on_gpu else torch.device("cpu")


def set_nccl_variables(*, has_pipeline: bool) -> None:
    """Set NCCL's environment variables for a run. Values set by the user take precedence.

    In a pipeline, NCCL uses only P2P_CHANNELS channels for point-to-point messages.
    All-to-all messages, which only other strategies send, need all channels. Buffers in a CUDA
    graph are not registered, because NCCL 2.28 may register the buffer of a large message on only
    one side. A replayed pipeline would then hang."""
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    # Copies between GPUs (private.py) need no multicast, whose setup can wait forever.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if has_pipeline:
        os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", str(P2P_CHANNELS))


@contextlib.contextmanager
def process_group(
    device: torch.device, store: dist.Store, *, timeout_s: float = 1800.0
) -> Iterator[None]:
    """Create the default process group for the `with` block. The group uses gloo for CPU tensors
    and NCCL for CUDA tensors, and has a timeout of `timeout_s` seconds. Groups created later have
    torch's default timeouts. The caller must delete the engine and the model before the block
    ends."""
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "store": store}
    options |= {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")}
    store.set_timeout(options["timeout"])  # torch sets this only for stores that it creates
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
    try:
        yield
        # Gloo's threads would abort the interpreter if they outlived it.
        gc.collect()
        dist.barrier()
    finally:
        dist.destroy_process_group()
