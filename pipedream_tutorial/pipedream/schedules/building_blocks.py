"""V-Half and V-Min: one microbatch's slots, repeated, then pulled together (arXiv 2405.15362).

Two stages a rank in a V, as in ZB-V. Each of a rank's six operations of a microbatch takes one
slot, so the next microbatch's block comes 6 slots later and a rank without a gap is busy. A block
gives four slots; the two W go where the rank would idle. How long activations live in a block is
how many microbatches overlap, so the block alone decides the memory: in V-Min neighbours follow
each other after one slot, which takes about p / 3; V-Half has two slots between the first stages'
forwards and between the last ones' backwards, which takes p / 2 and idles less.

The blocks leave gaps where the pipeline fills and drains. Two passes close them within the same
memory, as the authors' code does (zbv_greedy.py of sail-sg/zero-bubble-pipeline-parallelism):
first all operations of both ends move forward, then those of the draining end once more, with W
back in whatever is left free. The orders are the authors', operation by operation.
"""

from collections import defaultdict
from collections.abc import Iterator

from pipedream_simple import from_words

from pipedream.schedules.ops import Schedule
from pipedream.schedules.orders import named

SLOTS = 6
F_DOWN, F_UP, I_UP, I_DOWN, W = range(5)
CHANGES = {F_DOWN: (1, 0), F_UP: (1, 0), I_UP: (0, 1), I_DOWN: (0, 1), W: (-1, -1), None: (0, 0)}
"""What a slot's operation adds to the activations held, and to the W that wait."""

Slots = dict[tuple[int, int, int], int]
"""(rank, F_DOWN ... W, microbatch) -> slot; without W where those take what is free."""

Line = dict[int, int]
"""A rank's: slot -> kind."""

START, END = (0, 0), (10**9, 0)
"""Moments are slot and rank."""


def v_min(p: int, m: int, *, reorder: bool = True) -> Schedule:
    """A third of 1F1B's activations: every operation is one slot after its neighbour's."""
    pause = 0 if p % 3 else 2  # else two operations of a rank would want the same slot
    block = [(r, 2 * p - 1 - r, 2 * p + pause + r, 4 * p + pause - 1 - r) for r in range(p)]
    return _scheduled("v-min", block, m, reorder)


def v_half(p: int, m: int, *, reorder: bool = True) -> Schedule:
    """Half of 1F1B's activations: two slots between neighbours wherever the way leads down."""
    late = 3 * p + (0 if p % 2 else 3)  # likewise
    block = [(2 * r, 3 * p - 2 - r, late - 1 + 2 * r, late + 3 * p - 2 - r) for r in range(p)]
    return _scheduled("v-half", block, m, reorder)


def _scheduled(
    name: str, block: list[tuple[int, int, int, int]], m: int, reorder: bool
) -> Schedule:
    """A rank's slots of microbatch 0, m times, 6 apart; with `reorder` pulled together at both
    ends."""
    slots = {
        (rank, kind, i): slot + SLOTS * i
        for rank, own in enumerate(block)
        for kind, slot in enumerate(own)
        for i in range(m)
    }
    if reorder:
        for rank, line in enumerate(_lines(slots)):
            for number, (slot, _) in enumerate(_weights(line)):
                slots[rank, W, number] = slot
        _pull(slots, m)
        _squeeze(slots)
        slots = {key: slot for key, slot in slots.items() if key[1] != W}
        _pull(slots, m)
    return named(name, from_words([_word(line) for line in _lines(slots)]))


def _lines(slots: Slots) -> list[Line]:
    lines: list[Line] = [{} for _ in range(1 + max(rank for rank, _, _ in slots))]
    for (rank, kind, _), slot in slots.items():
        lines[rank][slot] = kind
    return lines


def _word(line: Line) -> list[str]:
    """A rank's operations by slot, W included; small letters on the way up."""
    placed = [(slot, "FfiI"[kind]) for slot, kind in line.items()]
    placed += [(slot, "w" if kind == I_UP else "W") for slot, kind in _weights(line)]
    return [letter for _, letter in sorted(placed)]


