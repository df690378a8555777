"""fp32 parameters that are rounded once a step and not for each of its micro-batches."""

from __future__ import annotations

import torch
import torch.nn as nn

from distributed_training.parallel.gradients import local_part
from distributed_training.parallel.private import foreach_copy_


class RoundedWeights:
    """A module's parameters rounded to a narrower dtype, in their place while it computes.

    For a part of the model that no data axis divides: FSDP does the same where one does. Inside
    `with` the module has the rounded copies, 2 bytes a parameter that stay allocated; autograd
    adds their gradients up in fp32, and at the end they are the fp32 parameters' own.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.places = [
            (owner, name)
            for owner in module.modules()
            for name, _ in owner.named_parameters(recurse=False)
        ]
        self.parameters = [getattr(owner, name) for owner, name in self.places]
        self.copies = [nn.Parameter(p.detach().to(dtype)) for p in self.parameters]
        for copy in self.copies:
            copy.grad_dtype = torch.float32  # what accumulates into .grad

    @torch.no_grad()
    def __enter__(self) -> None:
        foreach_copy_(
            [local_part(copy) for copy in self.copies],
            [local_part(parameter) for parameter in self.parameters],
        )
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            copy.grad, parameter.grad = parameter.grad, None
        self._put(self.copies)

    def __exit__(self, *_error: object) -> None:
        self._put(self.parameters)
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            copy.grad, parameter.grad = None, copy.grad

    def _put(self, parameters: list[nn.Parameter]) -> None:
        for (owner, name), parameter in zip(self.places, parameters, strict=True):
            setattr(owner, name, parameter)
