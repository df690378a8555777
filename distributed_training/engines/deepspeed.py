"""Train with DeepSpeed: ZeRO stages 1, 2 and 3, CPU offload and ZeRO-Infinity."""

import contextlib
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.nn as nn
from deepspeed.ops.adam import DeepSpeedCPUAdam

from distributed_training.data.samples import StepBatch
from distributed_training.engines import base
from distributed_training.engines.graphs import to_device
from distributed_training.engines.optimizers import parameter_groups
from distributed_training.models.decoder import Decoder, KVCache
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.parallel import blocks, private
from distributed_training.parallel.activation_offload import offload_saved
from distributed_training.parallel.lora import apply_lora
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.tensor_files import Part, TensorFiles
from distributed_training.plan.plan import Plan


class DeepSpeedEngine(base.Engine):
    """Engine that trains the same model as the native engine, with the same AdamW and loss. The
    DeepSpeed configuration determines how state is sharded and offloaded."""

    def __init__(
        self, model: Decoder, weights: InitialWeights, plan: Plan, topology: Topology
    ) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # This must precede init_distributed, which the pipeline's constructor calls.
        private.disable_default_extensions()
        self.topology = topology
        self.plan = plan
        config = plan.config
        strategy = plan.strategy
        cpu = torch.device("cpu")
        weights.fill(model, cpu)
        if config.lora_rank:
            apply_lora(model, plan.model, config, cpu, weights.adapters)
            # ZeRO-3 frees a block's weights when the gradient of its input is computed, so the
            # first block's input also needs a gradient.
            model.token_embedding.register_forward_hook(lambda _layer, _ids, x: x.requires_grad_())
        names: dict[torch.Tensor, str] = {
            p: name for name, p in model.named_parameters() if p.requires_grad
        }
        self.embedding_name = names.get(model.output_weight) if model.size.tied else None
        self.shapes = {name: tuple(p.shape) for p, name in names.items()}  # before sharding
        for name in self.shapes.keys() & model.vocabulary_parameters():
            self.shapes[name] = (model.size.vocab_size, *self.shapes[name][1:])  # without padding
        blocks.apply_checkpointing(
            model, config.activation_checkpointing, config.checkpointed_blocks
        )
        model.loss = blocks.build_loss(config)
        blocks.apply_compile(model, config, compile_outer_layers=False)
        if config.offloads_activations and topology.device_type == "cuda":
            offload_saved(model, config.checkpointed_blocks)
        if strategy.zero.stage == 3:
            # Gather all parameters of a block together. DeepSpeed then runs fewer but larger
            # all-gathers, and no hooks inside compiled blocks.
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks["0"])])
        module = self._build_module(model)
        groups = parameter_groups(module.parameters(), config.weight_decay)
        settings = {"lr": config.learning_rate, **base.ADAM}
        if strategy.steps_on_host:
            optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
        else:
            optimizer = torch.optim.AdamW(groups, fused=True, **settings)
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its arguments
            self.engine, self.optimizer, *_ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                config=plan.deepspeed_json,
                dist_init_required=False,
            )
        self.model = self.engine.module
        self.named_params = {names[p]: p for p in self.model.parameters() if p.requires_grad}
        if strategy.zero.stage == 3:
            # ZeRO-3 must gather the output layer's weight, which is used outside its module.
            deepspeed.zero.register_external_parameter(self.model, self.model.output_weight)

    def _build_module(self, model: Decoder) -> nn.Module:
        return model

    def train_step(self, batch: StepBatch) -> base.StepResult:
        # DeepSpeed divides by the number of accumulation steps and averages over ranks. Undo both
        # operations.
        scale = self.plan.batch.num_microbatches * self.topology.dp_size / batch.num_targets
        loss_sum = self._run(batch, scale)
        skipped = not self.engine.was_step_applied()
        grad_norm = None if skipped else self.engine.get_global_grad_norm()
        return base.StepResult(loss_sum, grad_norm, skipped)

    def _run(self, batch: StepBatch, scale: float) -> torch.Tensor:
        """Run all micro-batches and update the parameters. Each loss is multiplied by `scale`
        before the backward pass. Return this rank's summed loss without this factor."""
        losses = []
        self.engine.train()
        for arrays in batch.micro_batches:
            loss = self.engine(*to_device(self.topology.device, *arrays))
            self.engine.backward(loss.sum() * scale)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).sum(0)

    def eval_step(self, *arrays: np.ndarray) -> torch.Tensor:
        with base.evaluation_mode(self.engine, compiles=self.plan.config.has_pairs):
            return self.engine(*to_device(self.topology.device, *arrays)).detach()

    def logits(self, input_ids: torch.Tensor, past: KVCache | None = None) -> torch.Tensor:
        with base.evaluation_mode(self.engine):
            return self.engine(input_ids.to(self.topology.device), past=past)

    def state_parts(self) -> Iterator[Part]:
        cache: dict[int, dict[str, Any]] = {}

        def read(group: int) -> dict[str, Any]:
            # State on disk is read once per group, with only one group in memory at a time.
            if group not in cache:
                cache.clear()
                cache[group] = private.read_zero_group(self.optimizer, group)
            return cache[group]

        tensor_names = ["weight"]
        if self.counters()["adam_steps"]:
            tensor_names += base.MOMENTS
        for group in range(len(private.zero_partitions(self.optimizer))):
            yield from self._parts(group, tensor_names, read)

    def _parts(
        self, group: int, tensor_names: Iterable[str], read: Callable[[int], dict[str, Any]]
    ) -> Iterator[Part]:
        """Yield this rank's shards of the weights and Adam moments in one optimizer group, without
        padding. `read` returns the flat tensors of a group by name."""
        for name, parameter in self.named_params.items():
            fragment = private.find_zero_fragment(self.optimizer, parameter)
            if fragment is None or fragment[0] != group:
                continue
            _, offset, start, count = fragment
            num_unpadded = math.prod(self.shapes[name]) - start
            count = max(0, min(count, num_unpadded))
            flat_range = slice(offset, offset + count)
            # With a pipeline, only the first stage has the embedding, unless it is tied. The last
            # stage then has a copy, which is written only if the stages may be on nodes without a
            # shared disk.
            is_copy = name == self.embedding_name and self.topology.pp_rank > 0
            written_here = not is_copy or self.plan.has_node_local_files
            for tensor_name in tensor_names:

                def get(tensor_name: str = tensor_name, flat_range: slice = flat_range) -> Any:
                    return read(group)[tensor_name].detach()[flat_range]

                yield Part(
                    name=f"{tensor_name}/{name}",
                    shape=self.shapes[name],
                    start=(start,),
                    size=(count,),
                    get=get,
                    written_here=written_here,
                )

    def counters(self) -> dict[str, float]:
        adam = self.optimizer.optimizer
        scaler = self.optimizer.loss_scaler
        first, *_ = private.zero_partitions(self.optimizer)
        state = adam.state.get(first, {})  # empty before the first step
        return {
            "adam_steps": float(state.get("step", 0)),
            "loss_scale": float(scaler.cur_scale),
            "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1 if scaler.dynamic else 0,
        }

    @torch.no_grad()
    def load(self, tensor_files: TensorFiles, counters: dict[str, float]) -> None:
        adam = self.optimizer.optimizer
        scaler = self.optimizer.loss_scaler
        steps = int(counters["adam_steps"])
        on_host = self.plan.strategy.steps_on_host
        for group, flat in private.zero_groups_to_write(self.optimizer):
            # Write existing Adam moments in place, because the swapper tracks these tensors.
            state = adam.state[flat]
            tensors = {"weight": flat}
            # The CPU optimizer stores the step as an int, and torch's AdamW as a tensor.
            state["step"] = steps
            if not on_host:
                state["step"] = torch.tensor(float(steps), device=flat.device)
            for moment in base.MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(flat)
                if steps:
                    tensors[moment] = state[moment].zero_()
            for part in self._parts(group, tensors, lambda _, tensors=tensors: tensors):
                part.get().copy_(tensor_files.read(part))
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