def _weights(line: Line) -> Iterator[tuple[int, int]]:
    """(slot, the I that it belongs to) of each W: in the free slots, those of I_UP first."""
    waiting = {I_UP: 0, I_DOWN: 0}
    for slot in range(2 * max(line)):
        kind = line.get(slot)
        if kind in waiting:
            waiting[kind] += 1
        elif kind is None and any(waiting.values()):
            first = I_UP if waiting[I_UP] else I_DOWN
            waiting[first] -= 1
            yield slot, first


def _pull(slots: Slots, m: int) -> None:
    """Move operations to earlier free slots, where data and memory allow, in the order of time.

    In the full pipeline, from rank 0's first I_DOWN to the last F_DOWN, everything stays. So do, in
    the pass that has no slots for W, the operations before.
    """
    with_weights = (0, W, 0) in slots
    ranks = [_Rank(line, fills=not with_weights) for line in _lines(slots)]
    limit = max(held for rank in ranks for held, _ in rank.states)
    full = slots[0, I_DOWN, 0], 0
    lasts = [(slots[rank, F_DOWN, m - 1], rank) for rank in range(len(ranks))]
    drains = next((last for last in lasts if last > full), END)
    fills = full if with_weights else START
    for slot, rank, kind, i in _by_time(slots):
        if fills <= (slot, rank) <= drains:
            continue
        waits = [_source(slots, rank, kind, i)]
        if i:
            waits.append(slots[rank, kind, i - 1])
        if F_DOWN < kind < W:
            waits.append(slots[rank, kind - 1, i])
        slots[rank, kind, i] = ranks[rank].move(slot, 1 + max(waits), limit)


def _by_time(slots: Slots) -> list[tuple[int, int, int, int]]:
    """(slot, rank, kind, microbatch) of all."""
    return sorted((slot, *key) for key, slot in slots.items())


def _source(slots: Slots, rank: int, kind: int, i: int) -> int:
    """The slot in which a neighbouring rank gives what an operation takes in; -1 for none."""
    neighbour = rank - 1 if kind in (F_DOWN, I_UP) else rank + 1
    return -1 if kind == W else slots.get((neighbour, kind, i), -1)


class _Rank:
    """One rank's slots, and what it holds after each."""

    def __init__(self, line: Line, fills: bool) -> None:
        """`fills`: W has no slots and runs in those that are free."""
        self.kinds = [line.get(slot) for slot in range(1 + max(line))]
        self.fills = fills
        self.states: list[tuple[int, int]] = []
        """After each slot: stages' activations, and W whose I is done."""
        self._replay(0, len(self.kinds), len(self.kinds))

    def move(self, old: int, earliest: int, limit: int) -> int:
        """The operation's new slot: the first that is free where no more than `limit` are held at
        any time, and each W comes after its I."""
        kind = self.kinds[old]
        for slot in range(earliest, old):
            if self.kinds[slot] is None:
                self.kinds[old], self.kinds[slot] = None, kind
                if self._replay(slot, old, limit):
                    return slot
                self.kinds[old], self.kinds[slot] = kind, None
        return old

    def _replay(self, begin: int, changed: int, limit: int) -> bool:
        """Count again from slot `begin` until, from slot `changed` on, it is as it was. False, and
        nothing changed, where that cannot be."""
        held, waiting = self.states[begin - 1] if begin else (0, 0)
        states = []
        for slot in range(begin, len(self.kinds)):
            kind = self.kinds[slot]
            if kind is None and waiting and self.fills:
                kind = W
            by_held, by_waiting = CHANGES[kind]
            held += by_held
            waiting += by_waiting
            if held > limit or waiting < 0:
                return False
            if slot >= changed and (held, waiting) == self.states[slot]:
                break
            states.append((held, waiting))
        self.states[begin : begin + len(states)] = states
        return True


def _squeeze(slots: Slots) -> None:
    """The same orders, every operation as soon as its rank and its data are ready."""
    free: dict[int, int] = defaultdict(int)
    for _, rank, kind, i in _by_time(slots):
        begin = max(free[rank], 1 + _source(slots, rank, kind, i))
        slots[rank, kind, i] = begin
        free[rank] = begin + 1
