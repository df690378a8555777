"""The schedules by name, and which of them can be trained. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from pipedream.errors import UserError, nearest
from pipedream.schedules import building_blocks, orders
from pipedream.schedules.ops import Schedule, repeat
from pipedream.schedules.policies import POLICIES, Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What a schedule is called, how it is built, and when weights change under it."""

    build: Callable[..., Schedule]
    """From (p, m), or (p, m, v) where `chunks` is set."""
    policy: str = "flush"
    """A key of policies.POLICIES."""
    chunks: bool = False
    title: str


SCHEDULES: dict[str, Entry] = {
    "naive": Entry(build=orders.naive, title="Naive"),
    "gpipe": Entry(build=orders.gpipe, title="GPipe"),
    "1f1b": Entry(build=orders.one_f_one_b, title="1F1B with flush"),
    "eager-1f1b": Entry(build=orders.eager_1f1b, title="Eager 1F1B"),
    "pipedream": Entry(build=orders.one_f_one_b, policy="stash", title="PipeDream"),
    "pipedream-vertical": Entry(
        build=orders.one_f_one_b, policy="vertical", title="PipeDream, vertical sync"
    ),
    "pipedream-no-stash": Entry(
        build=orders.one_f_one_b, policy="in-place", title="PipeDream, no stashing"
    ),
    "pipedream-2bw": Entry(build=orders.one_f_one_b, policy="2bw", title="PipeDream-2BW"),
    "interleaved": Entry(build=orders.interleaved_1f1b, chunks=True, title="Interleaved 1F1B"),
    "zb-h1": Entry(build=orders.zb_h1, title="ZB-H1"),
    "zb-h2": Entry(build=orders.zb_h2, title="ZB-H2"),
    "zb-v": Entry(build=orders.zb_v, title="ZB-V"),
    "v-half": Entry(build=building_blocks.v_half, title="V-Half"),
    "v-min": Entry(build=building_blocks.v_min, title="V-Min"),
    "dualpipe-v": Entry(build=orders.dualpipe_v, title="DualPipeV"),
    "dualpipe": Entry(build=orders.dualpipe, title="DualPipe"),
    "chimera": Entry(build=orders.chimera, title="Chimera"),
}


def build_schedule(name: str, p: int, m: int, v: int = 2) -> Schedule:
    """The named schedule's orders for p ranks, m microbatches and, if it is interleaved, v chunks.

    Raises UserError for a name that is unknown and for sizes that the schedule does not allow.
    """
    entry = SCHEDULES.get(name)
    if entry is None:
        raise UserError(f"unknown schedule {name!r}", nearest(name, SCHEDULES))
    if min(p, m, v) < 1:
        raise UserError(f"{p} ranks, {m} microbatches, {v} chunks", "each has to be 1 or more")
    return entry.build(p, m, v) if entry.chunks else entry.build(p, m)


FOUND = "search-"
"""Begins the name of a found order; the limit of microbatches held on a rank follows."""


@cache
def trainable() -> tuple[str, ...]:
    """Names of the schedules with one copy of the model; the others are simulated only."""
    built = {name: build_schedule(name, 4, 8) for name in SCHEDULES}  # sizes that suit them all
    return tuple(n for n, s in built.items() if len(s.chains) == 1)


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


def layers_of_a_stage(layers_of_a_rank: int, stages_per_rank: int) -> int:
    """How many of a rank's layers each of its stages has.

    Raises UserError where they cannot be cut evenly.
    """
    if layers_of_a_rank % stages_per_rank:
        raise UserError(
            f"a rank's layers ({layers_of_a_rank}) cannot be cut into {stages_per_rank} stages",
            f"set layers_per_stage to a multiple of {stages_per_rank}",
        )
    return layers_of_a_rank // stages_per_rank
