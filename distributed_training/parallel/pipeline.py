"""Pipeline parallelism: the blocks dealt out to stages, micro-batches passed along them.

The schedules are torch.distributed.pipelining's. Activations travel forward and their gradients
backward between neighbouring stages, [B, T, D] each way and micro-batch (under tensor parallelism
with sequence parallelism each process sends its own [B, T / R, D]).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from distributed_training.gradients import local_part
from distributed_training.model import GPT2

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,  # with one stage a rank
    "zb-v": ScheduleZBVZeroBubble,
}


class Stage(GPT2):
    """A run of a model's blocks, with its embeddings or its output layer at the ends.

    Parameters have the names they have in the whole model. The last stage keeps a copy of the tied
    embedding's weights (`Pipeline.add_tied_gradients` keeps them equal).
    """

    def __init__(self, model: GPT2, blocks: range, *, index: int, num_stages: int) -> None:
        """Takes modules over from `model`, which is of no use afterwards."""
        nn.Module.__init__(self)
        self.size, self.dropout, self.compute_dtype = model.size, model.dropout, model.compute_dtype
        self.loss, self.project = model.loss, model.project
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        if self.is_first:
            self.token_embedding = model.token_embedding
            self.position_embedding = model.position_embedding
        self.blocks = nn.ModuleDict({str(i): model.blocks[str(i)] for i in blocks})
        if self.is_last:
            if not self.is_first:
                weight = model.token_embedding.weight.detach().clone()
                self.token_embedding = nn.Embedding.from_pretrained(weight, freeze=False)
            self.norm_out = model.norm_out

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Ids [B, T] on the first stage, else hidden states; hidden states out, or, on the last
        stage, the summed loss of `targets`, [1], or logits [B, T, V] without them.
        """
        if self.is_first:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if not self.is_last:
            return x
        out = self.head(x, targets)
        return out if targets is None else torch.stack([out])  # a view would upset FSDP


def build_stages(
    model: GPT2, stages: tuple[range, ...], ranks: tuple[int, ...], rank: int
) -> list[Stage]:
    """The stages of place `rank` along the pipeline, in the model's order."""
    return [
        Stage(model, blocks, index=index, num_stages=len(stages))
        for index, blocks in enumerate(stages)
        if ranks[index] == rank
    ]


