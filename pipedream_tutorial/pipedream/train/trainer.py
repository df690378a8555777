"""Train one stage: run the passes of each microbatch, and keep versions of the stage's weights.

There is one trainer per stage. The oracle runs all trainers in a single process and passes tensors
between them. In the runtime, each process has the trainers of one rank and sends tensors. Both give
bitwise equal results, because they use this code.

A backward pass in two halves costs as much as a whole backward pass. Consider a linear layer
`y = x A^T + b`, and let dY be the gradient of the loss with respect to y:

    I:  dX = dY A      the previous layer waits for dX
    W:  dA = dY^T x    needs only x and dY, and no layer waits for dA

Each half is one matrix multiplication, and neither uses the other's result. Normally, autograd
computes both in one pass. If you call autograd twice, first for dX and then for dA (with
`retain_graph`), it runs the whole pass twice. Here a linear layer's backward pass computes dX and
stores x and dY, from which dA is computed later. The other layers have few weights, and their
weight gradients are computed together with dX.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipedream.schedules.ops import Op, Schedule
from pipedream.schedules.policies import Policy
from pipedream.train.models import Loss, Task, Workload

Weights = dict[str, Tensor]
Gradients = tuple[Tensor, ...]


class SplitLinears(TorchFunctionMode):
    """Context manager in which the backward passes of linear layers skip W. The input of each
    linear layer must require a gradient. This is the case if the input depends on the stage's input
    or on the weights of a normalization layer."""

    def __init__(self) -> None:
        self.deferred: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []
        """x, weight, bias and dY of each linear layer that a backward pass has reached."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        out = functional.linear(x, weight.detach(), None if bias is None else bias.detach())
        detached = x.detach()
        out.register_hook(lambda dy: self.deferred.append((detached, weight, bias, dy)))
        return out

    def weight_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Compute the weight gradients that the backward passes skipped. Yield each weight or bias
        with its gradient, which is bitwise equal to autograd's gradient."""
        for x, weight, bias, dy in self.deferred:
            dy = dy.flatten(0, -2)
            yield weight, dy.t() @ x.flatten(0, -2)
            if bias is not None:
                yield bias, dy.sum(0)


@dataclass(slots=True)
class _InFlight:
    """Tensors of one microbatch on one stage, between its forward pass and its backward pass."""

    version: int
    weights: Weights
    x: Tensor
    out: Tensor  # freed by I
    linears: SplitLinears  # empty if backward passes are whole
    gradients: Sequence[Tensor | None] = ()
    """Weight gradients computed during I (the input-gradient half). They are None for split linear
    layers."""


