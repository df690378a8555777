"""Build ZB-V's order for given durations, as its authors do (arXiv 2401.10241). This module does
not import torch.

Forward passes and input gradients follow a pattern, and weight gradients fill the time in which a
process would otherwise wait. The orders match the output of zbv.py in
github.com/sail-sg/zero-bubble-pipeline-parallelism, operation by operation."""

import functools
import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# Step -> offset of the process that sends the step its input. Lowercase letters are steps on a
# process's second stage, on the way back up the V.
GIVEN_BY = {"F": -1, "f": 1, "i": -1, "I": 1}


@dataclass(slots=True)
class _Process:
    """State of one process in ZB-V's pipeline: its clock, its memory and the steps that it has run
    so far."""

    clock: int = 0
    idle: int = 0  # idle time since its first forward pass
    held: int = 0  # number of sets of activations, each for one stage
    word: list[str] = field(default_factory=list)
    late: deque[str] = field(default_factory=deque)  # weight gradients that are ready to run
    ends: dict[str, list[int]] = field(default_factory=lambda: {step: [] for step in GIVEN_BY})

    def done(self, step: str) -> int:
        return len(self.ends[step])


class _Filling:
    """Builder for the ZB-V order of p processes, which adds one step at a time."""

    def __init__(self, p: int, lasts: dict[str, int], allowed: Sequence[int]) -> None:
        """Start with no steps. `lasts` contains the durations of F, I, W and a message, for one
        stage. `allowed` contains, for each process, the total time that it may idle before it runs
        a weight gradient early. Every process may idle as long as the process that has idled most
        so far."""
        self.processes = [_Process() for _ in range(p)]
        self.lasts = lasts
        self.allowed = allowed
        self.most_idle = 0

    def arrival(self, rank: int, step: str) -> int:
        """Return the time at which the input of the step's next micro-batch arrives from another
        process, or 0 if the step needs none."""
        source = rank + GIVEN_BY[step]
        if not 0 <= source < len(self.processes):
            return 0
        number = self.processes[rank].done(step)
        return self.processes[source].ends[step][number] + self.lasts["message"]

    def run(self, rank: int, step: str, arrival: int) -> None:
        process = self.processes[rank]
        start = max(process.clock, arrival)
        if process.ends["F"]:
            process.idle += start - process.clock
            self.most_idle = max(self.most_idle, process.idle)
        process.clock = start + self.lasts[step.upper()]
        process.ends[step].append(process.clock)
        process.word.append(step)
        if step in "Ff":
            process.held += 1
        else:
            process.late.append("w" if step == "i" else "W")

    def run_weights(self, process: _Process) -> None:
        process.held -= 1
        process.clock += self.lasts["W"]
        process.word.append(process.late.popleft())

    def run_after_weights(self, rank: int, step: str, *, one_more: bool) -> None:
        """Run the weight gradients that fit before the step's input arrives, then run the step.
        With `one_more`, run one more weight gradient if the process would otherwise idle longer
        than allowed."""
        process = self.processes[rank]
        arrival = self.arrival(rank, step)
        while process.late and arrival >= process.clock + self.lasts["W"]:
            self.run_weights(process)
        spare = max(self.most_idle, self.allowed[rank]) - process.idle
        if one_more and process.late and arrival - process.clock > spare:
            self.run_weights(process)
        self.run(rank, step, arrival)

    def fill_pipeline(self, m: int) -> None:
        """Run forward passes until each process has a gradient to continue with."""
        p = len(self.processes)
        for rank in range(p):
            self.run(rank, "F", self.arrival(rank, "F"))
        for rank in reversed(range(p)):
            process = self.processes[rank]
            arrival = self.arrival(rank, "f")
            while (
                process.held + 2 * (rank + 1) <= 2 * p
                and process.clock + self.lasts["F"] <= arrival
                and process.done("F") < m
            ):
                for earlier_rank in range(rank + 1):
                    self.run(earlier_rank, "F", self.arrival(earlier_rank, "F"))
            self.run(rank, "f", arrival)
        steps = itertools.cycle("Ff")
        for rank in range(1, p):
            previous, process = self.processes[rank - 1 : rank + 1]
            while (
                process.done("F") + process.done("f") < previous.done("F") + previous.done("f")
                or process.done("f") <= previous.done("f") < m
            ):
                step = next(steps)
                for later_rank in reversed(range(rank, p)):
                    if self.processes[later_rank].done(step) < m:
                        self.run(later_rank, step, self.arrival(later_rank, step))

    def alternate(self, m: int, more: dict[str, bool]) -> None:
        """Alternate input gradients and forward passes. `more` contains, for each step, whether
        `run_after_weights` is called with `one_more`."""
        p = len(self.processes)
        for _ in range(2 * m):
            down = [self._goes_down(rank, m) for rank in range(p)]
            for rank in reversed(range(p)):
                if down[rank]:
                    self.run_after_weights(rank, "I", one_more=True)
            for rank in range(p):
                if not down[rank]:
                    self.run_after_weights(rank, "i", one_more=more["i"])
            for rank, process in enumerate(self.processes):
                step = self._next_forward(rank, m)
                if not step:
                    continue
                # 1F1B's first process holds at most this number of activations
                while process.held == 2 * p:
                    self.run_weights(process)
                self.run_after_weights(rank, step, one_more=more["F"])
        for process in self.processes:
            while process.late:
                self.run_weights(process)

    def _goes_down(self, rank: int, m: int) -> bool:
        """Return whether the process's next gradient belongs to its first stage."""
        process = self.processes[rank]
        if process.done("I") == process.done("i"):
            return False
        if rank == len(self.processes) - 1 or process.done("i") == m:
            return True
        return process.done("I") < self.processes[rank + 1].done("I")

    def _next_forward(self, rank: int, m: int) -> str:
        process = self.processes[rank]
        first, second = process.done("F"), process.done("f")
        last = rank == len(self.processes) - 1
        if second < first and (last or second < self.processes[rank + 1].done("f")):
            return "f"
        has_input = rank == 0 or first < self.processes[rank - 1].done("F")
        return "F" if first < m and (second == first or has_input) else ""


