"""In which order the processes of a plan's pipeline work, and when. No torch import."""

from __future__ import annotations

from dataclasses import replace

from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import FoundOrders
from distributed_training.predict.kernels import Work
from distributed_training.predict.orders import (
    Operation,
    Order,
    build_orders,
    by_operation,
    read_order,
    simulate,
)
from distributed_training.predict.rates import Rates, rates_of
from distributed_training.predict.search import search_orders
from distributed_training.settings.gpus import known_gpu


def with_orders(plan: Plan, rates: Rates | None) -> Plan:
    """The plan with what a search finds for the durations that `rates` mean, if its schedule is
    searched for; without rates by those of an H200.

    Durations go with the orders: processes that put messages in different orders would deadlock.
    """
    if not plan.schedule.searched:
        return plan
    work = Work(plan, rates or rates_of(known_gpu("H200")))
    costs = {key: float(cost.sum()) for key, cost in work.operations().items()}
    blocks = plan.layout.blocks_per_stage
    stages = range(len(blocks))
    seconds = tuple((costs["F", s], costs["I", s], costs["W", s]) for s in stages)
    message_s = work.message()
    orders = search_orders(seconds, blocks, plan.batch.num_microbatches, message_s)
    found = FoundOrders(by_place=orders, stage_s=seconds, message_s=message_s)
    return replace(plan, orders=found)


def find_orders(plan: Plan) -> tuple[Order, ...]:
    """What each process along pp does: as the schedule says, or as a search found (`zb-auto`)."""
    if not plan.schedule.searched:
        schedule = plan.config.pipeline_schedule
        return build_orders(schedule, plan.mesh["pp"], plan.batch.num_microbatches)
    assert plan.orders is not None, "with_orders comes first"
    return tuple(map(read_order, plan.orders.by_place))


def expect_spans(plan: Plan) -> dict[Operation, tuple[float, float]]:
    """Begin and end of each operation of a step in seconds, by what the search went by."""
    assert plan.orders is not None
    seconds = by_operation(plan.orders.stage_s)
    return simulate(find_orders(plan), seconds, plan.layout.ranks, plan.orders.message_s)
