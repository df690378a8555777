"""A backward pass in two parts, the second of which fills a pipeline's idle time (2401.10241).

The first part gives the gradients that the stage before waits for, the second those of the blocks'
matrices. Autograd cannot stop in the middle of a compiled block. So matrices take no part in it:
next to each product x W^T goes a tap, whose gradient is that of the product, dY. Both x and dY are
kept until the second part computes dW = dY^T x. Together the two parts do what one does.

The order of all parts is given (predict/orders.py).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, Replicate

from distributed_training.models.decoder import Decoder, Linear
from distributed_training.parallel.gradients import local_part
from distributed_training.predict.orders import Operation, Order

Products = list[tuple[Linear, torch.Tensor, torch.Tensor]]  # (layer, x [.., in], dY [.., out])


class WeightGradients:
    """The matrices of one stage's blocks, whose gradients autograd leaves out from now on."""

    def __init__(self, stage: Decoder, device: torch.device, tp_parts: tuple[int, int]) -> None:
        """A block's Linears take all `tp_parts` (Plan) of what the block itself takes one of."""
        self.tp_parts = tp_parts
        self.pending: Products = []
        dtype = stage.compute_dtype or torch.float32
        self.start = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
        for block in stage.blocks.values():
            linears: list[Any] = [
                each
                for each in block.modules()
                if isinstance(each, Linear) and each.weight.requires_grad
            ]
            if not linears:  # frozen: what adapters learn autograd computes with the first part
                continue
            for linear in linears:
                linear.tap = linear.seen = None
                linear.instead = _product_with_tap
            block.forward = functools.partial(self._forward, linears, block.forward)

    def take(self) -> Callable[[], None]:
        """The second part of the backward passes since the last call, to be run once."""
        products = self.pending
        self.pending = []
        return functools.partial(_add_weight_gradients, products)

    def _forward(
        self, linears: list[Any], forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return forward(x)
        samples, tokens = self.tp_parts
        whole = (x.shape[0] * samples, x.shape[1] * tokens)
        shapes = [(*whole, local_part(linear.weight).shape[0]) for linear in linears]
        inputs: list[torch.Tensor] = []

        def keep(gradients: tuple[torch.Tensor, ...]) -> None:
            self.pending += zip(linears, inputs, gradients, strict=True)

        taps = _Taps.apply(self.start, shapes, keep)
        for linear, tap in zip(linears, taps, strict=True):
            linear.tap = tap
        out = forward(x)
        for linear in linears:
            inputs.append(linear.seen)
            linear.tap = linear.seen = None
        return out


def _product_with_tap(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """A Linear's product that notes its input and gives its output's gradient to a tap, if any."""
    if linear.tap is None:
        return linear.product(x)
    assert linear.seen is None, "a block calls each of its Linears once"
    linear.seen = local_part(x.detach())
    y = F.linear(x, linear.weight.detach().to(x.dtype), linear.own_bias(x.dtype))
    if not isinstance(y, DTensor):
        return _Tapped.apply(y, linear.tap)
    # The gradient of a sum is that of each of its terms.
    grad_placements = [Replicate() if place.is_partial() else place for place in y.placements]
    tapped = _Tapped.apply(y.to_local(grad_placements=grad_placements), linear.tap)
    return DTensor.from_local(tapped, y.device_mesh, y.placements, run_check=False)


class _Tapped(torch.autograd.Function):
    """y as it is; its gradient is also the tap's."""

    @staticmethod
    def forward(ctx, y, tap):  # type: ignore[no-untyped-def]
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, gradient


class _Taps(torch.autograd.Function):
    """Taps of `shapes`, which take no memory; backward hands all their gradients to `keep`."""

    @staticmethod
    def forward(ctx, start, shapes, keep):  # type: ignore[no-untyped-def]
        ctx.keep = keep
        return tuple(start.expand(shape) for shape in shapes)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        # The last stage's losses, and with them this node, live until the end of the step.
        keep = ctx.keep
        ctx.keep = None
        keep(gradients)
        return None, None, None


@torch.no_grad()
def _add_weight_gradients(products: Products) -> None:
    """Add this process's parts of them to .grad, in fp32 as autograd and FSDP do it."""
    for linear, x, dy in products:
        weight: Any = linear.weight
        if weight.grad is None:
            weight.grad_dtype = torch.float32
            weight.grad = torch.zeros_like(weight, dtype=torch.float32)
        local_part(weight.grad).add_(dy.flatten(0, -2).t() @ x.flatten(0, -2))


class GivenOrder(schedules._PipelineScheduleRuntime):
    """Processes that work in given orders, of forward passes and halves of backward ones. With
    `spans` messages are sent and awaited in the order in which they are made by them: torch's own
    order assumes equal durations, and a receive that comes too early holds up what is ready."""

    def __init__(
        self,
        stages: list[Any],
        orders: Sequence[Order],
        spans: Mapping[Operation, tuple[float, float]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(stages, **options)
        self.pipeline_order = {
            rank: [schedules._Action(stage, _COMPUTING[kind], n) for kind, stage, n in order]
            for rank, order in enumerate(orders)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
        if spans is not None:
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
