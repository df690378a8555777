"""What the training loop asks of an engine, and what every engine does alike."""

from __future__ import annotations

import abc
import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from distributed_training.data.samples import StepBatch
from distributed_training.parallel.agree import gather
from distributed_training.parallel.tensor_files import Part, TensorFiles
from distributed_training.plan.topology import Topology

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
# AdamW as every engine builds it; learning rate and weight decay come from CONFIG.
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
MOMENTS = ("exp_avg", "exp_avg_sq")  # its state besides the step, as torch and DeepSpeed name it


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    loss_sum: torch.Tensor  # of this rank's token losses, fp32 scalar on the device
    num_targets: int  # real ones of the global batch, all ranks
    grad_norm: torch.Tensor | float | None  # before clipping; None where it is not known
    skipped: torch.Tensor | bool  # because gradients overflowed, and the update was left out
    # Norms of what this rank holds of each parameter's gradient, [len(Engine.gradient_names)], on
    # the device; None where the engine does not know them.
    gradients: torch.Tensor | None = None


class Engine(abc.ABC):
    """One strategy at work. Every method is collective: all ranks call it, in the same order."""

    optimizer: torch.optim.Optimizer
    base_fingerprint = 0  # of the frozen weights that adapters stand beside, if any
    gradient_names: Sequence[str] = ()  # parameters, in the order of `StepResult.gradients`

    @abc.abstractmethod
    def train_step(self, batch: StepBatch) -> StepResult:
        """Forward, backward and one update over *all* micro-batches of the step. The gradient is
        that of (sum of token losses of the global batch) / `num_targets`."""

    @abc.abstractmethod
    def eval_step(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        """Summed loss of this rank's [batch, seq_len] arrays, fp32 scalar, no gradient."""

    @abc.abstractmethod
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[1, T] -> [1, T, vocab], no gradient; the same on every rank."""

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
        model's names and shapes (the vocabulary without padding), for a checkpoint. Local."""

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

    @abc.abstractmethod
    def full_state(self) -> dict[str, torch.Tensor] | None:
        """All parameters in fp32 on the CPU under the model's names; None on ranks other than 0."""

    def close(self) -> None:
        """Drop model and optimizer, so that nothing holds the process group."""
        vars(self).clear()


@contextlib.contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Unless `verbose`, what libraries print about themselves is dropped."""
    with contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, and nothing is compiled again for another shape."""
    module.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


def collect_stages(
    state: dict[str, torch.Tensor], topology: Topology
) -> dict[str, torch.Tensor] | None:
    """Parameters of all stages on rank 0, from the first process of each; None elsewhere."""
    per_stage = topology.world_size // topology.pp
    shapes = gather({name: tuple(full.shape) for name, full in state.items()})
    if topology.rank == 0:
        for sender in range(per_stage, topology.world_size, per_stage):
            for name, shape in shapes[sender].items():
                state[name] = torch.empty(shape)
                dist.recv(state[name], sender)
        return state
    if topology.rank % per_stage == 0:
        for full in state.values():
            dist.send(full, 0)
    return None
