"""torchao's AdamW with moments in 8 bits, which is an optional package."""

import contextlib
import logging
from typing import Any

import torch

from distributed_training.engines.base import ADAM

logging.getLogger("torchao").setLevel(logging.ERROR)  # it names kernels that this machine lacks

import torchao.optim  # noqa: E402


class AdamW8bit(torchao.optim.AdamW8bit):  # type: ignore[misc]
    """Blocks of 256 values share a scale (Dettmers et al., 2110.02861). Parameters with fewer than
    4096 values, or with parts of a block, keep fp32 moments."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, *, compiled: bool) -> None:
        super().__init__(groups, lr, **ADAM)
        self.compiled = compiled

    def begin(self, parameter: torch.Tensor, step: torch.Tensor) -> None:
        """Give a parameter zero moments. torchao would keep the step on the host, where a CUDA
        graph cannot count it."""
        first, second = (self._new_buffer(parameter, signed) for signed in (True, False))
        self.state[parameter] = {"step": step.clone(), "exp_avg": first, "exp_avg_sq": second}

    def step(self, closure: None = None) -> None:
        if not self.state:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.begin(parameter, torch.zeros((), device=parameter.device))
        stance = contextlib.nullcontext()
        if not self.compiled:
            stance = torch.compiler.set_stance("force_eager")
        with stance:
            super().step()