@functools.lru_cache(maxsize=256)
def build_words(
    p: int, m: int, f: float = 1.0, i: float = 1.0, w: float = 1.0, message: float = 0.0
) -> tuple[str, ...]:
    """Return the steps of each of `p` processes as a string of letters.

    Several orders are built. The returned order has the smallest maximum idle time of any process.
    After each attempt, processes that idled less than this maximum may idle longer in the next
    attempt. `f`, `i` and `w` are the durations in seconds of one stage's steps, and `message` is
    the time to send a message. Durations are rounded to nanoseconds."""
    kinds = {"F": f, "I": i, "W": w, "message": message}
    lasts = {kind: round(1e9 * seconds) for kind, seconds in kinds.items()}
    best: list[list[str]] = []
    least = math.inf
    for for_i, for_f in itertools.product((True, False), repeat=2):
        allowed = [0] * p
        last_idle = math.inf
        while least:
            filling = _Filling(p, lasts, allowed)
            filling.fill_pipeline(m)
            filling.alternate(m, {"i": for_i, "F": for_f})
            if filling.most_idle < least:
                best = [process.word for process in filling.processes]
                least = filling.most_idle
            if filling.most_idle >= last_idle:
                break
            last_idle = filling.most_idle
            allowed = [last_idle - process.idle for process in filling.processes]
    return tuple(map("".join, best))


def mid_durations(stage_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the durations of F, I and W that the authors use for uneven stages. First, the
    durations of each process's two stages are averaged. Then, the median over all processes is
    taken."""
    pairs = list(zip(stage_s, reversed(stage_s), strict=True))[: len(stage_s) // 2]
    stage_means = [
        [(a + b) / 2 for a, b in zip(first, second, strict=True)] for first, second in pairs
    ]
    return tuple(statistics.median(durations) for durations in zip(*stage_means, strict=True))
