"""Build AdamW with Adam moments in fp32 or in lower precision.

The second moment is a mean over about 1,000 steps, so it shrinks by at most about a thousandth per
step. Half the distance between neighboring bf16 values is two to four thousandths of their
magnitude. With rounding to nearest, the second moment could therefore never shrink. Stochastic
rounding rounds up or down with probabilities that keep the mean exact."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from distributed_training.engines.base import ADAM, MOMENTS
from distributed_training.parallel.tensor_files import Part
from distributed_training.settings.config import RunConfig

# Maximum number of values per update. If the update is not compiled, the limit saves memory.
MAX_CHUNK_SIZE = 2**24


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float
) -> list[dict[str, object]]:
    """Return the parameters that require gradients as groups for AdamW. Weight decay applies to
    matrices, but not to biases and norms, which are one-dimensional."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    config: RunConfig, groups: list[dict[str, Any]], device: torch.device
) -> torch.optim.Optimizer:
    """Return the AdamW variant that `config` selects. A CUDA graph can capture the optimizer's
    step."""
    lr = float(config.learning_rate)
    compiled = bool(config.compile)
    if config.optimizer == "adamw-8bit":
        from distributed_training.engines.adamw_8bit import AdamW8bit

        return AdamW8bit(groups, lr, compiled=compiled)
    if config.optimizer == "adamw-bf16":
        return AdamWBf16(groups, lr, compiled=compiled)
    on_gpu = device.type == "cuda"
    return AdamW(groups, lr, fused=on_gpu, capturable=on_gpu, **ADAM)


def moment_part(part: Part, moment: torch.Tensor) -> Part:
    """Return a copy of `part` that reads and writes the Adam moment `moment` instead of the weight.
    The moment is converted to fp32 when it is read, and converted back when it is written."""
    unpadded = tuple(map(slice, part.size))

    def write(values: torch.Tensor) -> None:
        padded = torch.zeros(moment.shape, device=moment.device)
        padded[unpadded] = values.to(moment.device)
        if hasattr(moment, "codes"):
            from distributed_training.engines.adamw_8bit import requantize

            requantize(moment, padded)
        else:
            moment.copy_(padded)

    # If a tensor is not quantized, `dequantize` converts it to fp32.
    return replace(part, get=lambda: moment.dequantize()[unpadded], write=write)


class AdamW(torch.optim.AdamW):
    """AdamW from torch.optim, with a method that creates its state before the first step."""

    def init_state(self, parameter: torch.Tensor, step: torch.Tensor) -> None:
        """Set a parameter's Adam moments to 0 and its step counter to `step`."""
        moments = {key: torch.zeros_like(parameter) for key in MOMENTS}
        self.state[parameter] = {"step": step.clone(), **moments}


class AdamWBf16(torch.optim.Optimizer):
    """AdamW for fp32 parameters, with Adam moments in bf16 that are rounded stochastically."""

    found_inf: torch.Tensor | None = None  # 1 skips the update, as in torch's fused AdamW

    def __init__(self, groups: list[dict[str, Any]], lr: float, *, compiled: bool) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.01})
        # One compiled function serves parameters of all sizes.
        self.update = torch.compile(_update, dynamic=True) if compiled else _update

    def init_state(self, parameter: torch.Tensor, step: torch.Tensor) -> None:
        """Set a parameter's Adam moments to 0. All parameters share the tensor `step`."""
        moments = {key: torch.zeros_like(parameter, dtype=torch.bfloat16) for key in MOMENTS}
        self.state[parameter] = {"step": step, **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if not self.state:
            step = torch.zeros((), device=parameters[0].device)
            for parameter in parameters:
                self.init_state(parameter, step)
        step = self.state[parameters[0]]["step"]
        skip = None if self.found_inf is None else self.found_inf > 0
        step += 1 if skip is None else ~skip
        beta1, beta2 = ADAM["betas"]
        bias_correction2_rsqrt = (1 - beta2**step).rsqrt()
        for group in self.param_groups:
            scalars = {
                "decay": 1 - group["lr"] * group["weight_decay"],
                "step_size": group["lr"] / (1 - beta1**step),
                "bias_correction2_rsqrt": bias_correction2_rsqrt,
                "step": step.int(),
                "skip": skip,
            }
            for parameter in group["params"]:
                for chunk in self._chunks(parameter):
                    self.update(*chunk, **scalars)

    def _chunks(self, parameter: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield pieces of the flattened parameter, gradient and Adam moments. Each piece has at
        most MAX_CHUNK_SIZE values."""
        if parameter.grad is None or parameter.numel() == 0:
            return
        moments = (self.state[parameter][key].view(-1) for key in MOMENTS)
        flat = (parameter.detach().view(-1), parameter.grad.flatten(), *moments)
        yield from zip(*(tensor.split(MAX_CHUNK_SIZE) for tensor in flat), strict=True)


def _update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    decay: torch.Tensor,
    step_size: torch.Tensor,
    bias_correction2_rsqrt: torch.Tensor,
    step: torch.Tensor,
    skip: torch.Tensor | None,
) -> None:
    """Apply AdamW (arXiv 1711.05101, algorithm 2) to flat tensors in place, unless `skip` is True.

    The optimizer state is rounded stochastically to bf16. The random bits for the rounding are a
    hash of the weight, its gradient and the step. All replicas and all layouts therefore round in
    the same way, and the state of the random number generators has no effect."""
    beta1, beta2 = ADAM["betas"]
    new_exp_avg = exp_avg.float().lerp(gradient, 1 - beta1)
    new_exp_avg_sq = exp_avg_sq.float().lerp(gradient * gradient, 1 - beta2)
    updated = parameter * decay - step_size * new_exp_avg / (
        new_exp_avg_sq.sqrt() * bias_correction2_rsqrt + ADAM["eps"]
    )
    bits = _hash_int32(
        parameter.view(torch.int32) ^ _hash_int32(gradient.view(torch.int32) ^ _hash_int32(step))
    )
    rounded_moments = (
        _round_to_bf16(new_exp_avg, bits),
        _round_to_bf16(new_exp_avg_sq, bits >> 16),
    )
    for old, new in zip((exp_avg, exp_avg_sq, parameter), (*rounded_moments, updated), strict=True):
        old.copy_(new if skip is None else torch.where(skip, old, new))


def _hash_int32(bits: torch.Tensor) -> torch.Tensor:
    """Hash int32 values with lowbias32 from hash-prospector. lowbias32 shifts in zeros, but torch
    shifts in copies of the sign bit, so these copies are masked out."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * -0x7B935975  # 0x846CA68B as int32
    return bits ^ ((bits >> 16) & 0xFFFF)


def _round_to_bf16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 values stochastically to bf16, which consists of the upper 16 bits of fp32. The
    probability of rounding up is proportional to the distance from the lower neighbor."""
    raised = values.view(torch.int32) + (bits & 0xFFFF)
    return (raised & -0x10000).view(torch.float32).bfloat16()
