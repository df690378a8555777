"""Implement pipeline parallelism. Blocks are partitioned into stages, and micro-batches pass
through the stages.

Neighboring stages send each other activations and their gradients, [B, T, D] per micro-batch. With
sequence parallelism over R ranks, each rank sends 1/R of each tensor."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from distributed_training.models.decoder import Decoder
from distributed_training.models.preference import METRICS
from distributed_training.models.private import local_part, stored_parameter
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.private import foreach_copy_
from distributed_training.parallel.private_pipelining import PlannedSchedule, TwoGroupStage
from distributed_training.parallel.zero_bubble import WeightGradients
from distributed_training.plan.plan import Plan

SCHEDULE_CLASSES: dict[str, Any] = {  # schedule -> torch's schedule class
    "gpipe": get_schedule_class("GPipe"),
    "1f1b": get_schedule_class("1F1B"),
    "interleaved": get_schedule_class("Interleaved1F1B"),
}  # The others use PlannedSchedule. For zb-h1, torch's class needs m to be a multiple of p.


class Pipeline:
    """Stages that this rank runs, and their schedule. Each method must be called by all ranks of
    `group`."""

    def __init__(
        self, stages: dict[int, Decoder], plan: Plan, topology: Topology, group: dist.ProcessGroup
    ) -> None:
        """Build the schedule. `stages` maps stage indices to this rank's stages. `group` contains
        the ranks of this pipeline. All ranks of the run must build their pipelines together."""
        config = plan.config
        self.stages = stages
        self.stage_ranks = plan.stages.ranks  # pipeline rank of each stage
        self.group = group
        self.device = device = topology.device
        self.tp_parts = plan.tp_parts
        self.size = plan.size
        # True if the first and the last stage each have a trainable copy of the tied embedding
        self.has_tied_embedding = self.size.tied and not config.lora_rank
        self.dtype = next(iter(stages.values())).compute_dtype or torch.float32
        self.first_stage = stages.get(0)
        self.last_stage = stages.get(len(self.stage_ranks) - 1)
        self._scale = torch.ones((), device=device)
        self._results: list[torch.Tensor] = []  # of the micro-batches of this step
        # With dp, FSDP rounds the weights.
        self.rounded_weights: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if topology.dp_size == 1 and self.dtype is not torch.float32:
            self.rounded_weights = RoundedWeights(nn.ModuleList(stages.values()), self.dtype)
        second_group = topology.new_pipeline_group()
        # At the first message between two ranks, NCCL connects them and blocks both, so connect
        # them now.
        message = torch.zeros(1, device=device)
        peers = [(topology.pp_rank + step) % topology.pp for step in (1, -1)]
        messages = [(peer, message, torch.empty_like(message)) for peer in peers]
        _exchange(second_group, messages)
        # With these example tensors, torch need not run the stages to infer shapes.
        batch_shape = (plan.batch.micro_batch_size, config.max_length)
        hidden = self._empty_hidden(batch_shape, "meta").requires_grad_()
        ids = torch.empty(batch_shape, dtype=torch.long, device="meta")
        loss_shape = (1 + len(METRICS),) if config.has_pairs else ()
        loss = torch.empty(loss_shape, device="meta", requires_grad=True)
        pipeline_stages = []
        for index, stage in stages.items():
            dw_builder = None
            if plan.schedule.splits_backward:
                dw_builder = WeightGradients(stage, self.tp_parts).build_dw_runner
            example_input = ids if stage.is_first else hidden
            example_output = loss if stage.is_last else hidden
            pipeline_stage = TwoGroupStage(
                stage,
                index,
                len(self.stage_ranks),
                device,
                example_input,
                example_output,
                group=group,
                dw_builder=dw_builder,
            )
            pipeline_stage.second_group = second_group
            pipeline_stages.append(pipeline_stage)
        options: dict[str, Any] = {
            "n_microbatches": plan.batch.num_microbatches,
            "loss_fn": self._scale_loss,
            "scale_grads": False,
        }
        schedule_class = SCHEDULE_CLASSES.get(config.pipeline_schedule)
        if schedule_class is None:
            self.schedule = PlannedSchedule(pipeline_stages, plan, **options)
        elif issubclass(schedule_class, PipelineScheduleSingle):
            self.schedule = schedule_class(pipeline_stages[0], **options)
        else:
            self.schedule = schedule_class(pipeline_stages, **options)

    def forward_backward(
        self,
        scale: torch.Tensor,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *documents: torch.Tensor,
    ) -> torch.Tensor:
        """Run the m micro-batches in the tensors [m B, T], and accumulate the gradients of
        `scale * loss`. Return the summed loss, or sums of pairs, on the rank with the last stage,
        and 0 on other ranks."""
        self._scale = scale
        arguments = () if self.first_stage is None else (inputs,)
        self._results = []
        # torch passes `target` to loss_fn, but the last stage itself needs `targets`.
        kwargs = {"targets": targets, "target": targets, "losses": []}
        kwargs |= dict(zip(("positions", "ends", "values"), documents, strict=False))
        with self.rounded_weights:
            self.schedule.step(*arguments, return_outputs=False, **kwargs)
        if self.last_stage is None:
            return torch.zeros((), device=self.device)
        return torch.stack(self._results).sum(0)

    def _scale_loss(self, result: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        self._results.append(result.detach())
        return result.sum() * self._scale  # Only the loss has a gradient, not the metrics of pairs.

    def forward(
        self, ids: torch.Tensor, targets: torch.Tensor | None = None, *documents: torch.Tensor
    ) -> torch.Tensor | None:
        """Run the forward pass of one batch [B, T] through all stages. Return the output of the
        last stage on the rank with that stage, and None on other ranks."""
        out = ids
        for index, stage in self.stages.items():
            if not stage.is_first and index - 1 not in self.stages:
                out = self._empty_hidden(ids.shape, self.device)
                dist.recv(out, group=self.group, group_src=self.stage_ranks[index - 1])
            out = stage(out, targets, *documents)
            if not stage.is_last and index + 1 not in self.stages:
                target = self.stage_ranks[index + 1]
                dist.send(out.detach().contiguous(), group=self.group, group_dst=target)
        return out if self.last_stage is not None else None

    def add_tied_gradients(self) -> None:
        """Replace the tied embedding's gradients in the first and the last stage with their sum."""
        tied_stages = [
            stage
            for stage in (self.first_stage, self.last_stage)
            if stage is not None and self.has_tied_embedding
        ]
        gradients: list[Any] = [local_part(stage.output_weight.grad) for stage in tied_stages]
        if len(tied_stages) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif tied_stages:
            peer = self.stage_ranks[0 if self.first_stage is None else -1]
            peer_gradient = torch.empty_like(gradients[0])
            _exchange(self.group, [(peer, gradients[0], peer_gradient)])
            # Both stages add the same two numbers, so their sums are equal.
            gradients[0] += peer_gradient

    def _empty_hidden(self, shape: tuple[int, ...], device: Any) -> torch.Tensor:
        """Return an uninitialized tensor for this rank's shard of the activations [B, T, D] that
        stages send each other. `shape` is the shape [B, T] of the token ids."""
        samples, tokens = self.tp_parts
        hidden_shape = (shape[0] // samples, shape[1] // tokens, self.size.hidden_size)
        return torch.empty(hidden_shape, dtype=self.dtype, device=device)


def _exchange(
    group: dist.ProcessGroup, messages: Iterable[tuple[int, torch.Tensor, torch.Tensor]]
) -> None:
    """Send and receive all messages concurrently, and wait until they complete. Each message is a
    tuple (rank of the peer in `group`, tensor to send, tensor to receive into)."""
    operations = []
    for peer, outgoing, incoming in messages:
        operations.append(dist.P2POp(dist.isend, outgoing, group=group, group_peer=peer))
        operations.append(dist.P2POp(dist.irecv, incoming, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


class RoundedWeights:
    """Trainable parameters of a module, rounded to a 16-bit dtype once per step, as in FSDP.

    In the `with` block, the module uses the rounded copies. Each gradient of a copy is added to the
    gradient of its fp32 parameter. The copies stay allocated, at 2 bytes per parameter."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.owners = [
            (owner, name)
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        # Modules of transformers' models return copies as attributes.
        self.parameters = [stored_parameter(owner, name) for owner, name in self.owners]
        self.copies: list[Any] = []
        for parameter in self.parameters:
            copy: Any = nn.Parameter(parameter.detach().to(dtype))
            copy.fp32_parameter = parameter
            copy.register_post_accumulate_grad_hook(_move_gradient)
            self.copies.append(copy)

    @torch.no_grad()
    def __enter__(self) -> None:
        foreach_copy_(
            [local_part(copy) for copy in self.copies],
            [local_part(parameter) for parameter in self.parameters],
        )
        self._set(self.copies)

    def __exit__(self, *_error: object) -> None:
        self._set(self.parameters)

    def _set(self, parameters: list[nn.Parameter]) -> None:
        for (owner, name), parameter in zip(self.owners, parameters, strict=True):
            setattr(owner, name, parameter)


def _move_gradient(copy: Any) -> None:
    """Add the gradient of a rounded copy to the gradient of its fp32 parameter. If autograd added
    in fp32 (`grad_dtype`), it would first convert the gradient, which takes about as long."""
    if copy.grad is None:  # compiled code returns no gradient for a matrix whose product has a tap
        return
    parameter = copy.fp32_parameter
    if parameter.grad is None:
        parameter.grad = copy.grad.float()
    else:
        parameter.grad += copy.grad
    copy.grad = None
