"""DeepSpeed's pipeline engine with ZeRO-1: stages along pp, optimizer state divided over dp.

DeepSpeed runs 1F1B. Between neighbouring stages travel activations and their gradients, [B, T, D]
each way and micro-batch, in the dtype of the weights; the embedding, which first and last stage
hold both, has its gradients summed over the two once a step.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from distributed_training.data.samples import StepBatch
from distributed_training.engines.base import evaluating, to_device
from distributed_training.engines.deepspeed import DeepSpeedEngine
from distributed_training.models.decoder import Decoder
from distributed_training.parallel.private import (
    CutWhereTold,
    forget_pipeline_grid,
    is_pipeline_copy,
)
from distributed_training.plan.topology import Topology


def tied_part(module: nn.Module, weight: str, **options: Any) -> TiedLayerSpec:
    """A module of the model, which DeepSpeed would otherwise make anew, with the tied weight."""
    spec = TiedLayerSpec("tied", nn.Module, tied_weight_attr=[weight], **options)
    spec.build = lambda log=False: module
    return spec


class PipelinedDecoder(CutWhereTold, PipelineModule):
    """This process's stage of a model, cut where the layout says.

    DeepSpeed sees the model as one list of layers: what precedes the blocks, blocks, last norm, and
    the output layer's rows, for which `head` uses them.
    """

    def __init__(self, model: Decoder, stages: tuple[range, ...], topology: Topology) -> None:
        """Takes modules over from `model`, which is of no use afterwards. Collective."""
        self.loss, self.project, self.vocab_size = model.loss, model.project, model.size.vocab_size
        self.scale = 1.0
        start = model.stage(range(0), is_first=True, is_last=False)
        norm, *rows = [model.get_submodule(name) for name in model.last_modules]
        layers: list[Any] = [start, *model.split().blocks, norm]
        if model.size.tied:
            (weight,) = start.split().vocabulary_parameters
            layers[0] = tied_part(start, weight)
            rows = [start.get_submodule(weight.removesuffix(".weight"))]
            layers.append(tied_part(rows[0], "weight", forward_fn=lambda _rows, x: x))
        else:  # an output layer that `head` uses has a place among the layers
            layers.append(nn.Identity())
            layers[-1].rows = rows[0]
        # In a list, as a module it would be a layer's parameter twice; other stages do not keep it.
        self.rows = rows if topology.pp_rank == topology.pp - 1 else []
        self.parts = [0, *(1 + blocks.stop for blocks in stages[:-1]), len(layers)]
        grid = PipeDataParallelTopology(num_pp=topology.pp, num_dp=topology.dp_size)
        place = grid.get_coord(topology.rank)
        assert (place.pipe, place.data) == (topology.pp_rank, topology.dp_rank)
        # It prints what it was given, and broadcasts the embedding, which is no part of training.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            super().__init__(layers, topology=grid, loss_fn=self.head)
        self.drop_layer_specs()
        own = set(self.parameters())
        self.names = {p: name for name, p in model.named_parameters() if p in own}

    def head(self, x: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        """`scale` times the summed loss, or logits [B, T, V], as a Decoder makes them.

        As DeepSpeed's loss function rather than a layer it has the targets, and need not hand
        logits over.
        """
        weight = self.rows[0].weight
        if targets is None:
            return self.project(x, weight, self.vocab_size)
        return self.scale * self.loss(x, weight, targets, self.vocab_size)


class DeepSpeedPipelineEngine(DeepSpeedEngine):
    """Stages under DeepSpeed's 1F1B; the rest is as in the other DeepSpeed strategies."""

    _shape: torch.Size | None = None

    def _build_module(self, model: Decoder) -> nn.Module:
        # PipelineModule makes groups of processes before deepspeed.initialize is called.
        backend = get_accelerator().communication_backend_name()
        deepspeed.init_distributed(backend, dist_init_required=False)
        return PipelinedDecoder(model, self.plan.layout.stages, self.topology)

    def _run(self, batch: StepBatch, scale: float) -> torch.Tensor:
        device = self.topology.device
        micro_batches = [to_device(device, *arrays) for arrays in batch.micro_batches]
        self._expect(micro_batches[0][0].shape)
        self.model.scale = scale
        self.engine.train_batch(iter(micro_batches))
        last = self.engine.is_last_stage()
        return self.engine.total_loss / scale if last else torch.zeros((), device=device)

    def eval_step(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        device = self.topology.device
        loss = self._evaluate(*to_device(device, inputs, targets))
        return torch.zeros((), device=device) if loss is None else loss

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = self._evaluate(input_ids, None)
        if logits is None:
            shape, dtype = (
                (*input_ids.shape, self.model.vocab_size),
                self.engine.get_data_types()[0],
            )
            logits = torch.empty(shape, dtype=dtype, device=self.topology.device)
        grid, logits = self.engine.grid, logits.contiguous()
        last = grid.stage_to_global(self.topology.pp - 1)
        dist.broadcast(logits, last, group=grid.get_pipe_parallel_group())
        return logits

    def _evaluate(self, ids: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor | None:
        """What `head` makes of one batch [B, T], on the last stage; None elsewhere."""
        self._expect(ids.shape)
        self.model.scale = 1.0
        self.engine.total_loss = None  # DeepSpeed adds to it whatever the last batch returned
        with evaluating(self.model):
            outputs = self.engine.eval_batch(
                iter([(ids, targets)]), reduce_output=None, bcast_loss=False, num_micro_batches=1
            )
        return outputs[0] if self.engine.is_last_stage() else None

    def _expect(self, shape: torch.Size) -> None:
        """DeepSpeed tells the next stage the shape of the first batch and then relies on it."""
        if shape != self._shape:
            self.engine.reset_activation_shape()
            self._shape = shape

    def _named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        # But the last stage's copy of the embedding.
        named = self.model.names.items()
        return [(name, parameter) for parameter, name in named if not is_pipeline_copy(parameter)]

    def close(self) -> None:
        super().close()
        forget_pipeline_grid()
