"""Define the interface between the training loop and an engine, and the code that engines share."""

import abc
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from distributed_training.data.samples import StepBatch
from distributed_training.models.decoder import KVCache
from distributed_training.parallel.agree import gather
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.tensor_files import Part, TensorFiles

# AdamW settings that all engines share. The learning rate and weight decay come from CONFIG.
ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
MOMENTS = ("exp_avg", "exp_avg_sq")  # names of the Adam moments in torch and DeepSpeed


@dataclass(frozen=True)
class StepResult:
    """Results of one optimizer step."""

    # Sum of this rank's losses of tokens or pairs, fp32 on the device: a scalar or, for pairs, the
    # loss and METRICS (models/preference.py)
    loss_sum: torch.Tensor
    grad_norm: torch.Tensor | float | None  # global norm before clipping; None if unknown
    skipped: torch.Tensor | bool  # whether the update was skipped because gradients overflowed
    # Norm of this rank's shard of each parameter's gradient, [len(Engine.gradient_names)] on the
    # device. None if the engine does not compute it.
    param_grad_norms: torch.Tensor | None = None


class Engine(abc.ABC):
    """Base class for engines. An engine trains a model with one strategy. Most methods are
    collective: all ranks call them in the same order."""

    topology: Topology
    model: Any  # an nn.Module that contains the modules of this rank
    optimizer: Any  # a torch.optim.Optimizer, or DeepSpeed's wrapper around one
    base_fingerprint = 0  # fingerprint of the initial weights; 0 for random weights without LoRA
    gradient_names: Sequence[str] = ()  # names in the order of `StepResult.param_grad_norms`

    @abc.abstractmethod
    def train_step(self, batch: StepBatch) -> StepResult:
        """Run the forward and backward passes of all micro-batches, then one optimizer update. The
        gradients are computed for the sum of the losses of tokens or pairs in the global batch,
        divided by `batch.num_targets`."""

    @abc.abstractmethod
    def eval_step(self, *arrays: np.ndarray) -> torch.Tensor:
        """Return this rank's summed loss, fp32 as in `StepResult`, for arrays from `Samples.batch`.
        For pairs without a reference, return the documents' log-probabilities instead. A rank
        without a result returns 0. Gradients are not computed."""

    @abc.abstractmethod
    def logits(self, input_ids: torch.Tensor, past: KVCache | None = None) -> torch.Tensor:
        """Return the logits [1, T, vocab] for token ids [1, T], without gradients. All ranks pass
        the same ids and receive the same logits. tp, cp and pp must not split the model."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate for the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @abc.abstractmethod
    def state_parts(self) -> Iterator[Part]:
        """Yield this rank's shards of the weights ("weight/<name>") and Adam moments
        ("exp_avg/<name>", "exp_avg_sq/<name>") in fp32 or bf16. Names and shapes are the same as in
        the model before vocabulary padding. This method is not collective."""

    @abc.abstractmethod
    def counters(self) -> dict[str, float]:
        """Return the state that is the same on every rank: "adam_steps", "loss_scale" and
        "good_steps". The value of "good_steps" is the number of steps since the last overflow.
        "loss_scale" and "good_steps" matter only for fp16."""

    @abc.abstractmethod
    def load(self, tensor_files: TensorFiles, counters: dict[str, float]) -> None:
        """Restore the state described by `state_parts` and `counters` from a checkpoint. Any engine
        and layout may have written the checkpoint."""

    def local_state(self) -> dict[str, torch.Tensor]:
        """Return the fp32 tensors that only this rank has. A run that resumes with the same layout
        needs these tensors to continue exactly."""
        return {}

    def load_local_state(self, state: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Restore this rank's `local_state`. Call this after `load`."""

    def full_state(self) -> dict[str, torch.Tensor] | None:
        """Gather all weights in CPU memory on rank 0. Return {parameter name: weight} on rank 0,
        and None on other ranks. All ranks must call this method."""
        rank = dist.get_rank()
        parts = []
        for part in self.state_parts():
            if part.name.startswith("weight/") and part.written_here and 0 not in part.size:
                parts.append(part)
        positions = [(part.name, part.shape, part.start, part.size) for part in parts]
        all_positions = gather(positions)
        if rank > 0:
            for part in parts:
                dist.send(part.get().float().cpu().contiguous(), 0)
            return None
        state: dict[str, torch.Tensor] = {}
        for sender, sent_positions in enumerate(all_positions):
            for index, (name, shape, start, size) in enumerate(sent_positions):
                if sender == 0:
                    values = parts[index].get()
                else:
                    values = torch.empty(size)
                    dist.recv(values, sender)
                target = state.setdefault(name.removeprefix("weight/"), torch.empty(shape))
                if len(start) < len(shape):  # Under ZeRO, shards are ranges of the flat tensor.
                    target = target.view(-1)
                for dim, first in enumerate(start):
                    target = target.narrow(dim, first, size[dim])
                target.copy_(values)
        return state

    def close(self) -> None:
        """Drop all attributes, including the model and the optimizer, so that nothing refers to the
        process group."""
        vars(self).clear()


@contextlib.contextmanager
def evaluation_mode(module: nn.Module, *, compiles: bool = False) -> Iterator[None]:
    """Put `module` in evaluation mode. Within the `with` block, disable gradients and
    torch.compile, which would otherwise recompile the model for new shapes. Pairs of answers need
    the same arithmetic as in training, so that `compiles` allows both: code that is compiled
    without gradients rounds at other places."""
    module.eval()
    stance = torch.compiler.set_stance("default" if compiles else "force_eager")
    with torch.set_grad_enabled(compiles), stance:
        yield
