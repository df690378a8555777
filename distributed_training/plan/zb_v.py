"""ZB-V's order for given durations, as its authors build it (arXiv 2401.10241). No torch import.

Forward passes and gradients of inputs follow a pattern, and gradients of weights fill the time for
which a process would otherwise wait. The orders are those of zbv.py in
github.com/sail-sg/zero-bubble-pipeline-parallelism, operation by operation."""

import functools
import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# Which process gives a step its input: the one before, or the one after. Small letters are steps on
# a process's second stage, on the way back up the V.
GIVEN_BY = {"F": -1, "f": 1, "i": -1, "I": 1}


@dataclass(slots=True)
class _Place:
    """One process of the V, and what it has run so far."""

    clock: int = 0
    idle: int = 0  # since its first forward pass
    held: int = 0  # activations, of one stage each
    word: list[str] = field(default_factory=list)
    late: deque[str] = field(default_factory=deque)  # gradients of weights that can be run
    ends: dict[str, list[int]] = field(default_factory=lambda: {step: [] for step in GIVEN_BY})

    def done(self, step: str) -> int:
        return len(self.ends[step])


class _Filling:
    """p processes in a V that are given their steps one by one."""

    def __init__(self, p: int, lasts: dict[str, int], allowed: Sequence[int]) -> None:
        """`lasts`: of F, I, W and a message, for one stage. `allowed`: how much longer than the
        others each process may idle before it runs the gradient of a weight."""
        self.places = [_Place() for _ in range(p)]
        self.lasts = lasts
        self.allowed = allowed
        self.most_idle = 0

    def arrival(self, rank: int, step: str) -> int:
        """When the input of the step's next micro-batch comes from another process, or 0."""
        source = rank + GIVEN_BY[step]
        if not 0 <= source < len(self.places):
            return 0
        number = self.places[rank].done(step)
        return self.places[source].ends[step][number] + self.lasts["message"]

    def run(self, rank: int, step: str, arrival: int) -> None:
        place = self.places[rank]
        start = max(place.clock, arrival)
        if place.ends["F"]:
            place.idle += start - place.clock
            self.most_idle = max(self.most_idle, place.idle)
        place.clock = start + self.lasts[step.upper()]
        place.ends[step].append(place.clock)
        place.word.append(step)
        if step in "Ff":
            place.held += 1
        else:
            place.late.append("w" if step == "i" else "W")

    def run_weights(self, place: _Place) -> None:
        place.held -= 1
        place.clock += self.lasts["W"]
        place.word.append(place.late.popleft())

    def run_after_weights(self, rank: int, step: str, *, one_more: bool) -> None:
        """Fill the time until the step's input arrives; with `one_more`, overfill it rather than
        idle longer than others."""
        place = self.places[rank]
        arrival = self.arrival(rank, step)
        while place.late and arrival >= place.clock + self.lasts["W"]:
            self.run_weights(place)
        spare = max(self.most_idle, self.allowed[rank]) - place.idle
        if one_more and place.late and arrival - place.clock > spare:
            self.run_weights(place)
        self.run(rank, step, arrival)

    def fill_pipeline(self, m: int) -> None:
        """Run forward passes until each process has a gradient to go on with."""
        p = len(self.places)
        for rank in range(p):
            self.run(rank, "F", self.arrival(rank, "F"))
        for rank in reversed(range(p)):
            place = self.places[rank]
            arrival = self.arrival(rank, "f")
            while (
                place.held + 2 * (rank + 1) <= 2 * p
                and place.clock + self.lasts["F"] <= arrival
                and place.done("F") < m
            ):
                for other in range(rank + 1):
                    self.run(other, "F", self.arrival(other, "F"))
            self.run(rank, "f", arrival)
        steps = itertools.cycle("Ff")
        for rank in range(1, p):
            before, place = self.places[rank - 1 : rank + 1]
            while (
                place.done("F") + place.done("f") < before.done("F") + before.done("f")
                or place.done("f") <= before.done("f") < m
            ):
                step = next(steps)
                for other in reversed(range(rank, p)):
                    if self.places[other].done(step) < m:
                        self.run(other, step, self.arrival(other, step))

    def alternate(self, m: int, more: dict[str, bool]) -> None:
        """One gradient and one forward pass in turn. `more`: which steps may wait for one more."""
        p = len(self.places)
        for _ in range(2 * m):
            down = [self._goes_down(rank, m) for rank in range(p)]
            for rank in reversed(range(p)):
                if down[rank]:
                    self.run_after_weights(rank, "I", one_more=True)
            for rank in range(p):
                if not down[rank]:
                    self.run_after_weights(rank, "i", one_more=more["i"])
            for rank, place in enumerate(self.places):
                step = self._next_forward(rank, m)
                if not step:
                    continue
                while place.held == 2 * p:  # no more than 1F1B's first process holds
                    self.run_weights(place)
                self.run_after_weights(rank, step, one_more=more["F"])
        for place in self.places:
            while place.late:
                self.run_weights(place)

    def _goes_down(self, rank: int, m: int) -> bool:
        """Whether the process's next gradient is one on its first stage."""
        own = self.places[rank]
        if own.done("I") == own.done("i"):
            return False
        if rank == len(self.places) - 1 or own.done("i") == m:
            return True
        return own.done("I") < self.places[rank + 1].done("I")

    def _next_forward(self, rank: int, m: int) -> str:
        own = self.places[rank]
        first, second = own.done("F"), own.done("f")
        last = rank == len(self.places) - 1
        if second < first and (last or second < self.places[rank + 1].done("f")):
            return "f"
        given = rank == 0 or first < self.places[rank - 1].done("F")
        return "F" if first < m and (second == first or given) else ""


@functools.lru_cache(maxsize=256)
def build_words(
    p: int, m: int, f: float = 1.0, i: float = 1.0, w: float = 1.0, message: float = 0.0
) -> tuple[str, ...]:
    """Return what each of `p` processes runs: of several fillings the one whose processes idle
    least. Each filling shows which processes may idle longer in the next one.

    Durations are those of one stage, in seconds, and are rounded to nanoseconds."""
    kinds = {"F": f, "I": i, "W": w, "message": message}
    lasts = {kind: round(1e9 * seconds) for kind, seconds in kinds.items()}
    best: list[list[str]] = []
    least = math.inf
    for for_i, for_f in itertools.product((True, False), repeat=2):
        allowed = [0] * p
        before = math.inf
        while least:
            filling = _Filling(p, lasts, allowed)
            filling.fill_pipeline(m)
            filling.alternate(m, {"i": for_i, "F": for_f})
            if filling.most_idle < least:
                best = [place.word for place in filling.places]
                least = filling.most_idle
            if filling.most_idle >= before:
                break
            before = filling.most_idle
            allowed = [before - place.idle for place in filling.places]
    return tuple(map("".join, best))


def mid_durations(stage_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return F, I and W of a stage as the authors take them from uneven ones: the mean of each
    process's two stages, of which the median."""
    pairs = list(zip(stage_s, reversed(stage_s), strict=True))[: len(stage_s) // 2]
    means = [[(a + b) / 2 for a, b in zip(first, second, strict=True)] for first, second in pairs]
    return tuple(statistics.median(kind) for kind in zip(*means, strict=True))
