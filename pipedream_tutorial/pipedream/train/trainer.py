"""One stage that trains: forward and backward passes by microbatch, and versions of its weights.

The one-process oracle holds p of these and hands tensors over; the runtime holds one in each
process and sends them. That their results are the same bits is a matter of the same code here.

A backward pass in two halves together costs what it costs whole. For a linear layer y = x W^T + b,
and dY, the gradient of the loss in y:

    I:  dX = dY W      the layer before waits for it
    W:  dW = dY^T x    waits for dY alone, and nobody waits for it

Each is one product of matrices, and neither uses the other's result. autograd does both on its way
back. Asked twice, first for dX and then for dW (retain_graph), it goes the whole way twice. Here a
linear layer's backward pass does I and puts x and dY aside, and W is done from these later. The
other layers have few weights: their gradients are made in I.
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


class CutLinears(TorchFunctionMode):
    """Backward passes of what runs in this context leave out W for linear layers. Each has to lie
    behind what needs a gradient: the stage's input, or a norm's weights."""

    def __init__(self) -> None:
        self.aside: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []
        """x, weight, bias and dY of each linear layer that a backward pass has come through."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        out = functional.linear(x, weight.detach(), None if bias is None else bias.detach())
        kept = x.detach()
        out.register_hook(lambda dy: self.aside.append((kept, weight, bias, dy)))
        return out

    def weight_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield W: each weight or bias and its gradient, in the bits that autograd gives."""
        for x, weight, bias, dy in self.aside:
            dy = dy.flatten(0, -2)
            yield weight, dy.t() @ x.flatten(0, -2)
            if bias is not None:
                yield bias, dy.sum(0)


@dataclass(slots=True)
class _InFlight:
    """The tensors that a microbatch leaves on a stage between its forward and backward pass."""

    version: int
    weights: Weights
    x: Tensor
    out: Tensor  # until I
    linears: CutLinears  # empty where backward passes are whole
    gradients: Sequence[Tensor | None] = ()
    """Of the weights, as far as I has made them: None for those of linear layers that are cut."""


class StageTrainer:
    """Plain SGD on one stage under a weight policy.

    The loss of every microbatch is divided by the number of microbatches in a batch, under every
    policy: m updates of one microbatch each then move the weights about as far as one update of
    the batch, and one learning rate suits all.
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
        """`module` gives the first version of the weights, in its memory, which is not used
        afterwards. `batch_size`: microbatches in a batch. `loss` is the last stage's."""
        self.stage = stage
        self.num_stages = schedule.num_stages
        self.num_microbatches = schedule.num_microbatches
        self.cut = schedule.cuts_backward
        self.policy = policy
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.loss = loss if stage == self.num_stages - 1 else None
        first = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
        self.versions = {0: first}
        # Parameters without memory, in whose place functional_call puts a version: a module that
        # holds the first one would never let it be freed.
        self.module = copy.deepcopy(module).to("meta")
        self.updates = 0
        self.peak_versions = 1
        self.num_forwards = 0
        self.num_backwards = 0
        self.in_flight: dict[int, _InFlight] = {}
        self.gradients: Gradients = ()  # of the microbatches since the last update, added up
        self.losses: dict[int, Tensor] = {}  # last stage's, by microbatch: mean, not divided

    @property
    def weights(self) -> Weights:
        """The newest version."""
        return self.versions[self.updates]

    def run(self, op: Op, received: Tensor | None, task: Task) -> Tensor | None:
        """Run one operation of this stage. `received`: what the stage before gave to F, the one
        after to B and I; None where there is none. What it gives to the next, if anything."""
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
        """Run the microbatch, [batch, ...] from the stage before, with the version that the policy
        names; the output to send on. On the last stage: the scaled loss, a scalar."""
        version = self._version_of(microbatch)
        weights = self.versions[version]
        x = x.detach().requires_grad_(self.stage > 0)
        linears = CutLinears()
        with linears if self.cut else nullcontext():
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
        """Run I, the half of the backward pass that the stage before waits for; None on the first
        stage. output_gradient: as the output; None on the last stage."""
        flight = self.in_flight[microbatch]
        inputs = [flight.x] if self.stage > 0 else []
        gradients = torch.autograd.grad(
            flight.out, [*inputs, *flight.weights.values()], output_gradient, allow_unused=self.cut
        )
        del flight.out  # and the graph
        flight.gradients = gradients[len(inputs) :]
        return gradients[0] if inputs else None

    def weight_gradient(self, microbatch: int) -> Gradients:
        """Run W, the half that nobody waits for, and the update if it is due. Return W's
        gradients."""
        flight = self.in_flight.pop(microbatch)
        weights = map(id, flight.weights.values())
        gradients = dict(zip(weights, flight.gradients, strict=True))
        for weight, gradient in flight.linears.weight_gradients():
            before = gradients[id(weight)]
            gradients[id(weight)] = gradient if before is None else before + gradient
        present = tuple(gradient for gradient in gradients.values() if gradient is not None)
        self.gradients = torch._foreach_add(self.gradients, present) if self.gradients else present
        self.num_backwards += 1
        if self.policy.per_microbatch or self.num_backwards % self.batch_size == 0:
            self._update(self.gradients)
            self.gradients = ()
        return present

    def _step(self, gradients: Gradients) -> Sequence[Tensor]:
        """Return the next version by SGD, in new memory."""
        weights = [weight.detach() for weight in self.weights.values()]
        # Few kernels: a GPU waits for the host to launch each.
        return torch._foreach_add(weights, gradients, alpha=-self.learning_rate)

    def _update(self, gradients: Gradients) -> None:
        """Update the weights. Stashed versions are dropped once nobody can read them; in place, the
        same memory changes under the graphs that are in flight."""
        old = self.weights
        stepped = self._step(gradients)
        self.updates += 1
        if self.policy.stashed:
            new = zip(old, stepped, strict=True)
            self.versions[self.updates] = {name: w.requires_grad_() for name, w in new}
        else:
            for weight, new_weight in zip(old.values(), stepped, strict=True):
                weight.data.copy_(new_weight)
            self.versions = {self.updates: old}
        kept = {self.updates} | {flight.version for flight in self.in_flight.values()}
        if self.num_forwards < self.num_microbatches:
            kept |= set(range(self._version_of(self.num_forwards), self.updates))
        self.versions = {v: w for v, w in self.versions.items() if v in kept}
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
    """Build trainers with the initial weights for these stages, or for all."""
    modules = workload.build_modules(schedule.stages_per_rank)
    same = {"learning_rate": workload.config["learning_rate"], "loss": workload.loss}
    return {
        stage: trainer_class(
            modules[stage].to(workload.device), schedule, policy, stage, batch_size, **same
        )
        for stage in (range(len(modules)) if stages is None else stages)
    }
