"""DeepSpeed: ZeRO 1, 2 and 3, offload to the host, Infinity."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from distributed_training.config import RunConfig
from distributed_training.data import StepBatch
from distributed_training.engines.base import ADAM, StepResult, to_device
from distributed_training.model import GPT2, Block, parameter_groups
from distributed_training.parallel.activation_checkpointing import apply_activation_checkpointing
from distributed_training.parallel.compilation import apply_compile
from distributed_training.strategy import Strategy
from distributed_training.topology import Topology

_TAG = "state"


class DeepSpeedEngine:
    """The same model, AdamW and loss as the native engine, with state where the JSON puts it."""

    def __init__(
        self,
        model: GPT2,
        config: RunConfig,
        strategy: Strategy,
        topology: Topology,
        document: dict[str, Any],
    ) -> None:
        """`document` is the DeepSpeed JSON with no "auto" left, as deepspeed_json.py fills it."""
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self.topology = topology
        self.strategy = strategy
        self.grad_accum_steps = config.grad_accum_steps
        apply_activation_checkpointing(model, config.activation_checkpointing)
        if config.compile:
            apply_compile(model)
        if strategy.zero_stage == 3:
            # Fetch a block's parameters at once: fewer, larger all-gathers, and no hooks inside
            # the block, so that it can be compiled.
            deepspeed.utils.set_z3_leaf_modules(model, [Block])
        module = self._build_module(model)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module,
            optimizer=self._build_optimizer(module, config),
            config=document,
            dist_init_required=False,
        )
        self.model = self.engine.module
        if topology.device_type == "cpu":
            _unlink_shared_memory(topology)
        if strategy.zero_stage == 3:
            # The output layer uses the embedding's weight outside of the embedding.
            deepspeed.zero.register_external_parameter(
                self.model, self.model.token_embedding.weight
            )

    def _build_module(self, model: GPT2) -> nn.Module:
        """What DeepSpeed is given to train: with no layers split off, the model itself."""
        return model

    def _build_optimizer(self, module: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
        groups = parameter_groups(module, config.weight_decay)
        rate = float(config.learning_rate)
        if self.strategy.needs_cpu_adam:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(groups, lr=rate, adamw_mode=True, **ADAM)
        fused = self.topology.device_type == "cuda"
        return torch.optim.AdamW(groups, lr=rate, fused=fused, **ADAM)

    def train_step(self, batch: StepBatch) -> StepResult:
        # DeepSpeed divides by the accumulation steps and averages over ranks; undo both.
        scale = self.grad_accum_steps * self.topology.dp_size / batch.num_targets
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
            loss = self._loss(inputs, targets)
            self.engine.backward(loss * scale)
            self.engine.step()
            loss_sum += loss.detach()
        return loss_sum

    @torch.no_grad()
    def eval_step(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        self.engine.eval()
        with torch.compiler.set_stance("force_eager"):
            return self._loss(inputs, targets)

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.engine.eval()
        with torch.compiler.set_stance("force_eager"):
            return self.engine(input_ids.to(self.topology.device))

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

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
        self.engine.save_checkpoint(str(folder / "deepspeed"), tag=_TAG)

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder / "deepspeed"), tag=_TAG)
        if self.strategy.needs_cpu_adam:
            self._restore_cpu_adam_powers()

    def _restore_cpu_adam_powers(self) -> None:
        """Repeat the steps on nothing: the C++ object multiplies beta ** step up in fp32, step by
        step, and a new one would begin with pow, which rounds otherwise.
        """
        adam = self.optimizer.optimizer
        last = max((int(state.get("step", 0)) for state in adam.state.values()), default=0)
        nothing = [torch.zeros(0) for _ in range(4)]
        for step in range(1, last + 1):
            adam.ds_opt_adam.adam_update(
                adam.opt_id, step, 0.0, *ADAM["betas"], ADAM["eps"], 0.0, True, *nothing
            )

    def full_state(self) -> dict[str, torch.Tensor] | None:
        state = self._gather(self.model.named_parameters(), keep=self.topology.rank == 0)
        return state if self.topology.rank == 0 else None

    def _gather(
        self, named: Iterable[tuple[str, nn.Parameter]], *, keep: bool
    ) -> dict[str, torch.Tensor]:
        """Whole fp32 parameters on the CPU, of which this process's share of ZeRO may be a part;
        empty unless `keep`. Collective over the processes that hold the same parameters.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        state = {}
        for name, parameter in named:
            master = safe_get_full_fp32_param(parameter)
            if keep:
                full = parameter.detach() if master is None else master
                state[name] = full.float().cpu().clone().view(_full_shape(parameter))
        return state

    def close(self) -> None:
        self.engine.destroy()
        del self.engine, self.optimizer, self.model

    def _loss(self, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        device = self.topology.device
        return self.engine(to_device(inputs, device), to_device(targets, device))


def _unlink_shared_memory(topology: Topology) -> None:
    """Remove the name of the buffer through which processes without a GPU reduce.

    DeepSpeed never removes it: each run would leave 66 MiB a process in memory until the machine
    restarts. Once every rank has mapped all buffers nobody opens one by name again, and what is
    unlinked now is freed at the end however the run ends. The name is that of DeepSpeed's shm.cpp.
    """
    dist.barrier()
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{topology.rank}"
    Path("/dev/shm", name).unlink(missing_ok=True)


def _full_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """Shape before ZeRO-3 took the parameter apart."""
    return getattr(parameter, "ds_shape", parameter.shape)
