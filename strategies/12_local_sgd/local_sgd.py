"""Local SGD (Stich, 1805.09767) and DiLoCo (Douillard et al., 2311.08105) over AdamW.

Each replica takes `local_steps` steps with its own gradients, then all of them meet. Local SGD goes
on from the mean of their weights. DiLoCo takes one Nesterov step from the weights of the last
meeting towards that mean. AdamW's moments stay each replica's own.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from distributed_training.data.samples import StepBatch
from distributed_training.engines.base import MOMENTS, StepResult
from distributed_training.engines.native import NativeEngine
from distributed_training.models.decoder import Decoder, Past
from distributed_training.parallel.gradients import average
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.tensor_files import Part, TensorFiles
from distributed_training.plan.plan import Plan
from distributed_training.settings.strategies import strategy_options


class LocalSGD(NativeEngine):
    """Replicas that part for `local_steps` steps; what others see is always their mean."""

    def __init__(self, model: Decoder, plan: Plan, topology: Topology) -> None:
        super().__init__(model, plan, topology)
        options: Any = strategy_options(plan.strategy.name)(**plan.engine_options)
        self.options = options
        # Clipping and Adam are not linear: with one local step only the mean of the *gradients*
        # gives what dp computes, and then the weights never part.
        self.averages_gradients = options.local_steps == 1 and options.averages
        self.since = 0  # steps since the replicas met
        self.own: list[torch.Tensor] = []  # weights, while the mean is in their place
        self.outer: torch.optim.SGD | None = None
        if not options.averages:
            self._begin_outer()

    def _begin_outer(self) -> None:
        """Take the weights for those of the last meeting, and remember no momentum."""
        momentum = self.options.outer_momentum
        self.starts = [parameter.detach().clone() for parameter in self.parameters]
        self.outer = torch.optim.SGD(
            self.starts, self.options.outer_lr, momentum, nesterov=momentum > 0
        )
        if momentum:  # as after a first step, for load_own
            for start in self.starts:
                self.outer.state[start]["momentum_buffer"] = torch.zeros_like(start)

    def replicate(self, part: Decoder) -> nn.Module:
        return part  # no DDP: the backward pass exchanges nothing

    def train_step(self, batch: StepBatch) -> StepResult:
        self._take_own()
        return super().train_step(batch)

    def update(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.averages_gradients:
            gradients = [parameter.grad for parameter in self.parameters]
            average([gradient for gradient in gradients if gradient is not None])
        norms = super().update()
        self.since = (self.since + 1) % self.options.local_steps
        if self.since == 0 and not self.averages_gradients:
            self._meet()
        return norms

    @torch.no_grad()
    def _meet(self) -> None:
        average(self.parameters)
        if self.outer is not None:
            for start, mean in zip(self.starts, self.parameters, strict=True):
                start.grad = start - mean
            self.outer.step()
            self.outer.zero_grad()
            for start, mean in zip(self.starts, self.parameters, strict=True):
                mean.copy_(start)

    def eval_step(self, *arrays: np.ndarray) -> torch.Tensor:
        self._take_mean()
        return super().eval_step(*arrays)

    def logits(self, input_ids: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        self._take_mean()
        return super().logits(input_ids, past)

    def _take_mean(self) -> None:
        """Between two meetings: put the replicas' mean in the place of the weights."""
        if self.since and not self.own:
            self.own = [parameter.detach().clone() for parameter in self.parameters]
            average(self.parameters)

    @torch.no_grad()
    def _take_own(self) -> None:
        if self.own:
            for parameter, own in zip(self.parameters, self.own, strict=True):
                parameter.copy_(own)
            self.own = []

    def state_parts(self) -> Iterator[Part]:
        self._take_mean()
        return super().state_parts()

    def load(self, saved: TensorFiles, counters: dict[str, float]) -> None:
        """The replicas begin together, at the saved mean; `load_own` knows better where it can."""
        super().load(saved, counters)
        self.since = 0
        self.own = []
        if self.outer is not None:
            self._begin_outer()

    def own_state(self) -> dict[str, torch.Tensor]:
        """Each replica's own weights and moments, how far it is (in fp16 one may have left out a
        step, and has a loss scale of its own), and what the outer step remembers."""
        if self.averages_gradients:
            return {}
        own = self.counters()
        counts = [self.since, own["adam_steps"], own["loss_scale"], own["good_steps"]]
        state = {"counts": torch.tensor(counts, dtype=torch.float32)}
        for name, tensors in self._own_tensors().items():
            state |= {f"{name}/{number}": tensor for number, tensor in enumerate(tensors)}
        return state

    @torch.no_grad()
    def load_own(self, state: dict[str, torch.Tensor]) -> None:
        if not state:
            return
        since, adam_steps, loss_scale, good_steps = state["counts"].tolist()
        self.since = int(since)
        self.loss_scale.fill_(loss_scale)
        self._good_steps.fill_(good_steps)
        for held in self.optimizer.state.values():
            held["step"].fill_(adam_steps)
        for name, tensors in self._own_tensors().items():
            for number, tensor in enumerate(tensors):
                if f"{name}/{number}" in state:  # no moments where no step was taken yet
                    tensor.copy_(state[f"{name}/{number}"])

    def _own_tensors(self) -> dict[str, list[torch.Tensor]]:
        """What no other rank has, by kind; moments only after the first step."""
        found = {"weight": self.own or list(self.parameters)}
        adam = [self.optimizer.state.get(self.local[p], {}) for p in self.parameters]
        found |= {name: [held[name] for held in adam] for name in MOMENTS if name in adam[0]}
        if self.outer is not None:
            momenta = [held["momentum_buffer"] for held in self.outer.state.values()]
            found |= {"start": self.starts, "momentum": momenta}
        return found
