"""Count the bytes that a training step sends to other processes. The processes of the shared test
pool call `count_bytes`."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from distributed_training.engines import native
from distributed_training.parallel.agree import gather
from distributed_training.parallel.mesh import Topology
from distributed_training.predict.mechanism import PipelineRank, sent_bytes
from distributed_training.predict.traffic import sent_by_operation
from results.lab.harness import Run
from tests.parity.cases import all_cases

SMALL_BYTES = 8  # gradient norms, overflow flags
# Operation -> (kind, index of the counted argument, whether this argument is one process's shard)
COUNTED = {
    "c10d.allreduce_": ("all_reduce", 0, False),
    "c10d._allgather_base_": ("all_gather", 0, False),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, False),
    "c10d.broadcast_": ("broadcast", 0, False),
    "c10d.alltoall_base_": ("all_to_all", 1, False),
    "distributed_training.all_to_all": ("all_to_all", 0, False),
    "distributed_training.gather_tokens": ("all_gather", 0, True),
    "distributed_training.sum_tokens": ("reduce_scatter", 0, False),
    "c10d.send": ("send", 0, False),
    "_c10d_functional.all_reduce": ("all_reduce", 0, False),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0, True),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0, False),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0, False),
}
# Receives, waits, and autograd markers
NOT_COUNTED = {
    "c10d.recv_", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd",
}  # fmt: skip


class Traffic(TorchDispatchMode):
    """Dispatch mode that counts the tensors passed to torch.distributed on this thread."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology
        # "axis kind" -> counts of calls, tensor_bytes and sent_bytes
        self.counted: dict[str, Counter[str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor splits the operation and dispatches its parts here.
        namespace = getattr(func, "namespace", "")  # Higher-order operators have no namespace.
        name = f"{namespace}.{func.__name__.split('.')[0]}"
        if name in COUNTED:
            self._count(name, args)
        elif "c10d" in namespace and name not in NOT_COUNTED:
            raise NotImplementedError(f"{name} is unknown: add it to COUNTED or NOT_COUNTED")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        kind, index, is_shard = COUNTED[name]
        # c10d operations take the group as an object. Functional ones take its name as the last
        # argument.
        if isinstance(args[-1], str):
            group = dist.distributed_c10d._resolve_process_group(args[-1])
        else:
            boxed = next(value for value in args if isinstance(value, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
        members = dist.get_process_group_ranks(group)
        if kind == "send":
            members = [self.topology.rank, members[args[2]]]
        size = _num_bytes(args[index]) * (len(members) if is_shard else 1)
        if size <= SMALL_BYTES:
            return
        axis = self._axis(members)
        if self.topology.cp > 1:
            # FSDP shards over dp_shard and cp together, and DDP averages over dp_replicate and cp.
            # Only attention uses all-to-alls.
            axis = {"all_to_all": "cp", "all_reduce": "dp_replicate"}.get(kind, axis)
        key = f"{axis} {kind}"
        sent = sent_bytes(kind, size, len(members))
        self.counted.setdefault(key, Counter()).update(calls=1, tensor_bytes=size, sent_bytes=sent)

    def _axis(self, members: list[int]) -> str:
        """Return the mesh axes along which the ranks of a group differ."""
        positions = [dataclasses.replace(self.topology, rank=rank) for rank in members]
        shards = self.topology.dp_shard
        coordinates = {
            "pp": {p.pp_rank for p in positions},
            "dp_replicate": {p.dp_rank // shards for p in positions},
            "dp_shard": {(p.dp_rank % shards, p.rank // p.tp % p.cp) for p in positions},
            "tp": {p.tp_rank for p in positions},
        }
        return "+".join(axis for axis, values in coordinates.items() if len(values) > 1)


@contextlib.contextmanager
def _synchronous_operations() -> Iterator[None]:
    """Complete each operation in the `with` block before its caller continues. Otherwise, DDP's
    hooks would start their second operation on gloo's thread, where the operation is not
    counted."""

    def synchronous(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = operation(*args, **kwargs)
            if work is not None:
                work.get_future().wait()
            return work

        return call

    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}
    for name, operation in originals.items():
        setattr(dist, name, synchronous(operation))
    try:
        yield
    finally:
        for name, operation in originals.items():
            setattr(dist, name, operation)


def _num_bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_num_bytes, tensors))


def count_step(run: Run) -> dict[str, Any]:
    """Count the bytes that this process sends in the third step, because DDP rearranges its buckets
    in the second. If processes do not exchange data
    in every step, count the steps of one interval between exchanges and return the average per
    step. All ranks must call this function."""
    topology = run.topology
    for step in range(2):
        run.engine.train_step(run.batch(step))
    num_steps = run.plan.steps_between_exchanges or 1
    with Traffic(topology) as traffic, _synchronous_operations():
        for step in range(2, 2 + num_steps):
            run.engine.train_step(run.batch(step))
    for counts in traffic.counted.values() if num_steps > 1 else ():
        for name in ("tensor_bytes", "sent_bytes"):
            counts[name] /= num_steps
    return {
        "rank": topology.rank,
        "counted": {key: dict(value) for key, value in sorted(traffic.counted.items())},
        "formula_sent_bytes": sent_by_operation(PipelineRank(run.plan, topology.pp_rank)),
    }


def count_bytes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return, for each case, the average number of bytes that each rank sent per step, and the
    number that the formulas give."""
    # The formulas count the buffers of expert parallelism at their first size.
    native.enlarge_buffers = lambda exchanges: False
    return all_cases(arguments, lambda run: gather(count_step(run)))
