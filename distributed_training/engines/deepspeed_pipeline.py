"""DeepSpeed's pipeline engine with ZeRO-1: stages along pp, optimizer state divided over dp.

DeepSpeed runs 1F1B. Between neighbouring stages travel activations and their gradients, [B, T, D]
each way and micro-batch, in the dtype of the weights; the embedding, which first and last stage
hold both, has its gradients summed over the two once a step.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from distributed_training.config import RunConfig
from distributed_training.data import StepBatch
from distributed_training.engines.base import collect_stages, to_device
from distributed_training.engines.deepspeed import DeepSpeedEngine
from distributed_training.layout import Layout
from distributed_training.model import GPT2
from distributed_training.strategy import Strategy
from distributed_training.topology import Topology

_TIED = "token_embedding"


class Positions(nn.Module):
    """What `GPT2.embed` does once the tokens are looked up."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.position_embedding = model.position_embedding
        self.drop = nn.Dropout(model.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        positions = torch.arange(x.shape[1], device=x.device)
        return self.drop(x + self.position_embedding(positions))


class TiedEmbedding(TiedLayerSpec):
    """The model's own token embedding, which DeepSpeed would otherwise make anew."""

    def __init__(self, embedding: nn.Embedding, **options: Any) -> None:
        super().__init__(_TIED, nn.Embedding, **options)
        self.embedding = embedding

    def build(self, log: bool = False) -> nn.Embedding:
        return self.embedding


class PipelinedGPT2(PipelineModule):
    """This process's stage of a GPT2, cut where the layout says.

    DeepSpeed sees the model as one list of layers: token embedding, positions, blocks, last norm,
    and the embedding again, for which `head` uses it.
    """

    def __init__(self, model: GPT2, stages: tuple[range, ...], topology: Topology) -> None:
        """Takes modules over from `model`, which is of no use afterwards. Collective."""
        self.stages = stages  # the inherited __init__ asks for the cut
        self.loss, self.project, self.vocab_size = model.loss, model.project, model.size.vocab_size
        self.scale = 1.0
        layers = [
            TiedEmbedding(model.token_embedding),
            Positions(model),
            *model.blocks.values(),
            model.norm_out,
            TiedEmbedding(model.token_embedding, forward_fn=lambda _embedding, x: x),
        ]
        grid = PipeDataParallelTopology(num_pp=topology.pp, num_dp=topology.dp_size)
        place = grid.get_coord(topology.rank)
        assert (place.pipe, place.data) == (topology.pp_rank, topology.dp_rank)
        # It prints what it was given, and broadcasts the embedding, which is no part of training.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            super().__init__(layers, topology=grid, loss_fn=self.head)
        self._layer_specs = []  # the other stages' blocks can go
        own = set(self.parameters())
        self.names = {p: name for name, p in model.named_parameters() if p in own}

    def _partition_layers(self, method: str = "") -> None:
        first = 2  # layers before the first block
        ends = [first + blocks.stop for blocks in self.stages[:-1]]
        self.parts = [0, *ends, self._num_layers]
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def head(self, x: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        """`scale` times the summed loss, or logits [B, T, V], as GPT2.head makes them.

        As DeepSpeed's loss function rather than a layer it has the targets, and need not hand
        logits over.
        """
        weight = self.tied_modules[_TIED].weight
        if targets is None:
            return self.project(x, weight, self.vocab_size)
        return self.scale * self.loss(x, weight, targets, self.vocab_size)


class DeepSpeedPipelineEngine(DeepSpeedEngine):
    """Stages under DeepSpeed's 1F1B; the rest is as in the other DeepSpeed strategies."""

    def __init__(
        self,
        model: GPT2,
        config: RunConfig,
        strategy: Strategy,
        topology: Topology,
        document: dict[str, Any],
        layout: Layout,
    ) -> None:
        self.stages = layout.stages
        self._shape: torch.Size | None = None
        super().__init__(model, config, strategy, topology, document)

    def _build_module(self, model: GPT2) -> nn.Module:
        # PipelineModule makes groups of processes before deepspeed.initialize is called.
        backend = get_accelerator().communication_backend_name()
        deepspeed.init_distributed(backend, dist_init_required=False)
        return PipelinedGPT2(model, self.stages, self.topology)

    def _run(self, batch: StepBatch, scale: float) -> torch.Tensor:
        device = self.topology.device
        micro_batches = [
            tuple(to_device(array, device) for array in arrays) for arrays in batch.micro_batches
        ]
        self._expect(micro_batches[0][0].shape)
        self.model.scale = scale
        self.engine.train_batch(iter(micro_batches))
        if not self.engine.is_last_stage():
            return torch.zeros((), device=self.topology.device)
        return self.engine.total_loss / scale

    @torch.no_grad()
    def eval_step(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        device = self.topology.device
        loss = self._evaluate(to_device(inputs, device), to_device(targets, device))
        return torch.zeros((), device=self.topology.device) if loss is None else loss

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = self._evaluate(input_ids, None)
        if logits is None:
            logits = torch.empty(
                (*input_ids.shape, self.model.vocab_size),
                dtype=self.engine.get_data_types()[0],
                device=self.topology.device,
            )
        grid = self.engine.grid
        logits = logits.contiguous()
        last = grid.stage_to_global(self.topology.pp - 1)
        dist.broadcast(logits, last, group=grid.get_pipe_parallel_group())
        return logits

    def _evaluate(self, ids: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor | None:
        """What `head` makes of one batch [B, T], on the last stage; None elsewhere."""
        self._expect(ids.shape)
        self.model.scale = 1.0
        self.engine.total_loss = None  # DeepSpeed adds to it whatever the last batch returned
        with torch.compiler.set_stance("force_eager"):
            outputs = self.engine.eval_batch(
                iter([(ids, targets)]), reduce_output=None, bcast_loss=False, num_micro_batches=1
            )
        return outputs[0] if self.engine.is_last_stage() else None

    def _expect(self, shape: torch.Size) -> None:
        """DeepSpeed tells the next stage the shape of the first batch and then relies on it."""
        if shape != self._shape:
            self.engine.reset_activation_shape()
            self._shape = shape

    @torch.no_grad()  # DeepSpeed broadcasts the embedding
    def load(self, folder: Path) -> None:
        super().load(folder)

    def full_state(self) -> dict[str, torch.Tensor] | None:
        leads = self.topology.dp_rank == 0
        own = (
            (name, parameter)
            for parameter, name in self.model.names.items()
            if not parameter.ds_pipe_replicated  # the last stage's copy of the embedding
        )
        state = self._gather(own, keep=leads)
        if leads:
            state = collect_stages(state, self.topology)
        return state if self.topology.rank == 0 else None

    def close(self) -> None:
        super().close()
        deepspeed.utils.groups.mpu = None  # the next engine of this process would take our grid
