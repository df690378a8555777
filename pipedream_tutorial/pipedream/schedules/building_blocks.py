"""Build V-Half and V-Min: repeat the slots of one microbatch, then close the gaps (arXiv
2405.15362).

Each rank has two stages in a V-shaped schedule, as in ZB-V. Each of the rank's six operations per
microbatch takes one slot. The slots of one microbatch form a block, and each block begins six slots
after the previous block. Therefore a rank without gaps is always busy. A block defines four slots
per rank, and the two W operations use idle slots. The lifetime of activations in a block determines
how many microbatches overlap. Therefore the block alone determines the memory.

The blocks leave gaps while the pipeline fills and drains. Two rounds of moves close these gaps
without using more memory, as in the authors' code (zbv_greedy.py in
sail-sg/zero-bubble-pipeline-parallelism). First, all operations at both ends move to earlier slots.
Then the operations at the draining end move once more, with W in the free slots. The orders equal
the authors' orders, operation by operation.
"""

import math
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter

from pipedream_simple import from_words

from pipedream.schedules.ops import Orders

SLOTS = 6
F_DOWN, F_UP, I_UP, I_DOWN, W = range(5)
CHANGES = {F_DOWN: (1, 0), F_UP: (1, 0), I_UP: (0, 1), I_DOWN: (0, 1), W: (-1, -1)}
"""Changes in the number of held activations and of waiting W operations, by kind."""

Slots = list[list[list[int]]]
"""rank -> kind (F_DOWN to I_DOWN, and W in the first pass) -> slots of microbatches 0, 1, ..."""


def v_min(p: int, m: int) -> Orders:
    """Return the orders of V-Min, which holds about a third as many activations as 1F1B. A
    microbatch's operations on neighboring ranks are one slot apart."""
    pause = 0 if p % 3 else 2  # otherwise two operations of a rank would need the same slot
    block = [(r, 2 * p - 1 - r, 2 * p + pause + r, 4 * p + pause - 1 - r) for r in range(p)]
    return _repeat_block(block, m)


def v_half(p: int, m: int) -> Orders:
    """Return the orders of V-Half, which holds half as many activations as 1F1B. A microbatch's
    operations on neighboring ranks are two slots apart on the way to the last rank, and one slot
    apart on the way back."""
    delay = 3 * p + (0 if p % 2 else 3)  # slots from F_UP to I_DOWN of a rank
    block = [(2 * r, 3 * p - 2 - r, delay - 1 + 2 * r, delay + 3 * p - 2 - r) for r in range(p)]
    return _repeat_block(block, m)


def _repeat_block(block: list[tuple[int, int, int, int]], m: int) -> Orders:
    """Repeat the block `m` times. `block` contains each rank's slots for one microbatch.
    Close the gaps at both ends."""
    slots = [[[slot + SLOTS * i for i in range(m)] for slot in rank_slots] for rank_slots in block]
    for rank_slots in slots:
        rank_slots.append(sorted(slot for slot, _ in _place_w(rank_slots)))
    _move_earlier(slots)
    _compact(slots)
    for rank_slots in slots:
        rank_slots.pop()
    _move_earlier(slots)
    return from_words([_word(rank_slots) for rank_slots in slots])


def _word(slots_by_kind: list[list[int]]) -> list[str]:
    """Return a rank's operations, including W, in slot order. Operations of the rank's second
    stage, on the way up the V, have lowercase letters."""
    placed = [(slot, "FfiI"[kind]) for kind, line in enumerate(slots_by_kind) for slot in line]
    placed += [(slot, "w" if kind == I_UP else "W") for slot, kind in _place_w(slots_by_kind)]
    return [letter for _, letter in sorted(placed)]


def _place_w(slots_by_kind: list[list[int]]) -> Iterator[tuple[int, int]]:
    """For each W of a rank, yield its slot and the kind of its I. Each W uses the first free slot
    after its I. The W operations that follow I_UP are placed first."""
    taken = set(chain(*slots_by_kind))
    for kind in (I_UP, I_DOWN):
        slot = 0
        for input_slot in slots_by_kind[kind]:
            slot = max(slot, input_slot)
            while slot in taken:
                slot += 1
            taken.add(slot)
            yield slot, kind


