"""Build the ZB-V order for given durations, as the authors of ZB-V do (arXiv 2401.10241). This
module does not import torch.

Forward passes and input gradients follow a pattern, and weight gradients fill the time in which a
rank would otherwise wait. The orders match the output of zbv.py in
github.com/sail-sg/zero-bubble-pipeline-parallelism, operation by operation."""

import functools
import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# Step -> offset of the rank that sends the step its input. Lowercase letters are steps on a rank's
# second stage, on the way back up the V.
INPUT_OFFSETS = {"F": -1, "f": 1, "i": -1, "I": 1}


@dataclass(slots=True)
class _RankState:
    """State of one rank in ZB-V's pipeline: its clock, its memory and the steps that it has run so
    far."""

    clock: int = 0
    idle: int = 0  # idle time since its first forward pass
    num_held_activations: int = 0  # counted per stage
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
    """Builder of the ZB-V order for p ranks, which adds one step at a time."""

    def __init__(self, p: int, durations: dict[str, int], allowed_idle: Sequence[int]) -> None:
        """Start with no steps. `durations` contains the durations of F, I, W and a message, for one
        stage. `allowed_idle` contains the total time that each rank may idle. A rank that would
        idle longer runs a weight gradient early. If any rank has already idled longer than this
        limit, that longer time is the limit instead."""
        self.states = [_RankState() for _ in range(p)]
        self.durations = durations
        self.allowed_idle = allowed_idle
        self.longest_idle = 0

    def arrival(self, rank: int, step: str) -> int:
        """Return the time at which another rank's result for the step's next micro-batch arrives,
        or 0 if the step's input does not come from another rank."""
        source = rank + INPUT_OFFSETS[step]
        if not 0 <= source < len(self.states):
            return 0
        number = self.states[rank].num_done(step)
        return self.states[source].end_times[step][number] + self.durations["message"]

    def run(self, rank: int, step: str, arrival: int) -> None:
        state = self.states[rank]
        start = max(state.clock, arrival)
        if state.end_times["F"]:
            state.idle += start - state.clock
            self.longest_idle = max(self.longest_idle, state.idle)
        state.clock = start + self.durations[step.upper()]
        state.end_times[step].append(state.clock)
        state.steps.append(step)
        if step in "Ff":
            state.num_held_activations += 1
        else:
            state.pending_weights.append("w" if step == "i" else "W")

    def run_weight_gradient(self, state: _RankState) -> None:
        state.num_held_activations -= 1
        state.clock += self.durations["W"]
        state.steps.append(state.pending_weights.popleft())

    def run_after_weight_gradients(self, rank: int, step: str, *, one_more: bool) -> None:
        """Run the weight gradients that fit before the step's input arrives, then run the step.
        With `one_more`, run one more weight gradient if the rank would otherwise idle longer than
        allowed."""
        state = self.states[rank]
        arrival = self.arrival(rank, step)
        while state.pending_weights and arrival >= state.clock + self.durations["W"]:
            self.run_weight_gradient(state)
        spare = max(self.longest_idle, self.allowed_idle[rank]) - state.idle
        if one_more and state.pending_weights and arrival - state.clock > spare:
            self.run_weight_gradient(state)
        self.run(rank, step, arrival)

    def fill_pipeline(self, m: int) -> None:
        """Run the forward passes that precede each rank's first gradient."""
        p = len(self.states)
        for rank in range(p):
            self.run(rank, "F", self.arrival(rank, "F"))
        for rank in reversed(range(p)):
            state = self.states[rank]
            arrival = self.arrival(rank, "f")
            while (
                state.num_held_activations + 2 * (rank + 1) <= 2 * p
                and state.clock + self.durations["F"] <= arrival
                and state.num_done("F") < m
            ):
                for earlier_rank in range(rank + 1):
                    self.run(earlier_rank, "F", self.arrival(earlier_rank, "F"))
            self.run(rank, "f", arrival)
        steps = itertools.cycle("Ff")
        for rank in range(1, p):
            previous, state = self.states[rank - 1 : rank + 1]
            while (
                state.num_done("F") + state.num_done("f")
                < previous.num_done("F") + previous.num_done("f")
                or state.num_done("f") <= previous.num_done("f") < m
            ):
                step = next(steps)
                for later_rank in reversed(range(rank, p)):
                    if self.states[later_rank].num_done(step) < m:
                        self.run(later_rank, step, self.arrival(later_rank, step))

    def alternate(self, m: int, runs_one_more: dict[str, bool]) -> None:
        """Alternate input gradients and forward passes. `runs_one_more` maps the steps "i" and "F"
        to the argument `one_more` of `run_after_weight_gradients`."""
        p = len(self.states)
        for _ in range(2 * m):
            goes_down = [self._goes_down(rank, m) for rank in range(p)]
            for rank in reversed(range(p)):
                if goes_down[rank]:
                    self.run_after_weight_gradients(rank, "I", one_more=True)
            for rank in range(p):
                if not goes_down[rank]:
                    self.run_after_weight_gradients(rank, "i", one_more=runs_one_more["i"])
            for rank, state in enumerate(self.states):
                step = self._next_forward(rank, m)
                if not step:
                    continue
                # Hold at most as many activations as the first rank under 1F1B, which are 2 p if
                # counted per stage.
                while state.num_held_activations == 2 * p:
                    self.run_weight_gradient(state)
                self.run_after_weight_gradients(rank, step, one_more=runs_one_more["F"])
        for state in self.states:
            while state.pending_weights:
                self.run_weight_gradient(state)

    def _goes_down(self, rank: int, m: int) -> bool:
        """Return whether the rank's next gradient belongs to its first stage."""
        state = self.states[rank]
        if state.num_done("I") == state.num_done("i"):
            return False
        if rank == len(self.states) - 1 or state.num_done("i") == m:
            return True
        return state.num_done("I") < self.states[rank + 1].num_done("I")

    def _next_forward(self, rank: int, m: int) -> str:
        state = self.states[rank]
        num_first, num_second = state.num_done("F"), state.num_done("f")
        is_last_rank = rank == len(self.states) - 1
        if num_second < num_first and (
            is_last_rank or num_second < self.states[rank + 1].num_done("f")
        ):
            return "f"
        has_input = rank == 0 or num_first < self.states[rank - 1].num_done("F")
        return "F" if num_first < m and (num_second == num_first or has_input) else ""


