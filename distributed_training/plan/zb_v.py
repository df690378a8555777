"""Build the ZB-V order for given durations, as the authors of ZB-V do (arXiv 2401.10241). This
module does not import torch.

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
INPUT_OFFSETS = {"F": -1, "f": 1, "i": -1, "I": 1}


@dataclass(slots=True)
class _Process:
    """State of one process in ZB-V's pipeline: its clock, its memory and the steps that it has run
    so far."""

    clock: int = 0
    idle: int = 0  # idle time since its first forward pass
    num_held: int = 0  # number of sets of activations, each for one stage
    steps: list[str] = field(default_factory=list)
    pending_weights: deque[str] = field(
        default_factory=deque
    )  # weight gradients that are ready to run
    end_times: dict[str, list[int]] = field(
        default_factory=lambda: {step: [] for step in INPUT_OFFSETS}
    )

    def num_done(self, step: str) -> int:
        return len(self.end_times[step])


class _OrderBuilder:
    """Builder of the ZB-V order for p processes. It adds one step at a time."""

    def __init__(self, p: int, durations: dict[str, int], allowed_idle: Sequence[int]) -> None:
        """Start with no steps. `durations` contains the durations of F, I, W and a message, for one
        stage. `allowed_idle` contains the total time that each process may idle. A process that
        would idle longer runs a weight gradient early. If any process has already idled longer than
        this limit, that longer time is the limit instead."""
        self.processes = [_Process() for _ in range(p)]
        self.durations = durations
        self.allowed_idle = allowed_idle
        self.most_idle = 0

    def arrival(self, rank: int, step: str) -> int:
        """Return the time at which the input of the step's next micro-batch arrives from another
        process, or 0 if this input does not come from another process."""
        source = rank + INPUT_OFFSETS[step]
        if not 0 <= source < len(self.processes):
            return 0
        number = self.processes[rank].num_done(step)
        return self.processes[source].end_times[step][number] + self.durations["message"]

    def run(self, rank: int, step: str, arrival: int) -> None:
        process = self.processes[rank]
        start = max(process.clock, arrival)
        if process.end_times["F"]:
            process.idle += start - process.clock
            self.most_idle = max(self.most_idle, process.idle)
        process.clock = start + self.durations[step.upper()]
        process.end_times[step].append(process.clock)
        process.steps.append(step)
        if step in "Ff":
            process.num_held += 1
        else:
            process.pending_weights.append("w" if step == "i" else "W")

    def run_weights(self, process: _Process) -> None:
        process.num_held -= 1
        process.clock += self.durations["W"]
        process.steps.append(process.pending_weights.popleft())

    def run_after_weights(self, rank: int, step: str, *, one_more: bool) -> None:
        """Run the weight gradients that fit before the step's input arrives, then run the step.
        With `one_more`, run one more weight gradient if the process would otherwise idle longer
        than allowed."""
        process = self.processes[rank]
        arrival = self.arrival(rank, step)
        while process.pending_weights and arrival >= process.clock + self.durations["W"]:
            self.run_weights(process)
        spare = max(self.most_idle, self.allowed_idle[rank]) - process.idle
        if one_more and process.pending_weights and arrival - process.clock > spare:
            self.run_weights(process)
        self.run(rank, step, arrival)

    def fill_pipeline(self, m: int) -> None:
        """Run the forward passes that precede each process's first gradient."""
        p = len(self.processes)
        for rank in range(p):
            self.run(rank, "F", self.arrival(rank, "F"))
        for rank in reversed(range(p)):
            process = self.processes[rank]
            arrival = self.arrival(rank, "f")
            while (
                process.num_held + 2 * (rank + 1) <= 2 * p
                and process.clock + self.durations["F"] <= arrival
                and process.num_done("F") < m
            ):
                for earlier_rank in range(rank + 1):
                    self.run(earlier_rank, "F", self.arrival(earlier_rank, "F"))
            self.run(rank, "f", arrival)
        steps = itertools.cycle("Ff")
        for rank in range(1, p):
            previous, process = self.processes[rank - 1 : rank + 1]
            while (
                process.num_done("F") + process.num_done("f")
                < previous.num_done("F") + previous.num_done("f")
                or process.num_done("f") <= previous.num_done("f") < m
            ):
                step = next(steps)
                for later_rank in reversed(range(rank, p)):
                    if self.processes[later_rank].num_done(step) < m:
                        self.run(later_rank, step, self.arrival(later_rank, step))

    def alternate(self, m: int, runs_one_more: dict[str, bool]) -> None:
        """Alternate input gradients and forward passes. `runs_one_more` maps the steps "i" and "F"
        to the argument `one_more` of `run_after_weights`."""
        p = len(self.processes)
        for _ in range(2 * m):
            goes_down = [self._goes_down(rank, m) for rank in range(p)]
            for rank in reversed(range(p)):
                if goes_down[rank]:
                    self.run_after_weights(rank, "I", one_more=True)
            for rank in range(p):
                if not goes_down[rank]:
                    self.run_after_weights(rank, "i", one_more=runs_one_more["i"])
            for rank, process in enumerate(self.processes):
                step = self._next_forward(rank, m)
                if not step:
                    continue
                # 1F1B's first process holds at most this number of activations
                while process.num_held == 2 * p:
                    self.run_weights(process)
                self.run_after_weights(rank, step, one_more=runs_one_more["F"])
        for process in self.processes:
            while process.pending_weights:
                self.run_weights(process)

    def _goes_down(self, rank: int, m: int) -> bool:
        """Return whether the process's next gradient belongs to its first stage."""
        process = self.processes[rank]
        if process.num_done("I") == process.num_done("i"):
            return False
        if rank == len(self.processes) - 1 or process.num_done("i") == m:
            return True
        return process.num_done("I") < self.processes[rank + 1].num_done("I")

    def _next_forward(self, rank: int, m: int) -> str:
        process = self.processes[rank]
        num_first, num_second = process.num_done("F"), process.num_done("f")
        is_last_rank = rank == len(self.processes) - 1
        if num_second < num_first and (
            is_last_rank or num_second < self.processes[rank + 1].num_done("f")
        ):
            return "f"
        has_input = rank == 0 or num_first < self.processes[rank - 1].num_done("F")
        return "F" if num_first < m and (num_second == num_first or has_input) else ""


