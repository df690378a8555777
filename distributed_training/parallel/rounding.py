"""fp32 parameters that are rounded once a step and not for each of its micro-batches."""

from __future__ import annotations

from types import TracebackType

import torch
import torch.nn as nn

from distributed_training.errors import UserError
from distributed_training.gradients import local_part


class RoundedWeights:
    """A module's parameters rounded to a narrower dtype, in their place while it computes.

    For a part of the model that no data axis divides: FSDP does the same where one does. Outside
    `with` the module has its fp32 parameters, for the optimizer, evaluation and checkpoints. Inside
    it has the rounded copies, 2 bytes a parameter that stay allocated; autograd adds their
    gradients up in fp32 over all backward passes, and at the end they are the parameters' own.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Raises UserError where torch is too old to accumulate in another dtype."""
        if not hasattr(torch.Tensor, "grad_dtype"):
            raise UserError(
                f"pipeline stages in {str(dtype).removeprefix('torch.')} need torch 2.11 or newer",
                f"this is {torch.__version__}",
                fix="install it, or set precision='fp32'",
            )
        self.places: list[tuple[nn.Module, str]] = []
        self.parameters: list[nn.Parameter] = []
        self.copies: list[nn.Parameter] = []
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                copy = nn.Parameter(parameter.detach().to(dtype))
                copy.grad_dtype = torch.float32  # what accumulates into .grad
                self.places.append((owner, name))
                self.parameters.append(parameter)
                self.copies.append(copy)

    @torch.no_grad()
    def __enter__(self) -> None:
        torch._foreach_copy_(
            [local_part(copy) for copy in self.copies],
            [local_part(parameter) for parameter in self.parameters],
        )
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            copy.grad, parameter.grad = parameter.grad, None
        self._put(self.copies)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._put(self.parameters)
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            copy.grad, parameter.grad = None, copy.grad

    def _put(self, parameters: list[nn.Parameter]) -> None:
        for (owner, name), parameter in zip(self.places, parameters, strict=True):
            owner._parameters[name] = parameter
