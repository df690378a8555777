"""In which order the processes of a plan's pipeline work, and when. No torch import."""

from __future__ import annotations

from dataclasses import replace

from distributed_training.plan.plan import Plan
from distributed_training.predict.kernels import Work
from distributed_training.predict.orders import (
    Operation,
    Order,
    build_orders,
    read_order,
    timeline,
    write_order,
)
from distributed_training.predict.rates import rates_of
from distributed_training.predict.search import search_orders
from distributed_training.settings.gpus import known_gpu

# Whose rates the search goes by, and the order of messages: the same in every process, as different
# ones would deadlock.
REFERENCE = "H200"


def find_orders(plan: Plan) -> tuple[Order, ...]:
    """What each process along pp does: as the schedule says, or as a search found (`zb-auto`)."""
    m, pp = plan.batch.num_microbatches, plan.mesh["pp"]
    if not plan.schedule.searched:
        return build_orders(plan.config.pipeline_schedule, pp, m)
    if plan.orders is not None:
        return tuple(map(read_order, plan.orders))
    work = _reference(plan)
    costs, blocks = work.operations(), plan.layout.blocks_per_stage
    seconds = tuple(
        (costs["F", stage].total, costs["I", stage].total, costs["W", stage].total)
        for stage in range(len(blocks))
    )
    return search_orders(seconds, blocks, m, work.message())


def with_orders(plan: Plan) -> Plan:
    """The plan with what a search found for it."""
    if not plan.schedule.searched:
        return plan
    return replace(plan, orders=[write_order(order) for order in find_orders(plan)])


def expect_spans(plan: Plan) -> dict[Operation, tuple[float, float]]:
    """Begin and end of each operation of a step in seconds, on the GPU that orders are found for:
    the same on every process."""
    work = _reference(plan)
    seconds = {place: cost.total for place, cost in work.operations().items()}
    return timeline(find_orders(plan), seconds, plan.layout.ranks, work.message())


def _reference(plan: Plan) -> Work:
    return Work(plan, rates_of(known_gpu(REFERENCE)), plan.processes_here)