@functools.lru_cache(maxsize=256)
def build_zb_v_steps(
    p: int, m: int, f: float = 1.0, i: float = 1.0, w: float = 1.0, message: float = 0.0
) -> tuple[str, ...]:
    """Return the steps of each of `p` processes as a string of letters.

    This function builds several orders and returns the order that minimizes the longest idle time
    of any process. Each new attempt lets a process idle for as long as the difference between the
    longest idle time and its own idle time in the previous attempt. `f`, `i` and `w` are the
    durations in seconds of one stage's steps, and `message` is the time to send a message.
    Durations are rounded to nanoseconds."""
    seconds_by_kind = {"F": f, "I": i, "W": w, "message": message}
    durations = {kind: round(1e9 * seconds) for kind, seconds in seconds_by_kind.items()}
    best: list[list[str]] = []
    least_idle = math.inf
    for one_more_i, one_more_f in itertools.product((True, False), repeat=2):
        allowed_idle = [0] * p
        last_idle = math.inf
        while least_idle:
            builder = _OrderBuilder(p, durations, allowed_idle)
            builder.fill_pipeline(m)
            builder.alternate(m, {"i": one_more_i, "F": one_more_f})
            if builder.most_idle < least_idle:
                best = [process.steps for process in builder.processes]
                least_idle = builder.most_idle
            if builder.most_idle >= last_idle:
                break
            last_idle = builder.most_idle
            allowed_idle = [last_idle - process.idle for process in builder.processes]
    return tuple(map("".join, best))


def median_durations(stage_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the durations of F, I and W that the authors of ZB-V use for uneven stages. First, the
    durations of each process's two stages are averaged. Then, the median over all processes is
    taken."""
    pairs = list(zip(stage_s, reversed(stage_s), strict=True))[: len(stage_s) // 2]
    stage_means = [
        [(a + b) / 2 for a, b in zip(first, second, strict=True)] for first, second in pairs
    ]
    return tuple(statistics.median(durations) for durations in zip(*stage_means, strict=True))
