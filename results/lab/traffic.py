"""Bytes that one training step hands to other processes, counted, beside what the formulas say.

    python results/lab/traffic.py results/records/cpu-traffic/traffic.json

Trains a small GPT-2 in bf16 on CPU processes over gloo under every case of
results/plans/cpu-traffic.json: two steps that are not looked at (DDP rearranges its buckets in the
second), then one in which every operation of torch.distributed is counted as PyTorch dispatches it.
Tensors of at most 8 bytes (gradient norm, overflow flags) are left out. Exit code 1 where a
count and its formula differ.
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
from distributed_training.predict.traffic import Formulas, sent_bytes
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, load_json
from distributed_training.start.ranks import current_process, run_ranks
from distributed_training.tools.harness import Run, every_run, open_group

PLAN = load_json(ROOT / "results/plans/cpu-traffic.json", "plan")
DEEPER = ", 12 blocks"  # ends the name of a case's second row: the difference is what blocks send
BLOCK_SENDS = ("in all", "by formula")
SMALL_BYTES = 8
# Operation -> (kind, its argument that is counted, whether the argument is one process's part).
COUNTED = {
    "c10d.allreduce_": ("all_reduce", 0, False),
    "c10d._allgather_base_": ("all_gather", 0, False),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, False),
    "c10d.broadcast_": ("broadcast", 0, False),
    "c10d.alltoall_base_": ("all_to_all", 1, False),
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
        self.counted: dict[str, Counter[str]] = {}
        """ "axis kind" -> calls, tensor_bytes, sent_bytes."""

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
        # c10d's operations carry their group as an object, functional ones its name, last.
        if isinstance(args[-1], str):
            group = dist.distributed_c10d._resolve_process_group(args[-1])
        else:
            boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
        members = dist.get_process_group_ranks(group)
        if kind == "send":
            members = [self.topology.rank, members[args[2]]]
        size = _num_bytes(args[place]) * (len(members) if is_part else 1)
        if size <= SMALL_BYTES:
            return
        key = f"{self._axis(members)} {kind}"
        sent = sent_bytes(kind, size, len(members))
        self.counted.setdefault(key, Counter()).update(calls=1, tensor_bytes=size, sent_bytes=sent)

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


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """DDP's hooks start a second operation when the first is done, on gloo's thread, unless it is
    done before they ask."""

    def waiting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **words: Any) -> Any:
            started = operation(*args, **words)
            if started is not None:
                started.get_future().wait()
            return started

        return start

    before = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}
    for name, operation in before.items():
        setattr(dist, name, waiting(operation))
    try:
        yield
    finally:
        for name, operation in before.items():
            setattr(dist, name, operation)


def _num_bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_num_bytes, tensors))


def config_of(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All CONFIG values of a case; a JSON of its own is written to `folder`."""
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
    """What this process handed over in the third step, or on average in as many as lie between two
    exchanges. Collective."""
    topology = run.topology
    for step in range(2):
        run.engine.train_step(run.batch(step))
    every = run.plan.steps_between_exchanges or 1
    with Traffic(topology) as traffic, _one_thread():
        for step in range(2, 2 + every):
            run.engine.train_step(run.batch(step))
    for counts in traffic.counted.values() if every > 1 else ():
        for what in ("tensor_bytes", "sent_bytes"):
            counts[what] /= every  # type: ignore[assignment]
    return {
        "rank": topology.rank,
        "counted": {key: dict(value) for key, value in sorted(traffic.counted.items())},
        "formula_sent_bytes": Formulas(run.plan, topology.pp_rank).sent(),
    }


def work(out: Path) -> None:
    """All cases of this number of processes, in one process group."""
    SIZES.update({name: gpt2_size(**shape) for name, shape in PLAN["models"].items()})
    found = {}
    with open_group() as group:
        count = group.process.world_size
        cases = PLAN["cases"][str(count)]
        runs = {name: config_of(values, group.folder) for name, values in cases.items()}
        for name, ranks in every_run(group, runs, count_step):
            found[name] = {"config": cases[name], "processes": count, "ranks": ranks}
        if group.process.rank == 0:
            out.write_text(json.dumps(found))


def table_row(case: dict[str, Any]) -> dict[str, float]:
    """The row of the process that sends most."""
    rows = []
    for rank in case["ranks"]:
        row = {"over tp": 0.0, "over dp": 0.0, "over pp": 0.0}
        for key, value in rank["counted"].items():
            row[f"over {key[:2]}"] += value["sent_bytes"]
        row["in all"] = sum(row.values())
        rows.append({**row, "by formula": sum(rank["formula_sent_bytes"].values())})
    return max(rows, key=lambda row: row["in all"])


def differences(cases: dict[str, Any]) -> list[str]:
    """Where a count is not what its formula says."""
    found = []
    for name, case in cases.items():
        for rank in case["ranks"]:
            counted = {key: value["sent_bytes"] for key, value in rank["counted"].items()}
            if counted != (formula := rank["formula_sent_bytes"]):
                found.append(f"{name}, rank {rank['rank']}: counted {counted}, formula {formula}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Start the processes, put their parts together, write the record."""
    parser = checkout.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args(argv).out
    if current_process() is not None:
        work(out)
        return 0
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in PLAN["cases"]:
            part = Path(folder) / f"{count}.json"
            command = [str(Path(__file__)), str(part)]
            if run_ranks(command, count).exit_code != 0:
                raise UserError(
                    f"measuring {count} processes failed", fix="see what is printed above"
                )
            cases.update(json.loads(part.read_text()))
    rows = {name: table_row(case) for name, case in cases.items()}
    deeper = {name.removesuffix(DEEPER): rows.pop(name) for name in cases if DEEPER in name}
    twelve, eight = (PLAN["models"][f"{name}-blocks"]["num_layers"] for name in ("twelve", "eight"))
    record = {
        "what": "one training step on CPU processes over gloo: bytes given to each operation of "
        "torch.distributed, and what a process sends for them in a ring",
        **provenance("python results/lab/traffic.py OUT.json"),
        "models": PLAN["models"],
        "base": PLAN["common"],
        "bytes_sent": rows,
        "bytes_sent_for_a_block": {
            name: {what: (row[what] - rows[name][what]) / (twelve - eight) for what in BLOCK_SENDS}
            for name, row in deeper.items()
        },
        "cases": cases,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, record)
    wrong = differences(cases)
    print("\n".join(wrong) or f"{len(cases)} cases, every count as its formula says; wrote {out}")
    return int(bool(wrong))


if __name__ == "__main__":
    checkout.run(main)