class TwoWayStage(PipelineStage):
    """A PipelineStage that sends and receives over two communicators in turns: edges between
    stages, counted from 0, use `group` where they are even and `other` where they are odd.

    NCCL runs what is sent and received over one communicator one after the other, so a receive
    that waits for the stage before would hold up what is ready for the stage after: interleaved
    schedules lose more to that than they gain.
    """

    other: dist.ProcessGroup
    """The same processes as `group`."""

    def _over(self, edge: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        group = self.other if edge % 2 else self.group
        return [dist.P2POp(op.op, op.tensor, op.peer, group) for op in ops]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over(self.stage_index - 1, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over(self.stage_index, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over(self.stage_index, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over(self.stage_index - 1, super().get_bwd_send_ops(bwd_chunk_id))

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """What torch exchanges before the first step, but nothing with ourselves (a V's end lies
        where it turns): torch 2.11 sends it all the same, and gloo fails."""
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.peer != dist.get_rank()]


class Pipeline:
    """This process's stages under a schedule. All methods are collective over `group`."""

    def __init__(
        self,
        stages: list[Stage],
        ranks: tuple[int, ...],
        *,
        schedule: str,
        num_microbatches: int,
        batch_shape: tuple[int, int],
        token_parts: int,
        group: dist.ProcessGroup,
        other: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """`ranks`: place along the pipeline of every stage. `batch_shape`: [B, T] of a
        micro-batch; between stages a process sends [B, T / token_parts, D]. `other`: a second
        communicator of the processes of `group`.
        """
        self.stages, self.ranks, self.group, self.device = stages, ranks, group, device
        self.other = other
        self.token_parts = token_parts
        self.dtype = stages[0].compute_dtype or torch.float32
        self.first = next((stage for stage in stages if stage.is_first), None)
        self.last = next((stage for stage in stages if stage.is_last), None)
        self._scale = 1.0
        wrapped = [self._wrap(stage, *batch_shape) for stage in stages]
        self._greet(other)
        kind = SCHEDULES[schedule]
        self.schedule = kind(
            wrapped[0] if issubclass(kind, PipelineScheduleSingle) else wrapped,
            n_microbatches=num_microbatches,
            loss_fn=lambda output, _target: output.sum() * self._scale,
            scale_grads=False,
        )

    def _greet(self, group: dist.ProcessGroup) -> None:
        """Exchange something with both neighbours along the ring, all at once: NCCL connects two
        processes at their first message, and waits for both."""
        place, count = dist.get_rank(group), dist.get_world_size(group)
        out, back = torch.zeros(1, device=self.device), torch.zeros(2, device=self.device)
        after, before = (dist.get_global_rank(group, (place + i) % count) for i in (1, -1))
        exchange = [
            dist.P2POp(dist.isend, out, after, group),
            dist.P2POp(dist.irecv, back[:1], before, group),
            dist.P2POp(dist.isend, out, before, group),
            dist.P2POp(dist.irecv, back[1:], after, group),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()

    def _wrap(self, stage: Stage, batch: int, tokens: int) -> PipelineStage:
        """With shapes given, torch need not run the stage to find them out."""
        shape = (batch, tokens // self.token_parts, stage.size.hidden_size)
        hidden = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)
        ids = torch.empty((batch, tokens), dtype=torch.long, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        wrapped = TwoWayStage(
            stage,
            stage.index,
            len(self.ranks),
            self.device,
            input_args=ids if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
            group=self.group,
        )
        wrapped.other = self.other
        return wrapped

    def forward_backward(
        self, inputs: torch.Tensor, targets: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """All micro-batches, [m B, T] each; gradients of `scale` times the loss are left behind.

        Returns the summed loss where the last stage is, zero elsewhere.
        """
        self._scale = scale
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.first is not None else ()
        words: dict[str, Any] = {}
        if self.last is not None:
            # `target` is what torch hands to loss_fn; the stage itself needs them, too.
            words = {"targets": targets, "target": targets, "losses": losses}
        self.schedule.step(*arguments, return_outputs=False, **words)
        if self.last is None:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).sum().detach() / scale

    @torch.no_grad()
    def relay(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor | None:
        """One batch [B, T] through all stages, forward only: what the last one makes of it, there;
        None elsewhere. A process is done with a batch as soon as it has sent it on.
        """
        own = {stage.index: stage for stage in self.stages}
        out = ids
        for index, stage in own.items():
            if not stage.is_first and index - 1 not in own:
                out = self._receive(ids.shape, index - 1)
            out = stage(out, targets) if stage.is_last else stage(out)
            if not stage.is_last and index + 1 not in own:
                dist.send(out.contiguous(), self._peer(index + 1), group=self.group)
        return out if self.last is not None else None

    def broadcast_logits(self, logits: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
        """What `relay` returned on the last stage, [B, T, V], to all processes of `group`."""
        if logits is None:
            shape = (*ids.shape, self.stages[0].size.vocab_size)
            logits = torch.empty(shape, dtype=self.dtype, device=self.device)
        logits = logits.contiguous()
        dist.broadcast(logits, self._peer(len(self.ranks) - 1), group=self.group)
        return logits

    def add_tied_gradients(self) -> None:
        """First and last stage take the sum of both gradients of the tied embedding's weights."""
        mine = [s.token_embedding.weight for s in (self.first, self.last) if s is not None]
        gradients = [local_part(weight.grad) for weight in mine]
        if len(mine) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif mine:
            other = self._peer(0 if self.last is not None else len(self.ranks) - 1)
            theirs = torch.empty_like(gradients[0])
            exchange = [
                dist.P2POp(dist.isend, gradients[0], other, group=self.group),
                dist.P2POp(dist.irecv, theirs, other, group=self.group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            gradients[0] += theirs  # the same two numbers on both sides, so the same sum

    def counted_twice(self) -> set[nn.Parameter]:
        """Parameters that another stage holds as well and counts in the gradient norm."""
        if self.last is None or self.last.is_first:
            return set()
        return {self.last.token_embedding.weight}

    def _receive(self, shape: torch.Size, sender: int) -> torch.Tensor:
        batch, tokens = shape
        hidden = (batch, tokens // self.token_parts, self.stages[0].size.hidden_size)
        x = torch.empty(hidden, dtype=self.dtype, device=self.device)
        dist.recv(x, self._peer(sender), group=self.group)
        return x

    def _peer(self, stage: int) -> int:
        """Global rank that holds a stage, among those of this process's pipeline."""
        return dist.get_global_rank(self.group, self.ranks[stage])
