"""DeepSpeed: ZeRO 1, 2 and 3, offload to the host, Infinity; and its pipeline with ZeRO-1.
The pipeline runs 1F1B. Activations and their gradients, [B, T, D] a micro-batch in the dtype of the
weights, travel between neighbors; the end stages sum the embedding's gradients once a step."""

import contextlib
import io
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from distributed_training.data.samples import StepBatch
from distributed_training.engines import base
from distributed_training.engines.graphs import to_device
from distributed_training.models.attention import Documents
from distributed_training.models.decoder import Block, Decoder, Past, parameter_groups
from distributed_training.parallel import blocks, private
from distributed_training.parallel.lora import apply_lora
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.tensor_files import Part, TensorFiles
from distributed_training.plan.plan import Plan


class DeepSpeedEngine(base.Engine):
    """The same model, AdamW and loss as the native engine, with state where the JSON puts it."""

    def __init__(self, model: Decoder, plan: Plan, topology: Topology) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        private.import_muon()
        private.leave_out_extensions()  # before the pipeline calls init_distributed
        self.topology = topology
        self.plan = plan
        config = plan.config
        strategy = plan.strategy
        if config.lora_rank:
            apply_lora(model, config, torch.device("cpu"))
            # ZeRO-3 drops a block's weights once its input has a gradient: so the first's has one.
            model.token_embedding.register_forward_hook(lambda _layer, _ids, x: x.requires_grad_())
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        tables = set(model.vocabulary_parameters())
        rows = model.size.vocab_size
        self.copied = tables if model.size.tied else set()
        self.shapes = {  # before they are divided, and without padding
            name: (rows if name in tables else len(parameter), *parameter.shape[1:])
            for parameter, name in names.items()
        }
        blocks.apply_checkpointing(model, config.activation_checkpointing, config.lora_rank)
        blocks.apply_chunked_loss(model, config)
        blocks.apply_compile(model, config, ends=False)
        if strategy.zero.stage == 3:
            # A block's parameters at once: fewer, larger all-gathers, and no hooks to compile.
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks["0"])])
        module = self._build_module(model)
        groups = parameter_groups(module.parameters(), config.weight_decay)
        settings = {"lr": float(config.learning_rate), **base.ADAM}
        if strategy.steps_on_host:
            optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
        else:
            optimizer = torch.optim.AdamW(groups, fused=topology.device_type == "cuda", **settings)
        parts = {"model": module, "optimizer": optimizer, "config": plan.deepspeed_json}
        quiet = contextlib.redirect_stdout(io.StringIO())  # it prints what it was given
        with contextlib.nullcontext() if config.verbose else quiet:
            found = deepspeed.initialize(**parts, dist_init_required=False)
        self.engine, self.optimizer = found[:2]
        self.model = self.engine.module
        self.named = {names[p]: p for p in self.model.parameters() if p.requires_grad}
        if strategy.zero.stage == 3:
            # The output layer's weight is used outside of the module that holds it.
            deepspeed.zero.register_external_parameter(self.model, self.model.output_weight)

    def _build_module(self, model: Decoder) -> nn.Module:
        return model

    def train_step(self, batch: StepBatch) -> base.StepResult:
        # DeepSpeed divides by the accumulation steps and averages over ranks; undo both.
        scale = self.plan.batch.num_microbatches * self.topology.dp_size / batch.num_targets
        loss_sum = self._run(batch, scale)
        skipped = not self.engine.was_step_applied()
        norm = None if skipped else self.engine.get_global_grad_norm()
        return base.StepResult(loss_sum, norm, skipped)

    def _run(self, batch: StepBatch, scale: float) -> torch.Tensor:
        """All micro-batches and the update, for `scale` times the loss; this rank's summed loss."""
        loss_sum = torch.zeros((), device=self.topology.device)
        self.engine.train()
        for arrays in batch.micro_batches:
            loss = self.engine(*to_device(self.topology.device, *arrays))
            self.engine.backward(loss * scale)
            self.engine.step()
            loss_sum += loss.detach()
        return loss_sum

    def eval_step(self, *arrays: np.ndarray) -> torch.Tensor:
        with base.evaluating(self.engine):
            return self.engine(*to_device(self.topology.device, *arrays))

    def logits(self, input_ids: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        with base.evaluating(self.engine):
            return self.engine(input_ids.to(self.topology.device), past=past)

    def describe_dtypes(self) -> dict[str, str]:
        parameter, gradient = self.engine.get_data_types()
        return {
            "parameters": f"{parameter}, fp32 master copy",
            "arithmetic": str(parameter),
            "gradients": str(gradient),
            "optimizer_state": str(torch.float32),
            "reduction": str(self.engine.communication_data_type),
        }

    def state_parts(self) -> Iterator[Part]:
        held: dict[int, dict[str, Any]] = {}

        def read(group: int) -> dict[str, Any]:  # what lies on disk: once, one group in memory
            if group not in held:
                held.clear()
                held[group] = private.read_zero_group(self.optimizer, group)
            return held[group]

        kinds = ("weight", *(base.MOMENTS if self.counters()["adam_steps"] else ()))
        for group in range(len(private.zero_partitions(self.optimizer))):
            yield from self._parts(group, kinds, read)

    def _parts(
        self, group: int, kinds: Iterable[str], read: Callable[[int], dict[str, Any]]
    ) -> Iterator[Part]:
        """This rank's fragments, without padding, of the weights and moments of one group of the
        optimizer, whose flat tensors `read` gives by kind."""
        for name, parameter in self.named.items():
            fragment = private.find_zero_fragment(self.optimizer, parameter)
            if fragment is None or fragment[0] != group:
                continue
            _, offset, start, count = fragment
            count = max(0, min(count, math.prod(self.shapes[name]) - start))
            place = slice(offset, offset + count)
            # The last stage's copy of a tied embedding is the first one's.
            writes = name not in self.copied or self.topology.pp_rank == 0
            for kind in kinds:
                yield Part(
                    name=f"{kind}/{name}", shape=self.shapes[name], start=(start,), size=(count,),
                    get=lambda kind=kind, place=place: read(group)[kind].detach()[place],
                    writes=writes,
                )  # fmt: skip

    def counters(self) -> dict[str, float]:
        adam = self.optimizer.optimizer
        scaler = self.optimizer.loss_scaler
        first, *_ = private.zero_partitions(self.optimizer)
        return {
            "adam_steps": float(adam.state.get(first, {}).get("step", 0)),
            "loss_scale": float(scaler.cur_scale),
            "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1 if scaler.dynamic else 0,
        }

    @torch.no_grad()
    def load(self, saved: TensorFiles, counters: dict[str, float]) -> None:
        adam = self.optimizer.optimizer
        scaler = self.optimizer.loss_scaler
        steps = int(counters["adam_steps"])
        on_host = self.plan.strategy.steps_on_host
        for group, flat in private.zero_groups_to_write(self.optimizer):
            # Moments that are there are written to: whoever keeps them on disk knows them.
            state = adam.state[flat]
            held = {"weight": flat}
            # As the optimizer itself keeps it.
            state["step"] = steps if on_host else torch.tensor(float(steps)).to(flat.device)
            for moment in base.MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(flat)
                held |= {moment: state[moment].zero_()} if steps else {}
            for part in self._parts(group, held, lambda _, held=held: held):
                part.get().copy_(saved.read(part))
        if scaler.dynamic:
            scaler.cur_scale = counters["loss_scale"]
            scaler.last_overflow_iter = -1
            scaler.cur_iter = int(counters["good_steps"])
        if on_host:
            private.restore_cpu_adam_powers(adam, steps, **base.ADAM)

    def close(self) -> None:
        self.engine.destroy()
        private.forget_pipeline_grid()
        super().close()


def _tied_part(module: nn.Module, weight: str, **options: Any) -> TiedLayerSpec:
    """A module of the model, which DeepSpeed would otherwise make anew, with the tied weight."""
    spec = TiedLayerSpec("tied", nn.Module, tied_weight_attr=[weight], **options)
    spec.build = lambda log=False: module
    return spec


class PipelinedDecoder(private.CutWhereTold, PipelineModule):
    """This process's stage of a model, which DeepSpeed sees as one list of layers: what precedes
    the blocks, blocks, last norm, and the output layer's rows, which `head` uses."""

    def __init__(self, model: Decoder, stages: tuple[range, ...], topology: Topology) -> None:
        """Takes modules over from `model`, which is of no use afterwards. Collective."""
        self.loss = model.loss
        self.project = model.project
        self.vocab_size = model.size.vocab_size
        self.scale = 1.0
        start = model.stage(range(0))
        layers: list[Any] = [start, *model.blocks.values(), model.norm_out]
        rows = start.token_embedding if model.size.tied else model.output_rows
        if model.size.tied and rows.weight.requires_grad:
            layers[0] = _tied_part(start, "token_embedding.weight")
            layers.append(_tied_part(rows, "weight", forward_fn=lambda _rows, x: x))
        else:  # an output layer that `head` uses has a place among the layers
            layers.append(nn.Identity())
            layers[-1].rows = rows
        # In a list, as a module it would be a layer's parameter twice; other stages do not keep it.
        self.rows = [rows] if topology.pp_rank == topology.pp - 1 else []
        self.parts = [0, *(1 + blocks.stop for blocks in stages[:-1]), len(layers)]
        grid = PipeDataParallelTopology(num_pp=topology.pp, num_dp=topology.dp_size)
        # It prints what it was given, and broadcasts the embedding, which is no part of training.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            super().__init__(layers, topology=grid, loss_fn=self.head)
        # (positions, ends) of micro-batches of packed records, in the order in which all stages
        # compute them. Each process has its own: nothing is sent.
        self.to_come = deque[Sequence[torch.Tensor]]()
        self.documents: Documents | None = None  # of the micro-batch that is computed
        self.describe = model.describe
        for layer in self.forward_funcs:
            if isinstance(layer, Decoder | Block):
                layer.register_forward_pre_hook(self._hand_over, with_kwargs=True)

    def forward(self, forward_input: torch.Tensor) -> torch.Tensor:
        """What this stage makes of the next micro-batch."""
        self.documents = self.describe(*self.to_come.popleft()) if self.to_come else None
        return super().forward(forward_input)

    def _hand_over(self, layer: nn.Module, arguments: Any, options: dict[str, Any]) -> Any:
        """Tell a layer the documents, if records are packed."""
        if self.documents is not None and isinstance(layer, Decoder):
            options = {**options, "positions": self.documents.positions}
        elif self.documents is not None:
            options = {**options, "documents": self.documents}
        return arguments, options

    def head(self, x: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        """DeepSpeed's loss function: `scale` times the summed loss, or logits [B, T, V]."""
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
        self.model.to_come.extend(documents for _, _, *documents in micro_batches if documents)
        self.engine.train_batch(iter([(ids, targets) for ids, targets, *_ in micro_batches]))
        last = self.engine.is_last_stage()
        return self.engine.total_loss / scale if last else torch.zeros((), device=device)

    def eval_step(self, *arrays: np.ndarray) -> torch.Tensor:
        device = self.topology.device
        loss = self._evaluate(*to_device(device, *arrays))
        return torch.zeros((), device=device) if loss is None else loss

    def logits(self, input_ids: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        logits = self._evaluate(input_ids, None)
        if logits is None:
            shape = (*input_ids.shape, self.model.vocab_size)
            dtypes = self.engine.get_data_types()
            logits = torch.empty(shape, dtype=dtypes[0], device=self.topology.device)
        grid = self.engine.grid
        logits = logits.contiguous()
        last = grid.stage_to_global(self.topology.pp - 1)
        dist.broadcast(logits, last, group=grid.get_pipe_parallel_group())
        return logits

    def _evaluate(
        self, ids: torch.Tensor, targets: torch.Tensor | None, *documents: torch.Tensor
    ) -> torch.Tensor | None:
        """What `head` makes of one batch [B, T], on the last stage; None elsewhere."""
        self._expect(ids.shape)
        if documents:
            self.model.to_come.append(documents)
        self.model.scale = 1.0
        self.engine.total_loss = None  # DeepSpeed adds to it whatever the last batch returned
        with base.evaluating(self.model):
            outputs = self.engine.eval_batch(
                iter([(ids, targets)]), reduce_output=None, bcast_loss=False, num_micro_batches=1
            )
        return outputs[0] if self.engine.is_last_stage() else None

    def _expect(self, shape: torch.Size) -> None:
        """DeepSpeed tells the next stage the shape of the first batch and then relies on it."""
        if shape != self._shape:
            self.engine.reset_activation_shape()
            self._shape = shape
