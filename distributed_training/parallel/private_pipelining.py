"""Wrap the private interfaces of torch.distributed.pipelining. Importing that package takes 0.4 s,
so only pipeline.py imports this module."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from distributed_training.plan.orders import Operation, find_orders
from distributed_training.plan.plan import Plan


class TwoGroupStage(PipelineStage):
    """PipelineStage with two communicators, which successive pairs of neighboring stages use
    alternately. With a single NCCL communicator, a pending receive from the previous stage would
    block a send to the next stage."""

    second_group: dist.ProcessGroup

    def _assign_group(self, pair: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if pair % 2:
            for op in ops:
                op.group = self.second_group
        return ops

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._assign_group(self.stage_index - 1, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._assign_group(self.stage_index, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._assign_group(self.stage_index, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._assign_group(self.stage_index - 1, super().get_bwd_send_ops(bwd_chunk_id))


class PlannedSchedule(schedules._PipelineScheduleRuntime):
    """Schedule that runs forward passes and the two halves of each backward pass in the planned
    order.

    If the plan stores when operations are expected to end, messages are sorted by these times. By
    default, torch orders messages as if all operations took the same time. A receive that is posted
    too early would then block operations that are ready."""

    def __init__(self, stages: list[Any], plan: Plan, **options: Any) -> None:
        super().__init__(stages, **options)
        self.pipeline_order = {
            rank: [
                schedules._Action(stage, _COMPUTATION_TYPES[name], n) for name, stage, n in order
            ]
            for rank, order in enumerate(find_orders(plan))
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
        if plan.operation_ends:
            end_s = {
                operation: end
                for order, end_times in zip(find_orders(plan), plan.operation_ends, strict=True)
                for operation, end in zip(order, end_times, strict=True)
            }
            self.pipeline_order_with_comms = {
                rank: _sort_messages(actions, end_s)
                for rank, actions in self.pipeline_order_with_comms.items()
            }


_Type = schedules._ComputationType
_COMPUTATION_TYPES = {"F": _Type.FORWARD, "I": _Type.BACKWARD_INPUT, "W": _Type.BACKWARD_WEIGHT}
_OPERATION_NAMES = {action_type: name for name, action_type in _COMPUTATION_TYPES.items()}
# Message type -> (kind of the operation that produces the message, stage of the message's action
# minus stage of that operation)
_PRODUCERS = {
    _Type.SEND_F: ("F", 0),
    _Type.RECV_F: ("F", 1),
    _Type.SEND_B: ("I", 0),
    _Type.RECV_B: ("I", -1),
}


def _sort_messages(
    actions: list[schedules._Action], end_s: Mapping[Operation, float]
) -> list[schedules._Action]:
    """Return the actions with the messages sorted by the time at which they are expected to be
    ready. Each message is placed before the first operation that is expected to end after that
    time."""
    end = 0.0  # of the latest operation
    keys: list[tuple[Any, ...]] = []
    for action in actions:
        kind, stage, number = action.computation_type, action.stage_index, action.microbatch_index
        message = schedules._ComputationType[kind.name.removeprefix("WAIT_")]
        if message in _PRODUCERS:
            operation, stage_offset = _PRODUCERS[message]
            producer = (operation, stage - stage_offset, number)
            time = end_s[producer]
            if kind != message:  # torch 2.15 also lists where a rank waits for its earlier sends
                time = max(end, time)
            keys.append((time, *producer))
            continue
        if kind in _OPERATION_NAMES:
            end = end_s[_OPERATION_NAMES[kind], stage, number]
        keys.append((end,))
    order = sorted(range(len(actions)), key=keys.__getitem__)
    return [actions[index] for index in order]
