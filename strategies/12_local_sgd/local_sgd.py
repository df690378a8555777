"""Train with local SGD (Stich, 1805.09767) or DiLoCo (Douillard et al., 2311.08105).

Each replica takes `local_steps` AdamW steps with its own gradients, and then all replicas
synchronize. Local SGD continues from the mean of the weights. DiLoCo takes a Nesterov step from the
weights of the last synchronization toward this mean. Each replica keeps its own Adam moments."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from distributed_training.data.samples import StepBatch
from distributed_training.engines.base import MOMENTS, StepResult
from distributed_training.engines.native import NativeEngine
from distributed_training.models.decoder import Decoder, KVCache
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.parallel.gradients import all_reduce_sum
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.tensor_files import Part, TensorFiles
from distributed_training.plan.plan import Plan


class LocalSGD(NativeEngine):
    """Engine whose replicas train separately for `local_steps` steps between synchronizations.
    Evaluations and checkpoints use the mean of the replicas."""

    def __init__(
        self, model: Decoder, weights: InitialWeights, plan: Plan, topology: Topology
    ) -> None:
        super().__init__(model, weights, plan, topology)
        options = plan.strategy.options(plan.engine_options)
        self.options = options
        # Clipping and Adam are not linear. With one local step, averaging the *gradients* is the
        # only way to compute the same results as dp and keep the weights equal.
        self.averages_gradients = options.local_steps == 1 and options.averages
        self.steps_since_sync = 0  # steps since the last synchronization
        # This replica's weights while the mean replaces them
        self.local_weights: list[torch.Tensor] = []
        self.outer_optimizer: torch.optim.SGD | None = None
        if not options.averages:
            self._begin_outer()

    def _begin_outer(self) -> None:
        """Start the outer optimizer from the current weights and a zero momentum buffer."""
        momentum = self.options.outer_momentum
        self.outer_parameters = [parameter.detach().clone() for parameter in self.parameters]
        self.outer_optimizer = torch.optim.SGD(
            self.outer_parameters, self.options.outer_lr, momentum, nesterov=momentum > 0
        )
        if momentum:  # `load_local_state` needs the state that exists after a first step
            for start in self.outer_parameters:
                self.outer_optimizer.state[start]["momentum_buffer"] = torch.zeros_like(start)

    def replicate(self, stage: Decoder) -> nn.Module:
        return stage  # without DDP, so the backward pass exchanges nothing

    def train_step(self, batch: StepBatch) -> StepResult:
        self._restore_local_weights()
        return super().train_step(batch)

    def update(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.averages_gradients:
            gradients = [parameter.grad for parameter in self.parameters]
            _average([gradient for gradient in gradients if gradient is not None])
        norms = super().update()
        self.steps_since_sync = (self.steps_since_sync + 1) % self.options.local_steps
        if self.steps_since_sync == 0 and not self.averages_gradients:
            self._synchronize()
        return norms

    @torch.no_grad()
    def _synchronize(self) -> None:
        _average(self.parameters)
        if self.outer_optimizer is not None:
            for start, mean in zip(self.outer_parameters, self.parameters, strict=True):
                start.grad = start - mean
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad()
            for start, mean in zip(self.outer_parameters, self.parameters, strict=True):
                mean.copy_(start)

    def eval_step(self, *arrays: np.ndarray) -> torch.Tensor:
        self._swap_in_mean()
        return super().eval_step(*arrays)

    def logits(self, input_ids: torch.Tensor, past: KVCache | None = None) -> torch.Tensor:
        self._swap_in_mean()
        return super().logits(input_ids, past)

    def _swap_in_mean(self) -> None:
        """Replace the weights with the mean of the replicas until the next training step, unless
        the replicas have just synchronized."""
        if self.steps_since_sync and not self.local_weights:
            self.local_weights = [parameter.detach().clone() for parameter in self.parameters]
            _average(self.parameters)

    @torch.no_grad()
    def _restore_local_weights(self) -> None:
        if self.local_weights:
            for parameter, saved in zip(self.parameters, self.local_weights, strict=True):
                parameter.copy_(saved)
            self.local_weights = []

    def state_parts(self) -> Iterator[Part]:
        self._swap_in_mean()
        return super().state_parts()

    def load(self, tensor_files: TensorFiles, counters: dict[str, float]) -> None:
        """Start all replicas at the saved mean. `load_local_state` may then restore the weights of
        each replica."""
        super().load(tensor_files, counters)
        self.steps_since_sync = 0
        self.local_weights = []
        if self.outer_optimizer is not None:
            self._begin_outer()

    def local_state(self) -> dict[str, torch.Tensor]:
        """Return this replica's weights, Adam moments and counters, and the state of the outer
        step. In fp16, counters differ between replicas, because each replica skips steps and
        changes its loss scale independently."""
        if self.averages_gradients:
            return {}
        counters = self.counters()
        names = ("adam_steps", "loss_scale", "good_steps")
        counts = [self.steps_since_sync, *(counters[name] for name in names)]
        state = {"counts": torch.tensor(counts, dtype=torch.float32)}
        for name, tensors in self._local_tensors().items():
            state |= {f"{name}/{number}": tensor for number, tensor in enumerate(tensors)}
        return state

    @torch.no_grad()
    def load_local_state(self, state: dict[str, torch.Tensor]) -> None:
        if not state:
            return
        steps_since_sync, adam_steps, loss_scale, good_steps = state["counts"].tolist()
        self.steps_since_sync = int(steps_since_sync)
        self.loss_scale.fill_(loss_scale)
        self.good_steps.fill_(good_steps)
        for adam_state in self.optimizer.state.values():
            adam_state["step"].fill_(adam_steps)
        for name, tensors in self._local_tensors().items():
            for number, tensor in enumerate(tensors):
                if f"{name}/{number}" in state:  # there are no Adam moments before the first step
                    tensor.copy_(state[f"{name}/{number}"])

    def _local_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return this replica's tensors by name. Adam moments exist only after the first step."""
        tensors = {"weight": self.local_weights or list(self.parameters)}
        adam = [self.optimizer.state.get(self.local_params[p], {}) for p in self.parameters]
        tensors |= {name: [state[name] for state in adam] for name in MOMENTS if name in adam[0]}
        if self.outer_optimizer is not None:
            momenta = [state["momentum_buffer"] for state in self.outer_optimizer.state.values()]
            tensors |= {"start": self.outer_parameters, "momentum": momenta}
        return tensors


@torch.no_grad()
def _average(tensors: Sequence[torch.Tensor]) -> None:
    """Average each tensor over all ranks, in place with one all-reduce."""
    all_reduce_sum(tensors)
    for tensor in tensors:
        tensor /= dist.get_world_size()