@functools.lru_cache(maxsize=256)
def build_zb_v_steps(
    p: int, m: int, f: float = 1.0, i: float = 1.0, w: float = 1.0, message: float = 0.0
) -> tuple[str, ...]:
    """Return the steps of each of `p` ranks as a string of letters.

    This function builds several orders and returns the order that minimizes the longest idle time
    of any rank. In each new attempt, a rank's allowed idle time is the previous attempt's longest
    idle time minus the rank's own idle time in that attempt. `f`, `i` and `w` are the durations in
    seconds of one stage's steps, and `message` is the time to send a message. Durations are rounded
    to nanoseconds."""
    seconds_by_kind = {"F": f, "I": i, "W": w, "message": message}
    durations = {kind: round(1e9 * seconds) for kind, seconds in seconds_by_kind.items()}
    best: list[list[str]] = []
    best_longest_idle = math.inf
    for one_more_i, one_more_f in itertools.product((True, False), repeat=2):
        allowed_idle = [0] * p
        previous_longest_idle = math.inf
        while best_longest_idle:
            builder = _OrderBuilder(p, durations, allowed_idle)
            builder.fill_pipeline(m)
            builder.alternate(m, {"i": one_more_i, "F": one_more_f})
            if builder.longest_idle < best_longest_idle:
                best = [state.steps for state in builder.states]
                best_longest_idle = builder.longest_idle
            if builder.longest_idle >= previous_longest_idle:
                break
            previous_longest_idle = builder.longest_idle
            allowed_idle = [previous_longest_idle - state.idle for state in builder.states]
    return tuple(map("".join, best))


def median_durations(stage_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the durations of F, I and W that the authors of ZB-V use for uneven stages. First, the
    durations of each rank's two stages are averaged. Then, the median over all ranks is taken."""
    pairs = list(zip(stage_s, reversed(stage_s), strict=True))[: len(stage_s) // 2]
    stage_means = [
        [(a + b) / 2 for a, b in zip(first, second, strict=True)] for first, second in pairs
    ]
    return tuple(statistics.median(durations) for durations in zip(*stage_means, strict=True))
