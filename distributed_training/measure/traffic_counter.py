"""Counts what a process hands to torch.distributed, as PyTorch dispatches it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from distributed_training.parallel.private import TorchDispatchMode, resolve_process_group
from distributed_training.plan.topology import Topology
from distributed_training.plan.traffic import sent_bytes

SMALL_BYTES = 8
# Operation -> (kind, its argument that is counted, whether the argument is one process's part).
COUNTED = {
    "c10d.allreduce_": ("all_reduce", 0, False),
    "c10d._allgather_base_": ("all_gather", 0, False),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, False),
    "c10d.broadcast_": ("broadcast", 0, False),
    "c10d.send": ("send", 0, False),
    "_c10d_functional.all_reduce": ("all_reduce", 0, False),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0, True),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0, False),
}
# The other end of a send; waiting, and marks for autograd.
PASSED_OVER = {
    "c10d.recv_", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd",
}  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts what is handed to torch.distributed while it is entered, on this thread."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology
        self.large: dict[str, Counter[str]] = {}
        """ "axis kind" -> calls, tensor_bytes, sent_bytes."""
        self.small: Counter[str] = Counter()
        """ "axis kind" -> calls."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if DTensor in types:
            return NotImplemented  # DTensor takes the operation apart and comes here again
        namespace = getattr(func, "namespace", "")  # operators of higher order have none
        name = f"{namespace}.{func.__name__.split('.')[0]}"
        if name in COUNTED:
            self._count(name, args)
        elif "c10d" in namespace and name not in PASSED_OVER:
            raise NotImplementedError(f"{name} is not known here: add it to COUNTED")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        kind, place, is_part = COUNTED[name]
        members = dist.get_process_group_ranks(_group_of(args))
        if kind == "send":
            members = [self.topology.rank, members[args[2]]]
        size = _num_bytes(args[place]) * (len(members) if is_part else 1)
        key = f"{self._axis(members)} {kind}"
        if size <= SMALL_BYTES:
            self.small[key] += 1
            return
        sent = sent_bytes(kind, size, len(members))
        self.large.setdefault(key, Counter()).update(calls=1, tensor_bytes=size, sent_bytes=sent)

    def _axis(self, members: list[int]) -> str:
        """The axes along which these ranks differ."""
        places = [dataclasses.replace(self.topology, rank=rank) for rank in members]
        shards = self.topology.dp_shard
        coordinates = {
            "pp": {p.pp_rank for p in places},
            "dp_replicate": {p.dp_rank // shards for p in places},
            "dp_shard": {p.dp_rank % shards for p in places},
            "tp": {p.tp_rank for p in places},
        }
        return "+".join(axis for axis, values in coordinates.items() if len(values) > 1)


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """c10d's operations carry their group as an object, functional ones its name, last."""
    if isinstance(args[-1], str):
        return resolve_process_group(args[-1])
    return dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))


def _num_bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_num_bytes, tensors))
