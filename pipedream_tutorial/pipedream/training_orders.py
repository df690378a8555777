"""Which schedules can be trained, and their orders over several batches. Imports no torch."""

from __future__ import annotations

from functools import cache

from pipedream.errors import UserError
from pipedream.ops import Schedule, repeat
from pipedream.policies import POLICIES, Policy
from pipedream.schedules import SCHEDULES, build_schedule


@cache
def trainable() -> tuple[str, ...]:
    """Names of the schedules with one stage a rank; the others are simulated only."""
    built = {name: build_schedule(name, 4, 8) for name in SCHEDULES}  # sizes that suit them all
    return tuple(n for n, s in built.items() if s.stages_per_rank == len(s.chains) == 1)


def schedule_for_training(
    name: str, num_stages: int, num_microbatches: int, num_batches: int
) -> tuple[Schedule, Policy]:
    """Orders over all batches: flushing schedules again and again, the others without a pause.

    Raises UserError for schedules that are simulated only, for sizes that a schedule refuses, and
    for 2BW with fewer than p - 1 microbatches a batch.
    """
    entry = SCHEDULES.get(name)
    if entry is not None and name not in trainable():
        raise UserError(f"{name} is simulated only", f"train with one of {', '.join(trainable())}")
    if entry is None or entry.policy == "flush":
        batch = build_schedule(name, num_stages, num_microbatches)
        return repeat(batch, num_batches), POLICIES["flush"]
    if entry.policy == "2bw" and num_microbatches < num_stages - 1:
        raise UserError(
            f"{name} cannot run {num_microbatches} microbatches a batch over {num_stages} stages: "
            "the weights one batch behind would not be there in time",
            f"set num_microbatches to {num_stages - 1} or more",
        )
    whole = build_schedule(name, num_stages, num_microbatches * num_batches)
    return whole, POLICIES[entry.policy]
