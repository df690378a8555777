"""Define AdamW with 8-bit Adam moments. This module requires the optional package torchao."""

from typing import Any

import torch
import torchao.optim

from distributed_training.engines.base import ADAM
from distributed_training.parallel.private import new_8bit_moment


class AdamW8bit(torchao.optim.AdamW8bit):  # type: ignore[misc]
    """AdamW that stores its Adam moments in 8 bits, with one scale per block of 256 values
    (Dettmers et al., arXiv 2110.02861). If a parameter has fewer than 4,096 values or an incomplete
    block, its Adam moments are stored in fp32."""

    is_fused = False

    def __init__(self, groups: list[dict[str, Any]], lr: float, *, compiled: bool) -> None:
        super().__init__(groups, lr, **ADAM)
        self.compiled = compiled

    def init_state(self, parameter: torch.Tensor, step: torch.Tensor) -> None:
        """Set a parameter's Adam moments to 0 and its step counter to `step`. torchao would keep
        the counter on the host, where a CUDA graph cannot increment it."""
        self.state[parameter] = {
            "step": step.clone(),
            "exp_avg": new_8bit_moment(self, parameter, signed=True),
            "exp_avg_sq": new_8bit_moment(self, parameter, signed=False),
        }

    def step(self, closure: None = None) -> None:
        with torch.compiler.set_stance("default" if self.compiled else "force_eager"):
            super().step()


def requantize(moment: Any, values: torch.Tensor) -> None:
    """Quantize `values` into `moment`. If `values` were dequantized from a moment with the same
    blocks, the codes stay the same. The scales change at most in the last bit.

    The scale of a block is not always the largest magnitude in the block. A scale can be larger
    because there is a code for 1 but none for -1, and because no scale is smaller than 1e-12."""
    blocks = values.view(len(moment.scale), -1)
    scale = blocks.amax(1)
    if moment.signed:
        scale = torch.maximum(scale, blocks.amin(1) / moment.qmap[0])
    scale = scale.clamp(min=1e-12)
    midpoints = (moment.qmap[1:] + moment.qmap[:-1]) / 2
    codes = torch.searchsorted(midpoints, blocks / scale[:, None])
    moment.codes.copy_(codes.view(moment.codes.shape))
    moment.scale.copy_(scale)
