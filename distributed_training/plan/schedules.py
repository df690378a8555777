"""Define the requirements of pipeline schedules, which follow torch.distributed.pipelining. This
module does not import torch.

p is the number of ranks along pp, and m is the number of micro-batches per step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# A pending receive occupies this many SMs. With NCCL's default, matrix multiplications that fill a
# GPU take up to 1.8 times as long during a receive (results/channels.json).
P2P_CHANNELS = 4


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Requirements of a pipeline schedule."""

    # (p, m) -> maximum number of micro-batches whose activations a rank keeps at once
    kept_micro_batches: Callable[[int, int], float]
    stages_per_rank: int = 1  # 1 or 2
    v_shaped: bool = False  # rank r holds stages r and 2 p - 1 - r instead of r and p + r
    # True if input gradients and weight gradients are computed at different times
    splits_backward: bool = False
    # (p, m) -> whether p ranks can run m micro-batches
    accepts: Callable[[int, int], bool] = lambda p, m: True

    def ranks(self, p: int) -> tuple[int, ...]:
        """Return the pipeline rank of each stage, in the model's order."""
        forward_ranks = tuple(range(p))
        if self.v_shaped:
            return forward_ranks + forward_ranks[::-1]
        return forward_ranks * self.stages_per_rank

    def accepted_counts(self, p: int, num_sequences: int) -> list[int]:
        """Return all numbers of micro-batches that divide `num_sequences` evenly and that the
        schedule accepts, in ascending order."""
        return [m for m in divisors(num_sequences) if self.accepts(p, m)]


SCHEDULES = {
    "1f1b": Schedule(kept_micro_batches=lambda p, m: min(p, m), accepts=lambda p, m: m >= p),
    "gpipe": Schedule(kept_micro_batches=lambda p, m: m),
    "interleaved": Schedule(
        kept_micro_batches=lambda p, m: min((3 * p - 1) / 2, m),
        stages_per_rank=2,
        accepts=lambda p, m: m % max(1, m // p) == 0,  # all rounds must have the same length
    ),
    "zb-h1": Schedule(kept_micro_batches=lambda p, m: min(p, m), splits_backward=True),
    "zb-v": Schedule(
        kept_micro_batches=lambda p, m: min(p, m),
        stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
    ),
}
# Without a pipeline, micro-batches run one after another.
NO_PIPELINE = Schedule(kept_micro_batches=lambda p, m: 1)


def find_schedule(name: str, mesh: Mapping[str, int]) -> Schedule:
    """Return the schedule called `name`, or NO_PIPELINE if the mesh has no pipeline."""
    return SCHEDULES[name] if mesh["pp"] > 1 else NO_PIPELINE


def divisors(number: int) -> list[int]:
    """Return all divisors of a number in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
