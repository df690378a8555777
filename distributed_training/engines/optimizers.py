"""Build AdamW with Adam moments, and optionally weights, in lower precision.

The second moment is a mean over about 1,000 steps, so it shrinks by at most about a thousandth per
step. Half the distance between neighboring bf16 values is two to four thousandths of their
magnitude. With rounding to nearest, the second moment could therefore never shrink, and weights
would ignore most updates. Stochastic rounding rounds up or down with probabilities that keep the
mean exact."""

import operator
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn

from distributed_training.engines.base import ADAM, MOMENTS
from distributed_training.models.private import locate_local
from distributed_training.settings.config import RunConfig

# Maximum number of values per update. If the update is not compiled, the limit saves memory.
MAX_CHUNK_SIZE = 2**24


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float
) -> list[dict[str, object]]:
    """Return the parameters that require gradients as groups for AdamW. Weight decay applies to
    matrices, but not to biases and norms, which are one-dimensional."""
    matrices: dict[str, Any] = {"params": [], "weight_decay": weight_decay}
    vectors: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for parameter in parameters:
        if parameter.requires_grad:
            group = matrices if parameter.dim() >= 2 else vectors
            group["params"].append(parameter)
    return [group for group in (matrices, vectors) if group["params"]]


def build_optimizer(
    config: RunConfig, lr: torch.Tensor, origins: Mapping[torch.Tensor, tuple[str, torch.Tensor]]
) -> torch.optim.Optimizer:
    """Return the AdamW variant that `config` selects. A CUDA graph can capture the optimizer's
    step, which reads the learning rate from the tensor `lr`. If they are set, the step divides
    gradients by the attribute `grad_scale`, and skips the update if the attribute `found_inf` is 1.

    `origins` maps each parameter of the optimizer to the name and the DTensor of the parameter
    whose shard it is. The DTensor is the parameter itself if it is not sharded."""
    groups = parameter_groups(origins, config.weight_decay)
    if config.optimizer != "adamw":
        return AdamWBf16(groups, lr, origins, config.seed, compiled=config.compile)
    return torch.optim.AdamW(groups, lr, fused=True, capturable=True, **ADAM)


def init_state(optimizer: torch.optim.Optimizer, step: torch.Tensor) -> None:
    """Set the Adam moments of all parameters to 0 and their step counters to `step`. AdamWBf16 has
    one counter for all parameters, and its Adam moments are in bf16."""
    is_bf16 = isinstance(optimizer, AdamWBf16)
    dtype = torch.bfloat16 if is_bf16 else None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {key: torch.zeros_like(parameter, dtype=dtype) for key in MOMENTS}
            counter = step if is_bf16 else step.clone()
            optimizer.state[parameter] = {"step": counter, **moments}


