"""PyTorch's own parallelism: DDP and FSDP2 around our model."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from distributed_training.config import RunConfig
from distributed_training.data import StepBatch
from distributed_training.engines.base import (
    ADAM,
    INITIAL_LOSS_SCALE,
    LOSS_SCALE_WINDOW,
    StepResult,
    to_device,
)
from distributed_training.model import GPT2, parameter_groups
from distributed_training.parallel.activation_checkpointing import apply_activation_checkpointing
from distributed_training.parallel.compilation import apply_compile
from distributed_training.parallel.ddp import apply_ddp
from distributed_training.parallel.fsdp import apply_fsdp
from distributed_training.strategy import Strategy
from distributed_training.topology import Topology


class NativeEngine:
    """Composes the mechanisms of parallel/ in one visible order and steps AdamW."""

    def __init__(
        self, model: GPT2, config: RunConfig, strategy: Strategy, topology: Topology
    ) -> None:
        self.topology = topology
        self.max_grad_norm = config.max_grad_norm
        self.sharded = strategy.mesh["dp_shard"] != 1
        dtype = model.compute_dtype
        self.compute_dtype = dtype

        model.to(topology.device)
        apply_activation_checkpointing(model, config.activation_checkpointing)
        # One process has its gradients to itself; DDP and FSDP hold them in buffers of their own.
        self.cuda_graphs = (
            bool(config.compile) and topology.device_type == "cuda" and topology.world_size == 1
        ) and not self.sharded
        if config.compile:
            apply_compile(model, cuda_graphs=self.cuda_graphs)
        if self.sharded:
            apply_fsdp(model, topology, dtype)
            self.module: torch.nn.Module = model
        else:
            self.module = apply_ddp(model, topology)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, config.weight_decay),
            lr=float(config.learning_rate),
            fused=topology.device_type == "cuda",
            **ADAM,
        )
        # Replayed graphs return gradients in the same memory each time: with accumulation they are
        # added up in tensors of ours instead of being handed over.
        self.keep_gradients = self.cuda_graphs and config.grad_accum_steps > 1
        self._prepare_gradients()
        self.loss_scale = INITIAL_LOSS_SCALE if dtype is torch.float16 else 1.0
        self._good_steps = 0

    def train_step(self, batch: StepBatch) -> StepResult:
        # Backward averages over ranks; the loss is a mean over the global batch's real tokens.
        scale = self.loss_scale * self.topology.dp_size / batch.num_targets
        loss_sum = torch.zeros((), device=self.topology.device)
        self.model.train()
        for index, (inputs, targets) in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            if self.cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with self._gradient_sync(last):
                loss = self._loss(inputs, targets)
                (loss * scale).backward()
            loss_sum += loss.detach()
        grad_norm, skipped = self._update()
        return StepResult(loss_sum, batch.num_targets, grad_norm, skipped)

    @torch.no_grad()
    def eval_step(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        self.model.eval()
        with torch.compiler.set_stance("force_eager"):
            return self._loss(inputs, targets)

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        with torch.compiler.set_stance("force_eager"):
            return self.model(input_ids.to(self.topology.device))

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def describe_dtypes(self) -> dict[str, str]:
        compute = str(self.compute_dtype or torch.float32)
        parameter = str(next(self.model.parameters()).dtype)
        return {
            "parameters": parameter,
            "arithmetic": compute,
            "gradients": parameter,
            "optimizer_state": parameter,
            "reduction": str(torch.float32),
        }

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=folder / "dcp")
        if self.topology.rank == 0:
            torch.save((self.loss_scale, self._good_steps), folder / "loss_scale.pt")

    def load(self, folder: Path) -> None:
        # torch creates the optimizer state to load into only where no gradient is in the way.
        self.optimizer.zero_grad(set_to_none=True)
        state = self._state()
        dcp.load(state, checkpoint_id=folder / "dcp")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.loss_scale, self._good_steps = torch.load(folder / "loss_scale.pt")
        assert len(self.optimizer.state) == len(list(self.model.parameters()))
        self._prepare_gradients()

    def full_state(self) -> dict[str, torch.Tensor] | None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        return state if self.topology.rank == 0 else None

    def close(self) -> None:
        del self.module, self.model, self.optimizer

    def _prepare_gradients(self) -> None:
        if self.keep_gradients:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

    def _state(self) -> dict[str, object]:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def _loss(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        device = self.topology.device
        return self.module(to_device(inputs, device), to_device(targets, device))

    def _gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """DDP averages once a step. FSDP reduce-scatters every micro-batch, so that gradients
        stay sharded between them.
        """
        if last or self.module is self.model:
            return contextlib.nullcontext()
        return self.module.no_sync()

    def _update(self) -> tuple[torch.Tensor | None, bool]:
        """Unscale, clip, step; skip the step when fp16 gradients overflowed on any rank."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.loss_scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale)
        norm = get_total_norm(gradients)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        skipped = self.compute_dtype is torch.float16 and not bool(norm.isfinite())
        if not skipped:
            if self.max_grad_norm is not None:
                clip_grads_with_norm_(self.model.parameters(), self.max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
        if self.compute_dtype is torch.float16:
            self._adapt_loss_scale(skipped)
        return (None if skipped else norm), skipped

    def _adapt_loss_scale(self, skipped: bool) -> None:
        self._good_steps = 0 if skipped else self._good_steps + 1
        if skipped:
            self.loss_scale = max(1.0, self.loss_scale / 2)
        elif self._good_steps % LOSS_SCALE_WINDOW == 0:
            self.loss_scale *= 2
