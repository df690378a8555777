"""DeepSpeed: ZeRO 1, 2 and 3, offload to the host, Infinity."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from distributed_training.data.samples import StepBatch
from distributed_training.engines.base import (
    ADAM,
    Engine,
    StepResult,
    collect_stages,
    evaluating,
    to_device,
)
from distributed_training.models.decoder import Decoder, parameter_groups
from distributed_training.parallel.checkpointing import apply_checkpointing
from distributed_training.parallel.compilation import apply_compile
from distributed_training.parallel.private import (
    full_shape,
    restore_cpu_adam_powers,
    shared_reduce_buffer,
)
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology


class DeepSpeedEngine(Engine):
    """The same model, AdamW and loss as the native engine, with state where the JSON puts it."""

    def __init__(self, model: Decoder, plan: Plan, topology: Topology) -> None:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self.topology, self.plan = topology, plan
        config, strategy = plan.config, plan.strategy
        apply_checkpointing(model, config.activation_checkpointing)
        if config.compile:
            apply_compile(model)
        if strategy.zero_stage == 3:
            # Fetch a block's parameters at once: fewer, larger all-gathers, and no hooks inside
            # the block, so that it can be compiled.
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.split().blocks[0])])
        module = self._build_module(model)
        groups = parameter_groups(module, config.weight_decay)
        settings = {"lr": float(config.learning_rate), **ADAM}
        if strategy.steps_on_host:
            optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
        else:
            optimizer = torch.optim.AdamW(groups, fused=topology.device_type == "cuda", **settings)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=plan.deepspeed_json, dist_init_required=False
        )
        self.model = self.engine.module
        if topology.device_type == "cpu":
            # DeepSpeed never removes the buffer through which processes without a GPU reduce: each
            # run would leave 66 MiB a process in memory. Nobody opens one by name once every rank
            # has mapped all, and what is unlinked is freed at the end however the run ends.
            dist.barrier()
            shared_reduce_buffer(topology.rank).unlink(missing_ok=True)
        if strategy.zero_stage == 3:
            # The output layer's weight is used outside of the module that holds it.
            deepspeed.zero.register_external_parameter(self.model, self.model.output_weight)

    def _build_module(self, model: Decoder) -> nn.Module:
        """What DeepSpeed is given to train: with no layers split off, the model itself."""
        return model

    def train_step(self, batch: StepBatch) -> StepResult:
        # DeepSpeed divides by the accumulation steps and averages over ranks; undo both.
        scale = self.plan.batch.num_microbatches * self.topology.dp_size / batch.num_targets
        skipped_before = self.engine.skipped_steps
        loss_sum = self._run(batch, scale)
        skipped = self.engine.skipped_steps > skipped_before
        norm = None if skipped else self.engine.get_global_grad_norm()
        return StepResult(loss_sum, batch.num_targets, norm, skipped)

    def _run(self, batch: StepBatch, scale: float) -> torch.Tensor:
        """All micro-batches and the update, for `scale` times the loss; this rank's summed loss."""
        loss_sum = torch.zeros((), device=self.topology.device)
        self.engine.train()
        for inputs, targets in batch.micro_batches:
            loss = self.engine(*to_device(self.topology.device, inputs, targets))
            self.engine.backward(loss * scale)
            self.engine.step()
            loss_sum += loss.detach()
        return loss_sum

    def eval_step(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        with evaluating(self.engine):
            return self.engine(*to_device(self.topology.device, inputs, targets))

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        with evaluating(self.engine):
            return self.engine(input_ids.to(self.topology.device))

    def describe_dtypes(self) -> dict[str, str]:
        parameter, gradient = self.engine.get_data_types()
        return {
            "parameters": f"{parameter}, fp32 master copy",
            "arithmetic": str(parameter),
            "gradients": str(gradient),
            "optimizer_state": str(torch.float32),
            "reduction": str(self.engine.communication_data_type),
        }

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder / "deepspeed"))

    @torch.no_grad()  # loading broadcasts a pipeline's embedding
    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder / "deepspeed"))
        if self.plan.strategy.steps_on_host:
            restore_cpu_adam_powers(self.optimizer.optimizer, ADAM["betas"], ADAM["eps"])

    def full_state(self) -> dict[str, torch.Tensor] | None:
        from deepspeed.utils import safe_get_full_fp32_param

        state = {}
        for name, parameter in self._named_parameters():
            master = safe_get_full_fp32_param(parameter)  # collective along dp
            if self.topology.dp_rank == 0:
                full = parameter.detach() if master is None else master
                state[name] = full.float().cpu().clone().view(full_shape(parameter))
        return collect_stages(state, self.topology)

    def _named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """What this process's stage gives to the whole model."""
        return self.model.named_parameters()

    def close(self) -> None:
        self.engine.destroy()
        del self.engine, self.optimizer, self.model
