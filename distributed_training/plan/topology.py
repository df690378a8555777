"""Which process is which: ranks, the axes of the mesh, the device, the process group.

    world_size == pp * dp_replicate * dp_shard * tp

That is checked here and never rounded. tp varies fastest with the rank and pp slowest: what
communicates most lies closest together, inside a node. torch is imported only by the functions
that need a process group.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from distributed_training.models import find_model
from distributed_training.plan.schedules import schedule_of
from distributed_training.plan.suggestions import advise, larger_model, split_mesh
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import MESH_AXES, Strategy

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


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
    device_type: str
    """"cuda" or "cpu"."""

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
        Collective: makes communicators for each axis that does not span all processes.
        """
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


def fill_mesh(strategy: Strategy, world_size: int, config: RunConfig) -> dict[str, int]:
    """The strategy's mesh with the axis that is -1 filled in, for `world_size` processes.

    Raises UserError when the product is not `world_size`, or CONFIG's model cannot be divided so.
    """
    axes = dict(strategy.mesh)
    fixed, open_axis = split_mesh(strategy)
    if any(n < 1 and axis != open_axis for axis, n in axes.items()):
        what = f"mesh {show_axes(axes)} is not accepted; at most one axis may be -1"
        raise UserError(what, fix="give the others whole numbers of 1 or more")
    if open_axis and world_size % fixed == 0:
        axes[open_axis] = world_size // fixed
    if math.prod(axes.values()) != world_size:
        what = f"mesh {show_axes(axes)} does not make {world_size} processes"
        advice = advise(strategy, world_size, config, numbers_first=True)
        source = os.path.relpath(strategy.source)
        raise UserError(what, fix=f"{advice} (the mesh is that of {source})")
    size, pp, tp = find_model(config.model).size, axes["pp"], axes["tp"]
    if size.num_heads % tp:
        what = f"tp={tp} does not divide num_heads={size.num_heads} of {config.model}"
        raise UserError(what, "attention is split by heads", advise(strategy, world_size, config))
    each = schedule_of(config, strategy, pp).stages_per_rank
    if pp * each > size.num_layers:
        what = f"pp={pp} needs {pp * each} stages but {config.model} has {size.num_layers} blocks"
        larger = larger_model(config, strategy, axes)
        advice = advise(strategy, world_size, config, also=larger)
        raise UserError(what, f"its pipeline schedule has {each} a process", advice)
    return axes


def show_axes(axes: Mapping[str, int]) -> str:
    """ "dp_shard 2 x tp 2"; axes of size 1 are left out unless all are."""
    shown = {axis: size for axis, size in axes.items() if size != 1}
    return " x ".join(f"{axis} {size}" for axis, size in (shown or dict(axes)).items())


@contextlib.contextmanager
def process_group(
    device: torch.device, *, timeout: timedelta = COLLECTIVE_TIMEOUT
) -> Iterator[None]:
    """The default process group: gloo for CPU tensors, NCCL for CUDA ones. Groups that are made
    later have torch's own timeouts. The caller has dropped engine and model at the end.
    """
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    try:
        yield
        # Threads of gloo that outlive the interpreter abort it.
        gc.collect()
        dist.barrier()
    finally:
        dist.destroy_process_group()