def _move_earlier(slots: Slots) -> None:
    """Move operations to earlier free slots, in time order, if data and memory allow. The pipeline
    is full from rank 0's first I_DOWN to the last F_DOWN. Operations in this period do not move. If
    `slots` has no slots for W, operations before this period do not move either."""
    lines = [_RankSlots(rank_slots) for rank_slots in slots]
    limit = max(held for line in lines for held, _ in line.states)
    full_start = slots[0][I_DOWN][0]
    lasts = [(rank_slots[F_DOWN][-1], rank) for rank, rank_slots in enumerate(slots)]
    drain_start = next((last for last in lasts if last > (full_start, 0)), (math.inf, 0))
    fill_end = full_start if len(slots[0]) > W else 0
    moved = (op for op in _operations(slots) if op[0] < fill_end or op[:2] > drain_start)
    for slot, rank, kind, i in sorted(moved):
        rank_slots = slots[rank]
        earliest = _input_slot(slots, rank, kind, i)
        if i:
            earliest = max(earliest, rank_slots[kind][i - 1])
        if F_DOWN < kind < W:
            earliest = max(earliest, rank_slots[kind - 1][i])
        rank_slots[kind][i] = lines[rank].move(slot, 1 + earliest, limit)


def _operations(slots: Slots) -> Iterator[tuple[int, int, int, int]]:
    """Yield the slot, rank, kind and microbatch of each operation."""
    for rank, rank_slots in enumerate(slots):
        for kind, line in enumerate(rank_slots):
            for i, slot in enumerate(line):
                yield slot, rank, kind, i


def _input_slot(slots: Slots, rank: int, kind: int, i: int) -> int:
    """Return the slot in which a neighboring rank computes an operation's input. Return -1 if the
    input does not come from a neighboring rank."""
    neighbor = rank - 1 if kind in (F_DOWN, I_UP) else rank + 1
    return slots[neighbor][kind][i] if kind != W and 0 <= neighbor < len(slots) else -1


class _RankSlots:
    """Slots of one rank. W operations that have no slot in `slots_by_kind` run in free slots."""

    def __init__(self, slots_by_kind: list[list[int]]) -> None:
        self.idle_kind = None if len(slots_by_kind) > W else W
        self.kinds: list[int | None] = [None] * (1 + max(line[-1] for line in slots_by_kind))
        for kind, line in enumerate(slots_by_kind):
            for slot in line:
                self.kinds[slot] = kind
        self.states: list[tuple[int, int]] = []
        """After each slot: held activations, counted per stage, and W operations whose I has
        run."""
        self._replay(0, len(self.kinds), len(self.kinds))

    def move(self, old: int, earliest: int, limit: int) -> int:
        """Move the operation in slot `old` to the first allowed free slot, starting at `earliest`.
        A slot is allowed if the rank then never holds more than `limit` activations and each W
        comes after its I. Return the new slot, or `old` if no earlier slot is allowed."""
        kind = self.kinds[old]
        for slot in range(earliest, old):
            if self.kinds[slot] is None:
                self.kinds[old], self.kinds[slot] = None, kind
                if self._replay(slot, old, limit):
                    return slot
                self.kinds[old], self.kinds[slot] = kind, None
        return old

    def _replay(self, begin: int, changed: int, limit: int) -> bool:
        """Recompute `states` from slot `begin`. Stop after slot `changed` as soon as the counts
        equal the old counts. If more than `limit` activations are held, or if a W comes before its
        I, return False and change nothing."""
        held, waiting = self.states[begin - 1] if begin else (0, 0)
        states = []
        kinds = self.kinds
        idle_kind = self.idle_kind
        for slot in range(begin, len(kinds)):
            kind = kinds[slot]
            if kind is None and waiting:
                kind = idle_kind
            if kind is not None:
                held_change, waiting_change = CHANGES[kind]
                held += held_change
                waiting += waiting_change
            if slot >= changed and (held, waiting) == self.states[slot]:
                break
            if held > limit or waiting < 0:
                return False
            states.append((held, waiting))
        self.states[begin : begin + len(states)] = states
        return True


def _compact(slots: Slots) -> None:
    """Move every operation to the earliest slot for which its rank and its data are ready. The
    order of operations does not change."""
    free = [0] * len(slots)
    for _, rank, kind, i in sorted(_operations(slots), key=itemgetter(0)):
        begin = max(free[rank], 1 + _input_slot(slots, rank, kind, i))
        slots[rank][kind][i] = begin
        free[rank] = begin + 1
