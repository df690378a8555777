"""Compute the idle share of a pipeline and split it by cause."""

from collections.abc import Sequence
from typing import Any

from distributed_training.plan.orders import Order
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.predict.simulate import map_consumers, simulate, total_duration


def bubble(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the idle share of each rank in the forward and backward phase, relative to the slowest
    rank's phase.

    Each entry of `ranks` contains `phase_s` and `computing_s` from the median step, and `kernels_s`
    from the profiled step. `kernels_s` is None if no step was profiled."""
    phase = max(rank["phase_s"] for rank in ranks)

    def idle(busy: str) -> dict[str, Any]:
        shares = [1 - rank[busy] / phase for rank in ranks]
        return {"idle_share": sum(shares) / len(shares), "by_rank": shares}

    between_operations = idle("computing_s") | {"operations_s": _slowest_operations(ranks)}
    if ranks[0]["kernels_s"] is None:
        return {"phase_s": phase, **between_operations, "from": "begin and end of operations"}
    in_kernels = {"phase_s": phase, **idle("kernels_s"), "from": "kernels of one profiled step"}
    return {**in_kernels, "between_operations": between_operations}


def explain(
    idle: dict[str, Any],
    pipeline: dict[str, Any],
    orders: Sequence[Order],
    stage_ranks: Sequence[int],
) -> dict[str, float]:
    """Split the idle share into four parts, as shares of the phase.

    - `formula`: the idle share that the schedule's formula gives.
    - `unequal_operations`: additional idle time because some operations take longer than others.
      This part comes from an exact simulation with each stage's median times and instantaneous
      messages.
    - `messages`: additional idle time between operations, from messages and waiting.
    - `gaps`: idle time within operations.

    `orders` contains one order per rank, and `stage_ranks` contains the rank of each stage."""
    schedule = pipeline["schedule"]
    between_operations = idle["between_operations"]
    formula = pipeline["ideal_bubble"] or 0.0
    seconds = {}
    for name, operation_s in between_operations["operations_s"].items():
        kind, stage = name.split()
        if kind == "B" and SCHEDULES[schedule].splits_backward:
            kind = "I"
        seconds[kind, int(stage)] = operation_s
    spans = simulate(orders, seconds, map_consumers(stage_ranks, 0.0))
    busy = sum(seconds[step] * len(done) for step, done in spans.items()) / len(orders)
    simulated = 1 - busy / total_duration(spans)
    return {
        "formula": formula,
        "unequal_operations": simulated - formula,
        "messages": between_operations["idle_share"] - simulated,
        "gaps": idle["idle_share"] - between_operations["idle_share"],
    }


def _slowest_operations(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """For each operation of each stage, return the highest of the ranks' median times."""
    largest: dict[str, float] = {}
    for name, seconds in (item for rank in ranks for item in rank["operations_s"].items()):
        largest[name] = max(seconds, largest.get(name, 0.0))
    return largest
