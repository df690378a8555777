"""Define the parts of a schedule: operations, and their order on every rank."""

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import pipedream_simple as simple

from pipedream.errors import UserError


class Op(NamedTuple):
    """Operation of pipedream_simple.py, with named fields. Its text follows torch: 2F0 is F of
    microbatch 0 on stage 2."""

    kind: str
    stage: int
    microbatch: int

    @property
    def parts(self) -> tuple["Op", ...]:
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Pair(NamedTuple):
    """Forward and backward pass that one rank runs at the same time (DualPipe)."""

    forward: Op
    backward: Op

    @property
    def parts(self) -> tuple[Op, ...]:
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Item = Op | Pair

Orders = Sequence[Sequence[Item | simple.Op]]
"""Operations by rank, from first to last. An operation may be a tuple of pipedream_simple.py."""


def item_of(ops: Sequence[Op]) -> Item:
    """Return the only operation in `ops`, or a pair if there are two operations."""
    return Pair(*ops) if len(ops) == 2 else ops[0]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Order of operations for every rank. Stages are numbered from 0 in the order of the forward
    pass."""

    name: str
    orders: tuple[tuple[Item, ...], ...]  # by rank: operations in the order in which they run

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @cached_property
    def num_stages(self) -> int:
        return len(self.ops_by_stage)

    @property
    def stages_per_rank(self) -> int:
        return max(1, self.num_stages // self.num_ranks)

    @cached_property
    def flat(self) -> list[list[Op]]:
        """Orders in which each pair is replaced with its two operations."""
        return [
            [op for item in order for op in ((item,) if isinstance(item, Op) else item)]
            for order in self.orders
        ]

    @cached_property
    def ops_by_stage(self) -> dict[int, list[Op]]:
        """Map each stage to its operations, in the order of its rank."""
        operations: dict[int, list[Op]] = defaultdict(list)
        for op in self.ops():
            operations[op[1]].append(op)
        return dict(operations)

    @cached_property
    def microbatches_of(self) -> dict[tuple[str, int], set[int]]:
        """Map from (kind, stage) to the microbatches for which the stage runs this kind of
        operation."""
        return {
            (kind, stage): {i for other, _, i in ops if other == kind}
            for stage, ops in self.ops_by_stage.items()
            for kind in {kind for kind, _, _ in ops}
        }

    @cached_property
    def num_microbatches(self) -> int:
        return len(set[int]().union(*self.microbatches_of.values()))

    @property
    def splits_backward(self) -> bool:
        """True if some backward passes are split into I and W."""
        return any(kind == "W" for kind, _ in self.microbatches_of)

    def ops(self) -> Iterable[Op]:
        """Return all operations, including the operations in pairs."""
        return chain(*self.flat)

    def stages_by_rank(self) -> list[list[int]]:
        """Return each rank's stages, sorted."""
        return [sorted(set(map(itemgetter(1), order))) for order in self.flat]

    def rank_by_op(self) -> dict[Op, int]:
        """Map each operation to its rank."""
        return {op: rank for rank, order in enumerate(self.flat) for op in order}

    def __contains__(self, op: Op) -> bool:
        return op.microbatch in self.microbatches_of.get(op[:2], ())

    def needs(self, op: Op) -> list[Op]:
        """Return the operations whose results this operation needs, including operations of the
        same stage."""
        kind, stage, i = op
        if kind == "F":
            return [Op("F", stage - 1, i)] if stage else []
        if kind == "W":
            return [Op("I", stage, i)]
        needs = [Op("F", stage, i)]
        if stage + 1 < self.num_stages:
            next_op = Op("I", stage + 1, i)
            needs.append(next_op if next_op in self else next_op._replace(kind="B"))
        return needs


def find_input_ops(schedule: Schedule) -> dict[Op, Op]:
    """Map each operation to the operation that computes its input on another stage. Operations
    without such an input are omitted."""
    pairs = ((op, need) for op in schedule.ops() for need in schedule.needs(op))
    return {op: need for op, need in pairs if need.stage != op.stage}


def transfers(schedule: Schedule) -> list[tuple[Op, Op]]:
    """For each result that is sent to another rank, return the sending and the receiving
    operation."""
    ranks = schedule.rank_by_op()
    return [(a, b) for b, a in find_input_ops(schedule).items() if ranks[a] != ranks[b]]


def repeat(schedule: Schedule, num_batches: int) -> Schedule:
    """Return a schedule that repeats a batch of m microbatches. The microbatches of batch k are
    numbered from `k * m`. There is no barrier between batches. A rank starts its next batch as soon
    as its order allows."""
    m = schedule.num_microbatches

    def shifted(item: Item, by: int) -> Item:
        return item_of([Op(kind, stage, i + by) for kind, stage, i in item.parts])

    orders = tuple(
        order + tuple(shifted(item, k * m) for k in range(1, num_batches) for item in order)
        for order in schedule.orders
    )
    return replace(schedule, orders=orders)


def save_csv(schedule: Schedule, path: Path) -> None:
    """Write a CSV file for torch.distributed.pipelining, with one line per rank and one operation
    per cell."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([map(str, order) for order in schedule.orders])


def load_csv(path: Path) -> Schedule:
    """Read orders from a CSV file. Empty cells, which are bubbles in torch, are skipped. Raises
    UserError with the line and the cell if a cell is not an operation. Also raises UserError if
    stages are not numbered 0, 1, ... or if one stage is on several ranks."""
    if not path.is_file():
        raise UserError(f"{path} is not a file", "give the path of a schedule's CSV file")
    orders = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            for number, row in enumerate(csv.reader(file), 1):
                where = f"{path}, line {number}"
                orders.append(tuple(_parse(cell.strip(), where) for cell in row if cell.strip()))
    except (UnicodeDecodeError, csv.Error):
        raise UserError(f"{path} is not a CSV file", "use one written by --csv or torch") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "give a path that can be read") from None
    while orders and not orders[-1]:  # blank lines at the end; other blank lines are idle ranks
        orders.pop()
    schedule = build_from_orders(path.stem, orders)
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(schedule.flat):
        for _, stage, _ in order:
            if rank_of.setdefault(stage, rank) != rank:
                raise UserError(
                    f"{path} runs stage {stage} on ranks {rank_of[stage]} and {rank}",
                    "write all operations of a stage in one line",
                )
    if not rank_of:
        raise UserError(f"{path} has no operations", "write cells such as 0F0 and 0B0")
    for missing, stage in enumerate(sorted(rank_of)):
        if stage != missing:
            raise UserError(
                f"{path} has a stage {max(rank_of)} but no stage {missing}",
                "number the stages from 0 without a gap",
            )
    return schedule


def _parse(cell: str, where: str) -> Item:
    pair = re.fullmatch(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B", cell)
    ops = []
    for text in pair.groups() if pair else (cell,):
        op = re.fullmatch(r"(\d{1,9})([FBIW])(\d{1,9})", text, re.ASCII)
        if op is None:
            raise UserError(
                f"{where}: {text[:40]!r} is not an operation", "write it as 2F0, 2B0, 2I0 or 2W0"
            )
        ops.append(Op(op[2], int(op[1]), int(op[3])))
    return item_of(ops)


def build_from_orders(name: str, lines: Orders) -> Schedule:
    """Build a schedule from each rank's operations. Tuples are converted to Op."""
    to_op = partial(tuple.__new__, Op)  # half the time of Op(*item)
    orders = [tuple(i if type(i) is Pair else to_op(i) for i in line) for line in lines]
    return Schedule(name=name, orders=tuple(orders))
