"""Count the bytes that a training step sends to other processes, and check the formulas.

    python results/lab/traffic.py results/records/cpu-traffic/traffic.json

The program trains a small GPT-2 in bf16 on CPU processes over gloo for every case in
results/plans/cpu-traffic.json. It ignores the first two steps, because DDP rearranges its buckets
in the second. In the third step, it counts every dispatched torch.distributed operation. It ignores
tensors of at most 8 bytes (gradient norm, overflow flags). The exit code is 1 if a count differs
from its formula.
"""

import contextlib
import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import checkout
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from distributed_training.models.gpt2 import SIZES, gpt2_size
from distributed_training.parallel.mesh import Topology
from distributed_training.predict.mechanism import PipelineRank, sent_bytes
from distributed_training.predict.traffic import sent_by_operation
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, load_json
from distributed_training.start.ranks import current_process, run_ranks
from results.lab.harness import Run, each_accepted_run, open_group

PLAN = load_json(ROOT / "results/plans/cpu-traffic.json", "plan")
# Suffix of the cases with more blocks. The difference from the same case without the suffix is the
# traffic of the additional blocks.
DEEPER = ", 12 blocks"
BLOCK_SENDS = ("in all", "by formula")
SMALL_BYTES = 8
# Operation -> (kind, index of the counted argument, whether this argument is one process's shard)
COUNTED = {
    "c10d.allreduce_": ("all_reduce", 0, False),
    "c10d._allgather_base_": ("all_gather", 0, False),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, False),
    "c10d.broadcast_": ("broadcast", 0, False),
    "c10d.alltoall_base_": ("all_to_all", 1, False),
    "distributed_training.all_to_all": ("all_to_all", 0, False),
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

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
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


def config_of(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return all CONFIG values for a case. If the case changes the DeepSpeed configuration, write
    the changed JSON to `folder`."""
    values = {**PLAN["common"], **case}
    changes = values.pop("zero_optimization", None)
    if changes is not None:
        document = load_json(ROOT / f"configs/ds_config_{values['strategy']}.json", "JSON")
        document["zero_optimization"].update(changes)
        file = folder / f"{values['strategy']}-{len(changes)}-changes.json"
        file.write_text(json.dumps(document))
        values["deepspeed_config"] = str(file)
    return values


def count_step(run: Run) -> dict[str, Any]:
    """Count the bytes that this process sends in the third step. If processes do not exchange data
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
            counts[name] /= num_steps  # type: ignore[assignment]
    return {
        "rank": topology.rank,
        "counted": {key: dict(value) for key, value in sorted(traffic.counted.items())},
        "formula_sent_bytes": sent_by_operation(PipelineRank(run.plan, topology.pp_rank)),
    }


def count_cases(out: Path) -> None:
    """Count the bytes sent in each of the plan's cases for this number of processes. Rank 0 writes
    the results to `out`. All cases run in one process group."""
    SIZES.update({name: gpt2_size(**shape) for name, shape in PLAN["models"].items()})
    results = {}
    with open_group() as group:
        count = group.process.world_size
        cases = PLAN["cases"][str(count)]
        runs = {name: config_of(values, group.folder) for name, values in cases.items()}
        for name, ranks in each_accepted_run(group, runs, count_step):
            results[name] = {"config": cases[name], "processes": count, "ranks": ranks}
        if group.process.rank == 0:
            out.write_text(json.dumps(results))


def table_row(case: dict[str, Any]) -> dict[str, float]:
    """Return the row that describes a case. Its numbers are for the process that sends the most
    bytes."""
    rows = []
    for rank in case["ranks"]:
        row = {"over tp": 0.0, "over dp": 0.0, "over pp": 0.0}
        for key, value in rank["counted"].items():
            row[f"over {key[:2]}"] += value["sent_bytes"]
        row["in all"] = sum(row.values())
        rows.append({**row, "by formula": sum(rank["formula_sent_bytes"].values())})
    return max(rows, key=lambda row: row["in all"])


def differences(cases: dict[str, Any]) -> list[str]:
    """Compare the counts of each rank with the formulas. Return one line for each rank whose counts
    differ."""
    lines = []
    for name, case in cases.items():
        for rank in case["ranks"]:
            counted = {key: value["sent_bytes"] for key, value in rank["counted"].items()}
            if counted != (formula := rank["formula_sent_bytes"]):
                lines.append(f"{name}, rank {rank['rank']}: counted {counted}, formula {formula}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Start the processes, collect their results and write the record."""
    parser = checkout.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args(argv).out
    if current_process() is not None:
        count_cases(out)
        return 0
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in PLAN["cases"]:
            file = Path(folder) / f"{count}.json"
            command = [str(Path(__file__)), str(file)]
            if run_ranks(command, int(count)).exit_code != 0:
                raise UserError(f"measuring {count} processes failed", fix="see the output above")
            cases.update(json.loads(file.read_text()))
    rows = {name: table_row(case) for name, case in cases.items()}
    deeper = {name.removesuffix(DEEPER): rows.pop(name) for name in cases if DEEPER in name}
    twelve, eight = (PLAN["models"][f"{name}-blocks"]["num_layers"] for name in ("twelve", "eight"))
    record = {
        "what": "one training step on CPU processes over gloo: bytes given to each operation of "
        "torch.distributed, and the bytes that a process sends for it in a ring",
        **provenance("python results/lab/traffic.py OUT.json"),
        "models": PLAN["models"],
        "base": PLAN["common"],
        "bytes_sent": rows,
        "bytes_sent_for_a_block": {
            name: {key: (row[key] - rows[name][key]) / (twelve - eight) for key in BLOCK_SENDS}
            for name, row in deeper.items()
        },
        "cases": cases,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, record)
    mismatches = differences(cases)
    print(
        "\n".join(mismatches)
        or f"Wrote {out}. All counts of {len(cases)} cases equal their formulas."
    )
    return int(bool(mismatches))


if __name__ == "__main__":
    checkout.run(main)
