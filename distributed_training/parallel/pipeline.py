"""Pipeline parallelism: the blocks dealt out to stages, micro-batches passed along them.

Activations travel forward and their gradients backward between neighboring stages, [B, T, D] each
way and micro-batch (with sequence parallelism each of R processes sends its own share of them)."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from distributed_training.models.decoder import Decoder
from distributed_training.parallel.gradients import local_part
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.private import foreach_copy_
from distributed_training.parallel.private_pipelining import GivenOrder, TwoWayStage
from distributed_training.parallel.zero_bubble import WeightGradients
from distributed_training.plan.plan import Plan

RUN_BY: dict[str, Any] = {  # schedule -> a class of torch's, or one derived from it
    "gpipe": get_schedule_class("GPipe"),
    "1f1b": get_schedule_class("1F1B"),
    "interleaved": get_schedule_class("Interleaved1F1B"),
    "zb-h1": GivenOrder,  # torch's InterleavedZeroBubble takes whole rounds of micro-batches only
    "zb-v": GivenOrder,  # torch's ZBVZeroBubble has one order for all durations
    "zb-auto": GivenOrder,
}


class Pipeline:
    """This process's stages under a schedule. All methods are collective over `group`."""

    def __init__(
        self, stages: dict[int, Decoder], plan: Plan, topology: Topology, group: dist.ProcessGroup
    ) -> None:
        """`stages`: those of this process. `group`: the processes of its pipeline."""
        config = plan.config
        ranks = plan.layout.ranks
        device = topology.device
        self.stages = stages
        self.ranks = ranks
        self.group = group
        self.device = device
        self.tp_parts = plan.tp_parts
        some = next(iter(stages.values()))
        self.size = some.size
        self.ties = some.size.tied and not config.lora_rank  # first and last stage's embedding
        self.dtype = some.compute_dtype or torch.float32
        self.first = stages.get(0)
        self.last = stages.get(len(ranks) - 1)
        self._scale = torch.ones((), device=device)
        other = topology.new_pipeline_group()
        # NCCL connects two processes at their first message and waits for both: here, at once.
        one = torch.zeros(1, device=device)
        peers = [(topology.pp_rank + step) % topology.pp for step in (1, -1)]
        _exchange(other, [(peer, one, torch.empty_like(one)) for peer in peers])
        # With shapes given, torch need not run the stages to find them out.
        batch_shape = (plan.batch.micro_batch_size, config.max_length)
        hidden = self._empty_hidden(batch_shape, "meta").requires_grad_()
        ids = torch.empty(batch_shape, dtype=torch.long, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        wrapped = []
        for index, stage in stages.items():
            later = None
            if plan.schedule.splits_backward:
                later = WeightGradients(stage, device, self.tp_parts).take
            given = ids if stage.is_first else hidden
            made = loss if stage.is_last else hidden
            shape: Any = (stage, index, len(ranks), device, given, made)
            wrapped.append(TwoWayStage(*shape, group=group, dw_builder=later))
            wrapped[-1].other = other
        kind = RUN_BY[config.pipeline_schedule]
        planned = {"plan": plan} if kind is GivenOrder else {}
        self.schedule = kind(
            wrapped[0] if issubclass(kind, PipelineScheduleSingle) else wrapped,
            n_microbatches=plan.batch.num_microbatches,
            loss_fn=lambda output, _target: output * self._scale,
            scale_grads=False,
            **planned,
        )

    def forward_backward(
        self,
        scale: torch.Tensor,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *documents: torch.Tensor,
    ) -> torch.Tensor:
        """All micro-batches, [m B, T] each, for gradients of `scale` times the loss. Returns the
        summed loss where the last stage is, zero elsewhere."""
        self._scale = scale
        arguments = () if self.first is None else (inputs,)
        losses: list[torch.Tensor] = []
        # `target` is what torch hands to loss_fn; the stage itself needs them, too.
        words = {"targets": targets, "target": targets, "losses": losses}
        words |= dict(zip(("positions", "ends"), documents, strict=False))
        self.schedule.step(*arguments, return_outputs=False, **words)
        if self.last is None:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).sum().detach() / scale

    @torch.no_grad()
    def relay(
        self, ids: torch.Tensor, targets: torch.Tensor | None = None, *documents: torch.Tensor
    ) -> torch.Tensor | None:
        """What the last stage makes of one batch [B, T], there; None elsewhere. Forward only."""
        out = ids
        for index, stage in self.stages.items():
            if not stage.is_first and index - 1 not in self.stages:
                out = self._empty_hidden(ids.shape, self.device)
                dist.recv(out, group=self.group, group_src=self.ranks[index - 1])
            out = stage(out, targets, *documents)
            if not stage.is_last and index + 1 not in self.stages:
                dist.send(out.contiguous(), group=self.group, group_dst=self.ranks[index + 1])
        return out if self.last is not None else None

    def broadcast_logits(self, logits: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
        """What `relay` returned on the last stage, [B, T, V], to all processes of `group`."""
        if logits is None:
            shape = (*ids.shape, self.size.vocab_size)
            logits = torch.empty(shape, dtype=self.dtype, device=self.device)
        logits = logits.contiguous()
        dist.broadcast(logits, group=self.group, group_src=self.ranks[-1])
        return logits

    def add_tied_gradients(self) -> None:
        """First and last stage take the sum of both gradients of the tied embedding."""
        ends = [part for part in (self.first, self.last) if part is not None and self.ties]
        gradients: list[Any] = [local_part(part.output_weight.grad) for part in ends]
        if len(ends) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif ends:
            other = self.ranks[0 if self.first is None else -1]
            theirs = torch.empty_like(gradients[0])
            _exchange(self.group, [(other, gradients[0], theirs)])
            gradients[0] += theirs  # the same two numbers on both sides, so the same sum

    def counted_twice(self) -> set[torch.Tensor]:
        """Parameters that another stage holds as well and counts in the gradient norm."""
        copied = self.last is not None and not self.last.is_first and self.size.tied
        return {self.last.output_weight} if copied else set()

    def _empty_hidden(self, shape: tuple[int, ...], device: Any) -> torch.Tensor:
        """What travels for token ids of `shape`, [B, T]: this process's part of [B, T, D]."""
        samples, tokens = self.tp_parts
        hidden = (shape[0] // samples, shape[1] // tokens, self.size.hidden_size)
        return torch.empty(hidden, dtype=self.dtype, device=device)


def _exchange(
    group: dist.ProcessGroup, messages: Iterable[tuple[int, torch.Tensor, torch.Tensor]]
) -> None:
    """Send to and receive from each (rank in `group`, sent, received), all at once, and wait."""
    operations = []
    for peer, sent, received in messages:
        operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=peer))
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


class RoundedWeights:
    """A module's parameters rounded to a narrower dtype once a step, as FSDP does where it is used.
    Inside `with` the module has the rounded copies, 2 bytes a parameter that stay allocated;
    autograd adds their gradients up in fp32, and at the end they are the fp32 parameters' own."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.places = [
            (owner, name)
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        self.parameters = [getattr(owner, name) for owner, name in self.places]
        self.copies = [nn.Parameter(p.detach().to(dtype)) for p in self.parameters]
        for copy in self.copies:
            copy.grad_dtype = torch.float32  # what accumulates into .grad

    @torch.no_grad()
    def __enter__(self) -> None:
        foreach_copy_(
            [local_part(copy) for copy in self.copies],
            [local_part(parameter) for parameter in self.parameters],
        )
        self._swap(self.parameters, self.copies)

    def __exit__(self, *_error: object) -> None:
        self._swap(self.copies, self.parameters)

    def _swap(self, before: list[nn.Parameter], after: list[nn.Parameter]) -> None:
        for (owner, name), old, new in zip(self.places, before, after, strict=True):
            new.grad = old.grad
            old.grad = None
            setattr(owner, name, new)
