"""PyTorch's own parallelism around our model, along any axes of the mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distributed_training.config import RunConfig
from distributed_training.data import StepBatch
from distributed_training.engines.base import (
    ADAM,
    INITIAL_LOSS_SCALE,
    LOSS_SCALE_WINDOW,
    StepResult,
    collect_stages,
    to_device,
)
from distributed_training.gradients import add_up, clip_by_norm, global_norm, settle_gradients
from distributed_training.layout import Layout
from distributed_training.model import GPT2, parameter_groups
from distributed_training.parallel.activation_checkpointing import apply_activation_checkpointing
from distributed_training.parallel.compilation import apply_compile
from distributed_training.parallel.ddp import apply_ddp
from distributed_training.parallel.fsdp import apply_fsdp
from distributed_training.parallel.pipeline import Pipeline, build_stages
from distributed_training.parallel.rounding import RoundedWeights
from distributed_training.parallel.tensor_parallel import apply_tp
from distributed_training.topology import Topology

# Keys by parameter name, so that processes with different parameters can write one checkpoint.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class NativeEngine:
    """Composes the mechanisms of parallel/ in one visible order and steps AdamW."""

    def __init__(self, model: GPT2, config: RunConfig, topology: Topology, layout: Layout) -> None:
        self.topology = topology
        self.max_grad_norm = config.max_grad_norm
        self.compute_dtype = model.compute_dtype
        self.size = model.size
        self.token_parts = topology.tp if config.sequence_parallel else 1
        # DDP works over the default group, as it does in everybody's script.
        self.copies_only = topology.dp_size == topology.world_size == topology.dp_replicate
        mesh = None if self.copies_only else topology.build_mesh()

        # One process has its gradients to itself; DDP and FSDP hold them in buffers of their own.
        on_gpu = topology.device_type == "cuda"
        self.cuda_graphs = bool(config.compile) and on_gpu and topology.world_size == 1
        self.parts: list[GPT2] = [model]
        if topology.pp > 1:
            self.parts = [*build_stages(model, layout.stages, layout.ranks, topology.pp_rank)]
        self.tp_group = mesh.get_group("tp") if topology.tp > 1 else None
        self.terms: set[str] = set()
        self.rounded: list[RoundedWeights] = []
        modules = [self._spread(part, config, mesh) for part in self.parts]
        self.pipeline: Pipeline | None = None
        self.module = modules[0]
        if topology.pp > 1:
            self.pipeline = Pipeline(
                self.parts,
                layout.ranks,
                schedule=config.pipeline_schedule,
                num_microbatches=config.grad_accum_steps,
                batch_shape=(config.micro_batch_size, config.seq_len),
                token_parts=self.token_parts,
                group=mesh.get_group("pp"),
                other=topology.new_pipeline_group(),
                device=topology.device,
            )
        self.optimizers = [
            torch.optim.AdamW(
                parameter_groups(part, config.weight_decay),
                lr=float(config.learning_rate),
                fused=on_gpu,
                **ADAM,
            )
            for part in self.parts
        ]
        # Replayed graphs return gradients in the same memory each time: with accumulation they are
        # added up in tensors of ours instead of being handed over.
        self.keep_gradients = self.cuda_graphs and config.grad_accum_steps > 1
        self._prepare_gradients()
        self.loss_scale = INITIAL_LOSS_SCALE if self.compute_dtype is torch.float16 else 1.0
        self._good_steps = 0

    def _spread(self, part: GPT2, config: RunConfig, mesh: DeviceMesh | None) -> nn.Module:
        """The order of composition: tp, checkpointing, compile, then the data-parallel axes."""
        topology = self.topology
        part.to(topology.device)
        if topology.tp > 1:
            self.terms |= apply_tp(part, mesh["tp"], sequence_parallel=config.sequence_parallel)
        apply_activation_checkpointing(part, config.activation_checkpointing)
        if config.compile:
            apply_compile(part, cuda_graphs=self.cuda_graphs)
        if topology.dp_size == 1:
            if topology.pp > 1 and self.compute_dtype is not None:
                self.rounded.append(RoundedWeights(part, self.compute_dtype))
            return part
        if self.copies_only:
            return apply_ddp(part, topology)
        # Copies are shards of size 1 where layers are split, too: DDP knows whole models only.
        axes = ("dp_replicate", "dp_shard") if topology.dp_replicate > 1 else ("dp_shard",)
        apply_fsdp(part, mesh[axes], self.compute_dtype, keep_gathered=topology.pp > 1)
        return part

    def train_step(self, batch: StepBatch) -> StepResult:
        # Backward averages over dp ranks; the loss is a mean over the global batch's real tokens.
        scale = self.loss_scale * self.topology.dp_size / batch.num_targets
        for part in self.parts:
            part.train()
        if self.pipeline is None:
            loss_sum = self._accumulate(batch, scale)
        else:
            inputs, targets = (np.concatenate(arrays) for arrays in zip(*batch.micro_batches))  # noqa: B905
            with contextlib.ExitStack() as stack:
                for weights in self.rounded:
                    stack.enter_context(weights)
                loss_sum = self.pipeline.forward_backward(
                    self._to_device(inputs), self._to_device(targets), scale
                )
        settle_gradients(self._parameters())
        if self.terms:
            named = [pair for part in self.parts for pair in part.named_parameters()]
            add_up([parameter for name, parameter in named if name in self.terms], self.tp_group)
        if self.pipeline is not None:
            self.pipeline.add_tied_gradients()
        grad_norm, skipped = self._update()
        return StepResult(self._counted_once(loss_sum), batch.num_targets, grad_norm, skipped)

    def _accumulate(self, batch: StepBatch, scale: float) -> torch.Tensor:
        """Forward and backward of one micro-batch after the other; their summed loss."""
        loss_sum = torch.zeros((), device=self.topology.device)
        for index, (inputs, targets) in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            if self.cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with self._gradient_sync(last):
                loss = self.module(self._to_device(inputs), self._to_device(targets))
                (loss * scale).backward()
            loss_sum += loss.detach()
        return loss_sum

    @torch.no_grad()
    def eval_step(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        ids, wanted = self._to_device(inputs), self._to_device(targets)
        with self._evaluating():
            if self.pipeline is None:
                return self._counted_once(self.module(ids, wanted))
            loss = self.pipeline.relay(ids, wanted)
        zero = torch.zeros((), device=self.topology.device)
        return zero if loss is None else self._counted_once(loss.sum())

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        # Attention is causal: what is appended to fill the split changes nothing before it.
        ids = F.pad(input_ids, (0, -length % self.token_parts)).to(self.topology.device)
        with self._evaluating():
            if self.pipeline is None:
                logits = self.parts[0](ids)
            else:
                logits = self.pipeline.broadcast_logits(self.pipeline.relay(ids), ids)
        return logits[:, :length]

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        for part in self.parts:
            part.eval()
        with torch.compiler.set_stance("force_eager"):
            yield

    def _counted_once(self, loss: torch.Tensor) -> torch.Tensor:
        """Processes along tp see the same samples: one of them reports."""
        return loss if self.topology.tp_rank == 0 else torch.zeros_like(loss)

    def set_learning_rate(self, rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def describe_dtypes(self) -> dict[str, str]:
        compute = str(self.compute_dtype or torch.float32)
        parameter = str(next(self.parts[0].parameters()).dtype)
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
        self._zero_grad(set_to_none=True)
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            # Each part reads for itself: with zb-v both ends of the model lie here, and moments
            # that the two copies of the tied embedding shared would be updated twice.
            model_state, optimizer_state = get_state_dict(part, optimizer, options=_BY_NAME)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.load(state, checkpoint_id=folder / "dcp")
            set_state_dict(
                part,
                optimizer,
                model_state_dict=model_state,
                optim_state_dict=optimizer_state,
                options=_BY_NAME,
            )
            assert len(optimizer.state) == len(list(part.parameters()))
        self.loss_scale, self._good_steps = torch.load(folder / "loss_scale.pt")
        self._prepare_gradients()

    def _state(self) -> dict[str, dict[str, object]]:
        state: dict[str, dict[str, object]] = {"model": {}, "optimizer": {}}
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            model_state, optimizer_state = get_state_dict(part, optimizer, options=_BY_NAME)
            state["model"].update(model_state)
            state["optimizer"].update(optimizer_state)
        return state

    def full_state(self) -> dict[str, torch.Tensor] | None:
        topology = self.topology
        leads = topology.tp_rank == topology.dp_rank == 0
        state = {}
        for part in self.parts:
            # Not named_parameters: after an evaluation those are FSDP's gathered, rounded copies.
            for name, parameter in part.state_dict().items():
                full = parameter.detach()
                full = full.full_tensor() if isinstance(full, DTensor) else full
                if name == "token_embedding.weight":  # tp may have appended rows
                    full = full[: self.size.padded_vocab_size]
                if leads:
                    state[name] = full.cpu().clone()
        if leads and topology.pp > 1:
            state = collect_stages(state, topology)
        return state if topology.rank == 0 else None

    def close(self) -> None:
        del self.module, self.parts, self.optimizers, self.pipeline, self.rounded

    def _prepare_gradients(self) -> None:
        if self.keep_gradients:
            for parameter in self._parameters():
                parameter.grad = torch.zeros_like(parameter)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.parts for parameter in part.parameters()]

    def _zero_grad(self, *, set_to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.topology.device)

    def _gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """DDP averages once a step. FSDP reduce-scatters every micro-batch, so that gradients
        stay sharded between them, and adds up the shards of copies once a step.
        """
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_all_reduce(last)
        elif isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def _update(self) -> tuple[torch.Tensor | None, bool]:
        """Unscale, clip, step; skip the step when fp16 gradients overflowed on any rank."""
        parameters = self._parameters()
        if self.loss_scale != 1.0:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale)
        twice = self.pipeline.counted_twice() if self.pipeline is not None else set()
        norm = global_norm(parameters, self.topology, counted_elsewhere=twice)
        skipped = self.compute_dtype is torch.float16 and not bool(norm.isfinite())
        if not skipped:
            if self.max_grad_norm is not None:
                clip_by_norm(parameters, self.max_grad_norm, norm)
            for optimizer in self.optimizers:
                optimizer.step()
        self._zero_grad(set_to_none=not self.keep_gradients)
        if self.compute_dtype is torch.float16:
            self._adapt_loss_scale(skipped)
        return (None if skipped else norm), skipped

    def _adapt_loss_scale(self, skipped: bool) -> None:
        self._good_steps = 0 if skipped else self._good_steps + 1
        if skipped:
            self.loss_scale = max(1.0, self.loss_scale / 2)
        elif self._good_steps % LOSS_SCALE_WINDOW == 0:
            self.loss_scale *= 2