class StageTrainer:
    """Trains one stage with plain SGD under a weight policy.

    Under every policy, the loss of a microbatch is divided by m, the number of microbatches in a
    batch. As a result, m updates with one microbatch each change the weights about as much as one
    update with the batch. All policies can therefore use the same learning rate.
    """

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        policy: Policy,
        stage: int,
        batch_size: int,
        learning_rate: float,
        loss: Loss = functional.cross_entropy,
    ) -> None:
        """Create the trainer. `module` contains the first version of the weights and is not
        changed. `batch_size` is the number of microbatches per batch. Only the last stage uses
        `loss`."""
        self.stage = stage
        self.num_stages = schedule.num_stages
        self.num_microbatches = schedule.num_microbatches
        self.splits_backward = schedule.splits_backward
        self.policy = policy
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.loss = loss if stage == self.num_stages - 1 else None
        first = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
        self.versions = {0: first}
        # The module's parameters have no memory, and functional_call replaces them with a version.
        # A module with the first version would keep that version in memory.
        self.module = copy.deepcopy(module).to("meta")
        self.updates = 0
        self.peak_versions = 1
        self.num_forwards = 0
        self.num_backwards = 0
        self.in_flight: dict[int, _InFlight] = {}
        self.gradients: Gradients = ()  # sum over the microbatches since the last update
        # On the last stage, by microbatch: mean loss, not scaled
        self.losses: dict[int, Tensor] = {}

    @property
    def weights(self) -> Weights:
        """Newest version of the weights."""
        return self.versions[self.updates]

    def run(self, op: Op, received: Tensor | None, task: Task) -> Tensor | None:
        """Run one operation of this stage. `received` is the result of the previous stage for F,
        and of the next stage for B and I. `received` is None for W, and for stages without this
        neighbor. Return the result to send, or None if there is nothing to send."""
        kind, _, i = op
        if kind == "F":
            inputs, target = task.microbatch(i)
            return self.forward(i, inputs if received is None else received, target)
        gradient = None
        if kind != "W":
            gradient = self.input_gradient(i, received)
        if kind != "I":
            self.weight_gradient(i)
        return gradient

    def forward(self, microbatch: int, x: Tensor, target: Tensor) -> Tensor:
        """Run the forward pass of a microbatch with the policy's version of the weights. `x` is the
        input [batch, ...] from the previous stage. Return the output. On the last stage, return the
        scaled scalar loss."""
        version = self._version_of(microbatch)
        weights = self.versions[version]
        x = x.detach().requires_grad_(self.stage > 0)
        linears = SplitLinears()
        with linears if self.splits_backward else nullcontext():
            out = torch.func.functional_call(self.module, weights, (x,), tie_weights=False)
        if self.loss is not None:
            loss = self.loss(out, target)
            self.losses[microbatch] = loss.detach()
            out = loss / self.batch_size
        self.in_flight[microbatch] = _InFlight(version, weights, x, out, linears)
        self.num_forwards = microbatch + 1
        return out.detach()

    def _version_of(self, i: int) -> int:
        return self.policy.forward_version(self.updates, i, self.batch_size, self.num_stages)

    def input_gradient(self, microbatch: int, output_gradient: Tensor | None) -> Tensor | None:
        """Run I, the half of the backward pass that the previous stage waits for. Return the
        gradient of the input. Return None on the first stage. `output_gradient` has the shape of
        the output, and is None on the last stage."""
        flight = self.in_flight[microbatch]
        inputs = [flight.x] if self.stage > 0 else []
        gradients = torch.autograd.grad(
            flight.out,
            [*inputs, *flight.weights.values()],
            output_gradient,
            allow_unused=self.splits_backward,
        )
        del flight.out  # also frees the graph
        flight.gradients = gradients[len(inputs) :]
        return gradients[0] if inputs else None

    def weight_gradient(self, microbatch: int) -> Gradients:
        """Run W, the half of the backward pass that no other stage waits for. Then update the
        weights if an update is due. Return the gradients of all weights."""
        flight = self.in_flight.pop(microbatch)
        weights = map(id, flight.weights.values())
        gradients = dict(zip(weights, flight.gradients, strict=True))
        for weight, gradient in flight.linears.weight_gradients():
            input_pass_gradient = gradients[id(weight)]
            gradients[id(weight)] = (
                gradient if input_pass_gradient is None else input_pass_gradient + gradient
            )
        computed = tuple(gradient for gradient in gradients.values() if gradient is not None)
        self.gradients = (
            torch._foreach_add(self.gradients, computed) if self.gradients else computed
        )
        self.num_backwards += 1
        if self.policy.per_microbatch or self.num_backwards % self.batch_size == 0:
            self._update(self.gradients)
            self.gradients = ()
        return computed

    def _next_weights(self, gradients: Gradients) -> Sequence[Tensor]:
        """Return the next version of the weights by SGD, in new memory."""
        weights = [weight.detach() for weight in self.weights.values()]
        # Use few kernels, because a GPU waits for the host to launch each one.
        return torch._foreach_add(weights, gradients, alpha=-self.learning_rate)

    def _update(self, gradients: Gradients) -> None:
        """Update the weights, and drop the versions that no pass can read anymore. Without
        stashing, the update is in place and changes memory that graphs in flight use."""
        old = self.weights
        new_weights = self._next_weights(gradients)
        self.updates += 1
        if self.policy.stashed:
            new = zip(old, new_weights, strict=True)
            self.versions[self.updates] = {name: w.requires_grad_() for name, w in new}
        else:
            for weight, new_weight in zip(old.values(), new_weights, strict=True):
                weight.data.copy_(new_weight)
            self.versions = {self.updates: old}
        needed_versions = {self.updates} | {flight.version for flight in self.in_flight.values()}
        if self.num_forwards < self.num_microbatches:
            needed_versions |= set(range(self._version_of(self.num_forwards), self.updates))
        self.versions = {v: w for v, w in self.versions.items() if v in needed_versions}
        self.peak_versions = max(self.peak_versions, len(self.versions))


Trainers = Mapping[int, StageTrainer]  # by stage


def build_trainers(
    workload: Workload,
    schedule: Schedule,
    policy: Policy,
    batch_size: int,
    stages: Iterable[int] | None = None,
    trainer_class: type[StageTrainer] = StageTrainer,
) -> Trainers:
    """Build the trainers of `stages` with the initial weights. If `stages` is None, build the
    trainers of all stages."""
    modules = workload.build_modules(schedule.stages_per_rank)
    common = {"learning_rate": workload.config["learning_rate"], "loss": workload.loss}
    return {
        stage: trainer_class(
            modules[stage].to(workload.device), schedule, policy, stage, batch_size, **common
        )
        for stage in (range(len(modules)) if stages is None else stages)
    }
