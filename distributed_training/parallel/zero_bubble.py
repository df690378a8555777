"""Split the backward pass into two parts, so that the second part can fill idle time in a pipeline
(arXiv 2401.10241).

The first part computes the gradients that the previous stage waits for. The second part computes
the gradients of the blocks' matrices. Autograd cannot stop in the middle of a compiled block, so
the matrices are hidden from autograd. Each matrix multiplication x W^T has a tap, which is an extra
input whose gradient is dY, the gradient of the output. The second part computes dW = dY^T x from
the saved x and dY. Together, the two parts compute the same gradients as a whole backward
pass."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate

from distributed_training.models.decoder import Decoder, Linear
from distributed_training.parallel.gradients import local_part

PendingMatmuls = list[
    tuple[Linear, torch.Tensor, torch.Tensor]
]  # (layer, x [.., in], dY [.., out])


class WeightGradients:
    """Weight gradients of the matrices in one stage's blocks, computed outside autograd."""

    def __init__(self, stage: Decoder, device: torch.device, tp_parts: tuple[int, int]) -> None:
        """Add taps to the stage's blocks. `tp_parts` contains the numbers of parts into which
        sequence parallelism splits a block's input (see Plan). Inside the block, the inputs of the
        Linears are not split."""
        self.tp_parts = tp_parts
        self.pending: PendingMatmuls = []
        dtype = stage.compute_dtype or torch.float32
        self.tap_source = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
        for block in stage.blocks.values():
            linears: list[Any] = [
                module
                for module in block.modules()
                if isinstance(module, Linear) and module.weight.requires_grad
            ]
            # If the block is frozen, autograd computes the gradients of adapters in the first part.
            if not linears:
                continue
            for linear in linears:
                linear.tap = linear.saved_input = None
                linear.matmul_override = _matmul_with_tap
            block.forward = functools.partial(self._forward, linears, block.forward)

    def build_dw_runner(self) -> Callable[[], None]:
        """Return a function that computes the weight gradients of all backward passes since the
        last call of this method."""
        matmuls = self.pending
        self.pending = []
        return functools.partial(_add_weight_gradients, matmuls)

    def _forward(
        self,
        linears: list[Any],
        forward: Callable[..., torch.Tensor],
        x: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return forward(x, **options)
        samples, tokens = self.tp_parts
        batch_shape = (x.shape[0] * samples, x.shape[1] * tokens)
        shapes = [(*batch_shape, local_part(linear.weight).shape[0]) for linear in linears]
        inputs: list[torch.Tensor] = []

        def save_gradients(gradients: tuple[torch.Tensor, ...]) -> None:
            self.pending += zip(linears, inputs, gradients, strict=True)

        taps = _CreateTaps.apply(self.tap_source, shapes, save_gradients)
        for linear, tap in zip(linears, taps, strict=True):
            linear.tap = tap
        out = forward(x, **options)
        for linear in linears:
            inputs.append(linear.saved_input)
            linear.tap = linear.saved_input = None
        return out


def _matmul_with_tap(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a Linear. If the Linear has a tap, save the input and pass the gradient
    of the output to the tap."""
    if linear.tap is None:
        return linear.matmul(x)
    assert linear.saved_input is None, "a block calls each of its Linears once"
    linear.saved_input = local_part(x.detach())
    y = F.linear(x, linear.weight.detach().to(x.dtype), linear.cast_bias(x.dtype))
    if not isinstance(y, DTensor):
        return _AttachTap.apply(y, linear.tap)
    # If y is a partial sum, the gradient of the sum is also the gradient of each rank's term, so
    # the gradient is replicated.
    grad_placements = [
        Replicate() if placement.is_partial() else placement for placement in y.placements
    ]
    tapped = _AttachTap.apply(y.to_local(grad_placements=grad_placements), linear.tap)
    return DTensor.from_local(tapped, y.device_mesh, y.placements, run_check=False)


class _AttachTap(torch.autograd.Function):
    """Autograd function that returns a tensor unchanged and passes the tensor's gradient to a tap
    as well."""

    @staticmethod
    def forward(ctx, y, tap):  # type: ignore[no-untyped-def]
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, gradient


class _CreateTaps(torch.autograd.Function):
    """Autograd function that creates taps with the given `shapes`. The taps use no memory. In the
    backward pass, `save_gradients` receives the gradients of the taps."""

    @staticmethod
    def forward(ctx, tap_source, shapes, save_gradients):  # type: ignore[no-untyped-def]
        ctx.save_gradients = save_gradients
        return tuple(tap_source.expand(shape) for shape in shapes)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        # Drop the reference, because the losses keep this node alive until the end of the step.
        save_gradients = ctx.save_gradients
        ctx.save_gradients = None
        save_gradients(gradients)
        return None, None, None


@torch.no_grad()
def _add_weight_gradients(matmuls: PendingMatmuls) -> None:
    """Add this rank's shards of the weight gradients to the weights' `.grad`, in fp32 as in
    FSDP."""
    for linear, x, dy in matmuls:
        weight: Any = linear.weight
        if weight.grad is None:
            weight.grad_dtype = torch.float32
            weight.grad = torch.zeros_like(weight, dtype=torch.float32)
        local_part(weight.grad).add_(dy.flatten(0, -2).t() @ x.flatten(0, -2))
