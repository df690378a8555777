"""How much of a pipeline's phase is idle, and why."""

from collections.abc import Sequence
from typing import Any

from distributed_training.plan.orders import Order
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.predict.simulate import flow, length_of, simulate


def bubble(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Idle shares of the forward and backward phase, taken as long as it is on the slowest rank.

    Of each rank: phase_s and computing_s of the median step, kernels_s of the profiled one or None.
    """
    phase = max(rank["phase_s"] for rank in ranks)

    def idle(busy: str) -> dict[str, Any]:
        shares = [1 - rank[busy] / phase for rank in ranks]
        return {"idle_share": sum(shares) / len(shares), "by_rank": shares}

    between = idle("computing_s") | {"operations_s": _slowest(ranks)}
    if ranks[0]["kernels_s"] is None:
        return {"phase_s": phase, **between, "from": "begin and end of operations"}
    found = {"phase_s": phase, **idle("kernels_s"), "from": "kernels of one profiled step"}
    return {**found, "between_operations": between}


def explain(
    idle: dict[str, Any],
    pipeline: dict[str, Any],
    orders: Sequence[Order],
    stage_ranks: Sequence[int],
) -> dict[str, float]:
    """Shares of the phase whose sum is the idle share: of the schedule's formula; of operations
    that take longer than others (an exact simulation with each stage's median times, in which
    messages take none); of messages and waiting (what is idle between operations beyond that); of
    gaps within operations. `orders`: of each rank; `stage_ranks`: the rank of each stage."""
    schedule = pipeline["schedule"]
    between = idle["between_operations"]
    formula = pipeline["ideal_bubble"] or 0.0
    seconds = {}
    for name, took in between["operations_s"].items():
        kind, stage = name.split()
        if kind == "B" and SCHEDULES[schedule].splits_backward:
            kind = "I"
        seconds[kind, int(stage)] = took
    spans = simulate(orders, seconds, flow(stage_ranks, 0.0))
    busy = sum(seconds[step] * len(done) for step, done in spans.items()) / len(orders)
    simulated = 1 - busy / length_of(spans)
    return {
        "formula": formula,
        "unequal_operations": simulated - formula,
        "messages": between["idle_share"] - simulated,
        "gaps": idle["idle_share"] - between["idle_share"],
    }


def _slowest(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Of each operation of each stage, the median of the rank on which that is largest."""
    found: dict[str, float] = {}
    for name, seconds in (item for rank in ranks for item in rank["operations_s"].items()):
        found[name] = max(seconds, found.get(name, 0.0))
    return found
