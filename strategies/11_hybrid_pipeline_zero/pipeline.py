"""Run DeepSpeed's pipeline with ZeRO stage 0 or 1.

The pipeline uses the 1F1B schedule. Neighboring stages exchange activations and their gradients as
[B, T, D] tensors per micro-batch, in the dtype of the weights. Once per step, the first and the
last stage sum the gradients of the tied embedding."""

import contextlib
import io
from collections import deque
from collections.abc import Sequence
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from distributed_training.data.samples import StepBatch
from distributed_training.engines import base
from distributed_training.engines.deepspeed import DeepSpeedEngine
from distributed_training.engines.graphs import to_device
from distributed_training.models.decoder import Decoder, Positions
from distributed_training.models.private import stored_parameter
from distributed_training.parallel import private
from distributed_training.parallel.mesh import Topology


class PipelinedDecoder(private.PlannedPartition, PipelineModule):
    """One process's stage of a model, which is a single layer for DeepSpeed."""

    def __init__(self, model: Decoder, stages: tuple[range, ...], topology: Topology) -> None:
        """Take over the modules of `model`, which cannot be used afterwards. All ranks must call
        this method."""
        self.scale = 1.0
        layers: list[Any] = [model.stage(blocks) for blocks in stages]
        if model.size.tied:
            # DeepSpeed sums the gradients of the first and the last stage's parameter, which has
            # one name.
            weight = stored_parameter(model.token_embedding, "weight")
            layers[-1].token_embedding.register_parameter("weight", weight)
            if weight.requires_grad:
                layers[0] = _build_tied_layer(layers[0])
                layers[-1] = _build_tied_layer(layers[-1])
        self.parts = list(range(len(layers) + 1))
        grid = PipeDataParallelTopology(num_pp=topology.pp, num_dp=topology.dp_size)
        # The constructor prints its arguments. It also broadcasts the embedding, which needs no
        # gradient.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            super().__init__(layers, topology=grid, loss_fn=self.head)
        # Of a tied layer that two stages have, DeepSpeed leaves out the second in the gradient
        # norm. Only the embedding is such a layer.
        embedding = stored_parameter(model.token_embedding, "weight")
        for parameter in self.stage.parameters():
            if parameter is not embedding:
                parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]
        # (positions, ends, values of pairs) of the next micro-batches of packed records, in the
        # order in which all stages compute them. Every process has all of these tensors, so stages
        # do not send them.
        self.upcoming_documents = deque[Sequence[torch.Tensor]]()
        self.documents: Sequence[torch.Tensor] = ()  # of the latest micro-batch
        self.results: list[torch.Tensor] = []  # of `head`, without `scale`

    @property
    def stage(self) -> Decoder:
        return self.forward_funcs[0]  # type: ignore[no-any-return]

    def forward(self, forward_input: torch.Tensor) -> torch.Tensor:
        """Return the output of this stage for the next micro-batch."""
        positions: Positions = 0
        documents = None
        if self.upcoming_documents:
            self.documents = self.upcoming_documents.popleft()
            documents = self.stage.describe_documents(*self.documents[:2])
            positions = documents.positions
        return self.stage.run(forward_input, positions, documents, past=None)

    def head(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed loss times `self.scale`, and keep the result. DeepSpeed calls this
        method as its loss function, after `forward`."""
        result = self.stage.apply_head(x, targets)
        if self.stage.pair_loss is not None:
            _, ends, *values = self.documents
            result = self.stage.pair_loss(result, targets, ends, *values)
        self.results.append(result.detach())
        return self.scale * result.sum()


def _build_tied_layer(stage: Decoder) -> TiedLayerSpec:
    """Return the layer spec for a stage with the tied embedding. DeepSpeed uses `stage` itself
    instead of building a new module."""
    spec = TiedLayerSpec("tied", nn.Module, tied_weight_attr=["token_embedding.weight"])
    spec.build = lambda log=False: stage
    return spec


class DeepSpeedPipelineEngine(DeepSpeedEngine):
    """Engine that runs pipeline stages with DeepSpeed's 1F1B schedule. Otherwise, it works like the
    engine of the other DeepSpeed strategies."""

    _shape: torch.Size | None = None

    def _build_module(self, model: Decoder) -> nn.Module:
        # PipelineModule creates process groups before deepspeed.initialize is called.
        backend = get_accelerator().communication_backend_name()
        deepspeed.init_distributed(backend, dist_init_required=False)
        return PipelinedDecoder(model, self.plan.stages.block_ranges, self.topology)

    def _run(self, batch: StepBatch, scale: float) -> torch.Tensor:
        device = self.topology.device
        micro_batches = [to_device(device, *arrays) for arrays in batch.micro_batches]
        self._set_shape(micro_batches[0][0].shape)
        self.model.scale = scale
        self.model.upcoming_documents.extend(
            documents for _, _, *documents in micro_batches if documents
        )
        self.model.results.clear()
        self.engine.train_batch(iter([(ids, targets) for ids, targets, *_ in micro_batches]))
        is_last = self.engine.is_last_stage()
        return torch.stack(self.model.results).sum(0) if is_last else torch.zeros((), device=device)

    def eval_step(self, *arrays: np.ndarray) -> torch.Tensor:
        device = self.topology.device
        loss = self._evaluate(*to_device(device, *arrays))
        return torch.zeros((), device=device) if loss is None else loss

    def _evaluate(
        self, ids: torch.Tensor, targets: torch.Tensor, *documents: torch.Tensor
    ) -> torch.Tensor | None:
        """On the last stage, return the output of `head` for one batch [B, T]. Return None on other
        stages. All ranks must call this method."""
        self._set_shape(ids.shape)
        if documents:
            self.model.upcoming_documents.append(documents)
        self.model.scale = 1.0
        self.engine.total_loss = None  # DeepSpeed would add the output of the last batch to it
        with base.evaluation_mode(self.model, compiles=self.plan.config.has_pairs):
            self.engine.eval_batch(
                iter([(ids, targets)]), reduce_output=None, bcast_loss=False, num_micro_batches=1
            )
        return self.model.results[-1] if self.engine.is_last_stage() else None

    def _set_shape(self, shape: torch.Size) -> None:
        """Reset DeepSpeed's activation shape if `shape` is new, because DeepSpeed sends the shape
        of a batch only once."""
        if shape != self._shape:
            self.engine.reset_activation_shape()
            self._shape = shape