class AdamWBf16(torch.optim.Optimizer):
    """AdamW with Adam moments in bf16 that are rounded stochastically. Weights are fp32 or, also
    with stochastic rounding, bf16."""

    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: torch.Tensor,
        origins: Mapping[torch.Tensor, tuple[str, torch.Tensor]],
        seed: int,
        *,
        compiled: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.01})
        # One compiled function serves parameters of all sizes.
        self.update = torch.compile(_update, dynamic=True) if compiled else _update
        self.chunk_size = sys.maxsize if compiled else MAX_CHUNK_SIZE
        keys = []
        firsts = []
        # Parameter -> (values per row of the shard, values between two of its rows), or None if the
        # shard's rows are consecutive in the whole parameter
        self.rows = {}
        for local, (name, parameter) in origins.items():
            _, start = locate_local(parameter)
            keys.append(zlib.crc32(f"{seed} {name}".encode()))
            firsts.append(sum(map(operator.mul, start, parameter.stride())))
            gap = parameter.stride(0) - local.stride(0)
            self.rows[local] = (local.stride(0), gap) if gap else None
        # Hash keys of the parameters and flat indices of the shards' first values
        self.keys = torch.tensor(keys, device=local.device)
        self.firsts = torch.tensor(firsts, device=local.device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        step = next(iter(self.state.values()))["step"]
        skip = None
        if self.found_inf is None:
            step += 1
        else:
            skip = self.found_inf > 0
            step += torch.where(skip, 0, 1)
        beta1, beta2 = ADAM["betas"]
        bias_correction2_rsqrt = (1 - beta2**step).rsqrt()
        step_key = _hash_int32(step.int())
        keys = dict(zip(self.rows, _hash_int32(self.keys.int() ^ step_key).long(), strict=True))
        firsts = dict(zip(self.rows, self.firsts, strict=True))
        for group in self.param_groups:
            scalars = {
                "decay": 1 - group["lr"] * group["weight_decay"],
                "step_size": group["lr"] / (1 - beta1**step),
                "bias_correction2_rsqrt": bias_correction2_rsqrt,
                "grad_scale": self.grad_scale,
                "skip": skip,
            }
            for parameter in group["params"]:
                for offset, *chunk in self._chunks(parameter):
                    self.update(
                        *chunk,
                        offset=offset,
                        rows=self.rows[parameter],
                        first=firsts[parameter],
                        key=keys[parameter],
                        **scalars,
                    )

    def _chunks(self, parameter: torch.Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield the index of the first value and the pieces of the flattened parameter, gradient
        and Adam moments. Each piece has at most `chunk_size` values."""
        if parameter.grad is None or parameter.numel() == 0:
            return
        moments = (self.state[parameter][key].view(-1) for key in MOMENTS)
        flat = (parameter.detach().view(-1), parameter.grad.flatten(), *moments)
        pieces = (tensor.split(self.chunk_size) for tensor in flat)
        for number, chunk in enumerate(zip(*pieces, strict=True)):
            yield number * self.chunk_size, *chunk


def _update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    offset: int,
    rows: tuple[int, int] | None,
    first: torch.Tensor,
    key: torch.Tensor,
    decay: torch.Tensor,
    step_size: torch.Tensor,
    bias_correction2_rsqrt: torch.Tensor,
    grad_scale: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """Apply AdamW (arXiv 1711.05101, algorithm 2) to flat tensors in place, unless `skip` is True.

    Values in bf16 are rounded stochastically. The random bits are a hash of `key`, which depends on
    the seed, the parameter's name and the step, and of the value's flat index in the whole
    parameter. All replicas and all layouts therefore round in the same way, and the state of the
    random number generators has no effect. `offset` is the index of the first value in the shard,
    and `first` is the flat index of the shard's first value. `rows` is described in `AdamWBf16`."""
    beta1, beta2 = ADAM["betas"]
    gradient = gradient.float()
    if grad_scale is not None:
        gradient = gradient / grad_scale
    new_exp_avg = exp_avg.float().lerp(gradient, 1 - beta1)
    new_exp_avg_sq = exp_avg_sq.float().lerp(gradient * gradient, 1 - beta2)
    updated = parameter.float() * decay - step_size * new_exp_avg / (
        new_exp_avg_sq.sqrt() * bias_correction2_rsqrt + ADAM["eps"]
    )
    # In Triton, an index is int64 even if it is int32 here (torch 2.11). Only values that depend on
    # loaded tensors are converted.
    index = torch.arange(offset, offset + len(parameter), device=parameter.device)
    if rows is not None:
        row_size, gap = rows
        index = index + index // row_size * gap
    bits = _hash_int32(((index + first) ^ key).int())
    if parameter.dtype is torch.bfloat16:
        updated = _round_to_bf16(updated, _hash_int32(bits))
    results = (
        (exp_avg, _round_to_bf16(new_exp_avg, bits)),
        (exp_avg_sq, _round_to_bf16(new_exp_avg_sq, bits >> 16)),
        (parameter, updated),
    )
    for old, new in results:
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
