"""What private.py is for torch's pipelines, whose import takes 0.4 s: only pipeline.py has it."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from distributed_training.plan.orders import Operation, find_orders
from distributed_training.plan.plan import Plan
from distributed_training.predict.simulate import expect_spans


class TwoWayStage(PipelineStage):
    """A PipelineStage whose edges use two communicators in turns: over one, NCCL would let a
    receive that waits for the stage before hold up what is ready for the stage after."""

    other: dist.ProcessGroup

    def _over(self, edge: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        group = self.other if edge % 2 else self.group
        return [dist.P2POp(op.op, op.tensor, op.peer, group) for op in ops]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over(self.stage_index - 1, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over(self.stage_index, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over(self.stage_index, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over(self.stage_index - 1, super().get_bwd_send_ops(bwd_chunk_id))

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Nothing with ourselves (where a V turns): torch 2.11 sends it, and gloo fails."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


class GivenOrder(schedules._PipelineScheduleRuntime):
    """Processes that work in planned orders, of forward passes and halves of backward ones. If the
    orders were made for durations, messages are sent and awaited in the order in which they are
    expected: torch's own assumes equal durations, and a receive that comes too early holds up what
    is ready.
    """

    def __init__(self, stages: list[Any], plan: Plan, **options: Any) -> None:
        super().__init__(stages, **options)
        self.pipeline_order = {
            rank: [schedules._Action(stage, _COMPUTING[kind], n) for kind, stage, n in order]
            for rank, order in enumerate(find_orders(plan))
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
        if plan.orders is not None:
            spans = expect_spans(plan)
            self.pipeline_order_with_comms = {
                rank: _in_order_of_messages(actions, spans)
                for rank, actions in self.pipeline_order_with_comms.items()
            }


_Type = schedules._ComputationType
_COMPUTING = {"F": _Type.FORWARD, "I": _Type.BACKWARD_INPUT, "W": _Type.BACKWARD_WEIGHT}
_KINDS = {kind: name for name, kind in _COMPUTING.items()}
# (what makes a message, by how many stages before the one that the action names)
_MESSAGES = {
    _Type.SEND_F: ("F", 0), _Type.RECV_F: ("F", 1), _Type.SEND_B: ("I", 0), _Type.RECV_B: ("I", -1),
}  # fmt: skip


def _in_order_of_messages(
    actions: list[schedules._Action], spans: Mapping[Operation, tuple[float, float]]
) -> list[schedules._Action]:
    """Each message before what its process does when it is made, and after what makes it."""
    messages = []
    for action in actions:
        if action.computation_type in _MESSAGES:
            kind, before = _MESSAGES[action.computation_type]
            maker = (kind, action.stage_index - before, action.microbatch_index)
            messages.append((spans[maker][1], maker, action))
    messages.sort(key=lambda message: message[:2], reverse=True)
    found = []
    for action in actions:
        if action.computation_type in _KINDS:
            doing = _KINDS[action.computation_type], action.stage_index, action.microbatch_index
            begin, end = spans[doing]
            while messages and (messages[-1][0] < end or messages[-1][0] <= begin):
                found.append(messages.pop()[2])
        if action.computation_type not in _MESSAGES:
            found.append(action)
    return found + [message[2] for message in reversed(messages)]
