"""What the training loop asks of an engine, and what every engine does alike."""

import abc
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from distributed_training.data.samples import StepBatch
from distributed_training.models.decoder import Past
from distributed_training.parallel.agree import gather
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.tensor_files import Part, TensorFiles

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
# AdamW as every engine builds it; learning rate and weight decay come from CONFIG.
ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
MOMENTS = ("exp_avg", "exp_avg_sq")  # its state besides the step, as torch and DeepSpeed name it


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    loss_sum: torch.Tensor  # of this rank's token losses, fp32 scalar on the device
    grad_norm: torch.Tensor | float | None  # before clipping; None where it is not known
    skipped: torch.Tensor | bool  # because gradients overflowed, and the update was left out
    # Norms of what this rank holds of each parameter's gradient, [len(Engine.gradient_names)], on
    # the device; None where the engine does not know them.
    gradients: torch.Tensor | None = None


class Engine(abc.ABC):
    """One strategy at work. Most methods are collective: all ranks call them in the same order."""

    topology: Topology
    optimizer: Any  # torch.optim.Optimizer, or DeepSpeed's around one
    base_fingerprint = 0  # of the frozen weights that adapters stand beside, if any
    gradient_names: Sequence[str] = ()  # parameters, in the order of `StepResult.gradients`

    @abc.abstractmethod
    def train_step(self, batch: StepBatch) -> StepResult:
        """Forward, backward and one update over *all* micro-batches of the step. The gradient is
        that of (sum of token losses of the global batch) / `batch.num_targets`."""

    @abc.abstractmethod
    def eval_step(self, *arrays: np.ndarray) -> torch.Tensor:
        """Summed loss of this rank's `Samples.batch`, fp32 scalar, no gradient."""

    @abc.abstractmethod
    def logits(self, input_ids: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """[1, T] -> [1, T, vocab], no gradient; the same on every rank."""

    def past(self) -> Past | None:
        """For `logits` to see each token of a text once; None where no rank has the whole model."""
        return Past() if (self.topology.pp, self.topology.tp) == (1, 1) else None

    def set_learning_rate(self, rate: float) -> None:
        """The rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @abc.abstractmethod
    def describe_dtypes(self) -> dict[str, str]:
        """dtype of parameters, gradients, optimizer state and reduction."""

    @abc.abstractmethod
    def state_parts(self) -> Iterator[Part]:
        """What this rank holds of weights and Adam's moments, "exp_avg/<name>", fp32 under the
        model's names and shapes (the vocabulary without padding). Local."""

    @abc.abstractmethod
    def counters(self) -> dict[str, float]:
        """The rest of the state, the same on every rank: "adam_steps", and for fp16 "loss_scale"
        and "good_steps", those since the last overflow."""

    @abc.abstractmethod
    def load(self, saved: TensorFiles, counters: dict[str, float]) -> None:
        """Restore what `state_parts` and `counters` gave under any engine and layout."""

    def own_state(self) -> dict[str, torch.Tensor]:
        """fp32 tensors that no other rank has, for going on exactly under the same layout."""
        return {}

    def load_own(self, state: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Restore what `own_state` gave on this rank, if anything; after `load`."""

    def full_state(self) -> dict[str, torch.Tensor] | None:
        """All weights on rank 0's CPU, as `state_parts` names them; None on other ranks."""
        weights = (part for part in self.state_parts() if part.name.startswith("weight/"))
        own = [part for part in weights if part.writes and math.prod(part.size)]
        ranks = gather([(part.name, part.shape, part.start, part.size) for part in own])
        if dist.get_rank() > 0:
            for part in own:
                dist.send(part.get().cpu().contiguous(), 0)
            return None
        state: dict[str, torch.Tensor] = {}
        for sender, parts in enumerate(ranks):
            for number, (name, shape, start, size) in enumerate(parts):
                values = own[number].get() if sender == 0 else torch.empty(size)
                if sender > 0:
                    dist.recv(values, sender)
                whole = state.setdefault(name.removeprefix("weight/"), torch.empty(shape))
                box = whole if len(start) == len(shape) else whole.view(-1)
                box[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] = values
        return state

    def close(self) -> None:
        """Drop model and optimizer, so that nothing holds the process group."""
        for name in list(vars(self)):
            delattr(self, name)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, and nothing is compiled again for another shape."""
    module.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield
