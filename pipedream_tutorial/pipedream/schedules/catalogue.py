"""The schedules by name, and which of them can be trained. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from pipedream.errors import UserError, nearest
from pipedream.schedules import building_blocks, orders
from pipedream.schedules.ops import Schedule, repeat
from pipedream.schedules.policies import POLICIES, Policy


@dataclass(frozen=True, slots=True)
class Entry:
    """What a schedule is called, how it is built, and when weights change under it."""

    title: str
    build: Callable[..., Schedule]
    """From (p, m), and by name what `options` names."""
    policy: str = "flush"
    """A key of policies.POLICIES."""
    options: tuple[str, ...] = ()


SCHEDULES: dict[str, Entry] = {
    "naive": Entry("Naive", orders.naive),
    "gpipe": Entry("GPipe", orders.gpipe),
    "1f1b": Entry("1F1B with flush", orders.one_f_one_b),
    "eager-1f1b": Entry("Eager 1F1B", orders.eager_1f1b),
    "pipedream": Entry("PipeDream", orders.one_f_one_b, policy="stash"),
    "pipedream-vertical": Entry("PipeDream, vertical sync", orders.one_f_one_b, policy="vertical"),
    "pipedream-no-stash": Entry("PipeDream, no stashing", orders.one_f_one_b, policy="in-place"),
    "pipedream-2bw": Entry("PipeDream-2BW", orders.one_f_one_b, policy="2bw"),
    "interleaved": Entry("Interleaved 1F1B", orders.interleaved_1f1b, options=("v",)),
    "zb-h1": Entry("ZB-H1", orders.zb_h1),
    "zb-h2": Entry("ZB-H2", orders.zb_h2),
    "zb-v": Entry("ZB-V", orders.zb_v),
    "v-half": Entry("V-Half", building_blocks.v_half, options=("reorder",)),
    "v-min": Entry("V-Min", building_blocks.v_min, options=("reorder",)),
    "dualpipe-v": Entry("DualPipeV", orders.dualpipe_v),
    "dualpipe": Entry("DualPipe", orders.dualpipe),
    "chimera": Entry("Chimera", orders.chimera),
}


def build_schedule(name: str, p: int, m: int, v: int = 2, *, reorder: bool = True) -> Schedule:
    """The named schedule's orders for p ranks, m microbatches and, if it is interleaved, v chunks;
    `reorder` is for those of building_blocks.

    Raises UserError for a name that is unknown and for sizes that the schedule does not allow.
    """
    entry = SCHEDULES.get(name)
    if entry is None:
        raise UserError(f"unknown schedule {name!r}", nearest(name, SCHEDULES))
    if min(p, m, v) < 1:
        raise UserError(f"{p} ranks, {m} microbatches, {v} chunks", "each has to be 1 or more")
    given = {"v": v, "reorder": reorder}
    return entry.build(p, m, **{option: given[option] for option in entry.options})


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
