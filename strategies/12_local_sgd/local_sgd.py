"""Local SGD (Stich, 1805.09767) and DiLoCo (Douillard et al., 2311.08105) over AdamW.

Each replica takes `local_steps` steps with its own gradients, then all of them meet. Local SGD goes
on from the mean of their weights. DiLoCo takes one Nesterov step from the weights of the last
meeting towards that mean. AdamW's moments stay each replica's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn as nn

from distributed_training.data.samples import StepBatch
from distributed_training.engines.base import MOMENTS, StepResult
from distributed_training.engines.native import NativeEngine
from distributed_training.models.decoder import Decoder
from distributed_training.parallel.gradients import average
from distributed_training.parallel.tensor_files import Part, TensorFiles
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology


class LocalSGD(NativeEngine):
    """Replicas that part for `local_steps` steps; what others see is always their mean."""

    def __init__(self, model: Decoder, plan: Plan, topology: Topology) -> None:
        super().__init__(model, plan, topology)
        self.options = plan.options
        # Clipping and Adam are not linear: with one local step only the mean of the *gradients*
        # gives what dp computes, and then the weights never part.
        self.averages_gradients = self.options.local_steps == 1 and self.options.averages
        self.since = 0  # steps since the replicas met
        self.own: list[torch.Tensor] | None = None  # weights, while the mean is in their place
        self.outer: torch.optim.SGD | None = None
        if not self.options.averages:
            start = [parameter.detach().clone() for parameter in self.parameters]
            rate, momentum = self.options.outer_lr, self.options.outer_momentum
            self.outer = torch.optim.SGD(start, rate, momentum, nesterov=momentum > 0)

    def _replicate(self, part: Decoder) -> nn.Module:
        return part  # no DDP: the backward pass exchanges nothing

    def train_step(self, batch: StepBatch) -> StepResult:
        self._take_own()
        return super().train_step(batch)

    def _update(self) -> torch.Tensor:
        if self.averages_gradients:
            average([parameter.grad for parameter in self.parameters])
        norm = super()._update()
        self.since = (self.since + 1) % self.options.local_steps
        if self.since == 0 and not self.averages_gradients:
            self._meet()
        return norm

    @torch.no_grad()
    def _meet(self) -> None:
        average(self.parameters)
        if self.outer is None:
            return
        start = self.outer.param_groups[0]["params"]
        for old, mean in zip(start, self.parameters, strict=True):
            old.grad = old - mean
        self.outer.step()
        self.outer.zero_grad()
        for new, parameter in zip(start, self.parameters, strict=True):
            parameter.copy_(new)

    def eval_step(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        self._take_mean()
        return super().eval_step(inputs, targets)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        self._take_mean()
        return super().logits(input_ids)

    def full_state(self) -> dict[str, torch.Tensor] | None:
        self._take_mean()
        return super().full_state()

    def _take_mean(self) -> None:
        """Between two meetings: put the replicas' mean in the place of the weights."""
        if self.since and self.own is None:
            self.own = [parameter.detach().clone() for parameter in self.parameters]
            average(self.parameters)

    @torch.no_grad()
    def _take_own(self) -> None:
        for parameter, own in zip(self.parameters, self.own or (), strict=bool(self.own)):
            parameter.copy_(own)
        self.own = None

    def state_parts(self) -> Iterator[Part]:
        self._take_mean()
        return super().state_parts()

    def load(self, saved: TensorFiles, counters: dict[str, float]) -> None:
        self.since, self.own = 0, None
        super().load(saved, counters)

    def own_state(self) -> dict[str, torch.Tensor]:
        """Each replica's own weights and moments, and what the outer step remembers."""
        if self.averages_gradients:
            return {}
        state = {"since": torch.tensor([float(self.since)])}
        for number, parameter in enumerate(self.parameters):
            held = self.optimizer.state.get(self.local[parameter], {})
            state |= {f"{name}/{number}": held[name] for name in MOMENTS if name in held}
            state[f"weight/{number}"] = parameter if self.own is None else self.own[number]
        for number, start in enumerate(self.outer.param_groups[0]["params"] if self.outer else ()):
            state[f"start/{number}"] = start
            if (momentum := self.outer.state[start].get("momentum_buffer")) is not None:
                state[f"momentum/{number}"] = momentum
        return state

    @torch.no_grad()
    def load_own(self, state: dict[str, torch.Tensor]) -> None:
        for key, tensor in state.items():
            name, _, number = key.partition("/")
            if name == "since":
                self.since = int(tensor)
                continue
            parameter = self.parameters[int(number)]
            start = self.outer and self.outer.param_groups[0]["params"][int(number)]
            if name == "momentum":
                self.outer.state[start]["momentum_buffer"] = tensor.to(start.device)
            else:
                held = {
                    "weight": parameter,
                    "start": start,
                    **self.optimizer.state[self.local[parameter]],
                }
                held[name].copy_(tensor)
