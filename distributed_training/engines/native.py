"""Train a model with PyTorch's own parallelism (DDP, FSDP, tensor and pipeline parallelism) along
any axes of the device mesh."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from distributed_training.data.samples import StepBatch
from distributed_training.engines import base
from distributed_training.engines.graphs import StepGraph, to_device
from distributed_training.engines.optimizers import build_optimizer, init_state
from distributed_training.models.decoder import Decoder, KVCache
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.models.private import local_part, locate_local
from distributed_training.parallel import blocks, gradients
from distributed_training.parallel.activation_offload import offload_saved
from distributed_training.parallel.agree import succeeds_on_all_ranks
from distributed_training.parallel.context import apply_cp
from distributed_training.parallel.experts import (
    average_gradients,
    enlarge_buffers,
    find_exchanges,
    find_experts,
    needs_larger_buffers,
    shard_experts,
)
from distributed_training.parallel.lora import apply_lora, move_embedding_to_host
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.private import (
    connect_frozen_shards,
    enable_symmetric_memory,
    foreach_mul_,
    gather_by_copying,
    move_frozen_shards,
    overlap_matmuls,
    reset_fsdp_shards,
)
from distributed_training.parallel.tensor import apply_tp, shard_loss, tp_partial_names
from distributed_training.parallel.tensor_files import Part, TensorFiles, build_part, choose_writer
from distributed_training.plan.layout import expert_row_factor
from distributed_training.plan.plan import Plan

# fp16's dynamic loss scale, as in DeepSpeed's configuration. An overflow halves the scale.
INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_WINDOW = 1000  # steps without overflow before the loss scale doubles


def parallelize(
    stage: Decoder, weights: InitialWeights, plan: Plan, topology: Topology, mesh: DeviceMesh | None
) -> list[nn.Parameter]:
    """Parallelize a model or a pipeline stage over `mesh` in place, except for DDP, and fill it
    with its initial `weights`. Return the parameters whose gradients must be summed over tp. All
    ranks must call this function."""
    config = plan.config
    tp_mesh = mesh["tp"] if mesh is not None and topology.tp > 1 else None
    if tp_mesh is not None:
        apply_tp(stage, tp_mesh, plan.tp_parts)
    if config.lora_rank:
        apply_lora(stage, plan.model, config, topology.device, weights.adapters)
        if plan.fuses_gated_mlps:
            # Imports Triton, which only GPUs have
            from distributed_training.parallel.gated_mlp import fuse_gated_mlps

            fuse_gated_mlps(stage, config.lora_targets)
    partial_names = tp_partial_names(stage) if tp_mesh is not None else set()
    if topology.cp > 1:
        apply_cp(stage, topology.cp)
    mode, compiled = config.activation_checkpointing, config.compile
    blocks.apply_checkpointing(stage, mode, config.checkpointed_blocks, compiled=compiled)
    stage.loss = blocks.build_loss(config)
    if tp_mesh is not None:
        loss = blocks.build_chunked_loss(config)
        stage.loss = shard_loss(loss, tp_mesh, plan.tp_parts)
    blocks.apply_compile(stage, config, compile_outer_layers=tp_mesh is None)
    if config.offloads_activations and topology.device.type == "cuda":
        offload_saved(stage, config.checkpointed_blocks)
    experts: set[nn.Parameter] = set()
    if mesh is not None and plan.uses_fsdp:
        # With tp or pp, replication also uses FSDP, with one rank per shard group, because DDP
        # needs whole models.
        axes = ("dp_replicate", "dp_shard") if topology.dp_replicate > 1 else ("dp_shard",)
        if config.expert_parallel:
            row_factor = expert_row_factor(config, topology.dp_shard * topology.cp)
            experts = shard_experts(stage, mesh[axes], row_factor)
        blocks.apply_fsdp(
            stage,
            mesh[axes],
            stage.compute_dtype,
            keep_gathered=topology.pp > 1,
            keep_outer_gathered=plan.keeps_outer_weights_gathered,
            ignored=experts,
        )
    weights.fill(stage, topology.device)  # only this rank's shards
    if plan.uses_fsdp:
        reset_fsdp_shards(stage)
    if plan.shares_frozen_shards:
        modules = [*stage.blocks.values()]
        consequence = "NCCL gathers frozen weights, which takes longer"
        moved: list[tuple[Any, torch.Tensor]] = []
        # Ranks wait for each other while they connect, so all must have moved their shards.
        if succeeds_on_all_ranks(
            lambda: moved.extend(move_frozen_shards(modules)), consequence
        ) and succeeds_on_all_ranks(partial(connect_frozen_shards, moved), consequence):
            gather_by_copying(modules)
    if plan.embeds_from_host:
        move_embedding_to_host(stage.token_embedding)
    return [p for name, p in stage.named_parameters() if name in partial_names]


class NativeEngine(base.Engine):
    """Engine that parallelizes a model with the modules in parallel/ and trains it with AdamW."""

    def __init__(
        self, model: Decoder, weights: InitialWeights, plan: Plan, topology: Topology
    ) -> None:
        self.plan = plan
        self.config = plan.config
        self.topology = topology
        self.compute_dtype = model.compute_dtype
        self.vocab_names = model.vocabulary_parameters()
        # DDP uses the default process group, so replication alone needs no mesh.
        mesh = None if plan.only_copies else topology.build_mesh()
        self.tp_group = mesh.get_group("tp") if topology.tp > 1 else None
        self.step_graph = StepGraph(
            self._compute_and_update, topology.device, captures=self.config.cuda_graphs
        )
        self.uses_async_tp = self.config.async_tp and succeeds_on_all_ranks(
            partial(enable_symmetric_memory, self.tp_group), "async_tp has no effect"
        )
        self._build_stages(model, weights, mesh)
        self._list_parameters()
        self.pipeline: Any = None
        if topology.pp > 1:
            from distributed_training.parallel.pipeline import Pipeline

            stages = {int(index): stage for index, stage in self.stages.items()}
            self.pipeline = Pipeline(stages, plan, topology, mesh.get_group("pp"))
        self._build_optimizer()

    def _build_stages(
        self, model: Decoder, weights: InitialWeights, mesh: DeviceMesh | None
    ) -> None:
        """Parallelize this rank's stages, or the whole model if there is no pipeline."""
        stages = self.plan.stages
        # Keys are stage indices. Under zb-v, rank 0 has the first and the last stage, and both
        # contain the embedding if it is tied.
        self.stages = nn.ModuleDict()
        for index, stage_blocks in enumerate(stages.block_ranges):
            if stages.ranks[index] == self.topology.pp_rank:
                self.stages[str(index)] = model.stage(stage_blocks)
        self.tp_partial_params = []  # parameters whose gradients must be summed over tp
        for stage in self.stages.values():
            self.tp_partial_params += parallelize(stage, weights, self.plan, self.topology, mesh)
        self.model = self.stages
        # The whole model if there is no pipeline
        self.module: nn.Module = next(iter(self.stages.values()))
        if self.plan.uses_ddp:
            self.module = self.replicate(self.module)

    def _list_parameters(self) -> None:
        """List the trained parameters. Later, an FSDP module lists rounded copies instead of its
        parameters while it is gathered."""
        self.named_params = []
        # The last stage's copy of the tied embedding, which the first stage also has
        self.embedding_copies = set()
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad:
                    self.named_params.append((name, parameter))
            if stage.size.tied and stage.is_last and not stage.is_first:
                self.embedding_copies.add(stage.output_weight)
        self.exchanges = find_exchanges(self.stages)
        self.experts = []  # trained parameters of experts that stay on their ranks
        if self.exchanges:
            experts = find_experts(self.stages)
            self.experts = [parameter for *_, parameter in experts if parameter.requires_grad]
        self.gradient_names = [name for name, _ in self.named_params]
        self.parameters = [parameter for _, parameter in self.named_params]

    def _build_optimizer(self) -> None:
        """Build the optimizer and the scalars that a step reads."""
        device = self.topology.device
        # AdamW and clipping are element-wise, so they operate on local shards.
        self.local_params = {}
        origins = {}
        for name, parameter in self.named_params:
            local = nn.Parameter(local_part(parameter.detach()))
            self.local_params[parameter] = local
            origins[local] = (name, parameter)
        # The optimizer's step, which may be captured or compiled, reads this tensor.
        self.lr_tensor = torch.tensor(self.config.learning_rate, device=device)
        self.optimizer: Any = build_optimizer(self.config, self.lr_tensor, origins)
        self.loss_factor = torch.zeros((), device=device)  # multiplies summed losses
        self.fp16 = self.compute_dtype is torch.float16
        # fp32 scalars at fixed addresses, because a CUDA graph reads and writes them
        initial_scale = INITIAL_LOSS_SCALE if self.fp16 else 1.0
        self.loss_scale = torch.tensor(initial_scale, device=device)
        self.good_steps = torch.zeros((), device=device)

    def replicate(self, stage: Decoder) -> nn.Module:
        """Wrap `stage` in DDP, whose backward pass averages gradients over all ranks in fp32 or
        bf16 buckets."""
        module = self.build_ddp(stage, self.config.bucket_cap_mb)
        if self.config.gradient_compression == "bf16":
            module.register_comm_hook(None, gradients.bf16_hook)
        return module

    def build_ddp(self, stage: Decoder, bucket_mib: float | None) -> DistributedDataParallel:
        """Wrap `stage` in DDP and fix the order of DDP's buckets. A communication hook may be
        registered afterwards."""
        # All ranks have the same initial weights. NCCL may not be able to send an embedding that is
        # in host memory.
        module = DistributedDataParallel(
            stage,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            bucket_cap_mb=bucket_mib,
            init_sync=not self.plan.embeds_from_host,
        )
        self._arrange_buckets(module)
        return module

    def _arrange_buckets(self, module: DistributedDataParallel) -> None:
        """Run a forward and backward pass that fixes the order of DDP's buckets, and discard its
        gradients.

        DDP assigns gradients to buckets in the order in which the gradients become ready during the
        first backward pass. This first pass runs before training, because gradient compression
        stores its errors per bucket and needs the final order. The initial buckets may remain in
        memory during the next pass, until torch's watchdog releases the buffers of NCCL operations.
        These buckets do not raise the peak memory of training, because optimizer state does not
        exist yet."""
        shape = (self.plan.batch.micro_batch_size, self.config.max_length)
        ids = torch.zeros(shape, dtype=torch.int64, device=self.topology.device)
        documents = []
        if self.plan.packing:  # one document per sample
            ends = torch.full_like(ids[:, :1], shape[1])
            documents = [torch.arange(shape[1], device=ids.device).repeat(shape[0], 1), ends]
        module.train()
        module(ids, ids, *documents).sum().backward()
        module.zero_grad()
        if self.topology.device_type == "cuda":
            torch.cuda.synchronize()
            time.sleep(0.3)  # the watchdog checks every 0.1 s

    def set_learning_rate(self, rate: float) -> None:
        self.lr_tensor.fill_(rate)

    def train_step(self, batch: StepBatch) -> base.StepResult:
        # The backward pass averages gradients over dp and cp ranks, but the loss is divided by the
        # number of targets in the global batch.
        num_averaged = self.topology.dp_size * self.topology.cp
        torch.mul(self.loss_scale, num_averaged / batch.num_targets, out=self.loss_factor)
        self.stages.train()
        arrays = [*map(np.stack, zip(*batch.micro_batches, strict=True))]
        with overlap_matmuls(self.uses_async_tp):  # has an effect only when the first step compiles
            results = self.step_graph(*arrays)
        while enlarge_buffers(self.exchanges):
            self.step_graph.drop_graph()
            results = self.step_graph(*arrays)
        loss_sum, grad_norm, param_grad_norms = results
        skipped = grad_norm.isfinite().logical_not() if self.fp16 else False
        return base.StepResult(loss_sum, grad_norm, skipped, param_grad_norms)

    def _compute_and_update(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run one optimizer step. `tensors` [m, B, ...] are the arrays from `Samples.batch`, each
        stacked over m micro-batches. Return this rank's summed loss and the norms from
        `global_norm`."""
        if self.exchanges:
            self.exchanges[0].needed_factor.zero_()
        if self.pipeline is None:
            loss_sum = self._accumulate(*tensors)
        else:
            flat = [tensor.flatten(0, 1) for tensor in tensors]
            loss_sum = self.pipeline.forward_backward(self.loss_factor, *flat)
        average_gradients(self.experts)
        if self.tp_partial_params:
            partial_grads = [local_part(parameter.grad) for parameter in self.tp_partial_params]
            gradients.all_reduce_sum(partial_grads, self.tp_group)
        if self.pipeline is not None:
            self.pipeline.add_tied_gradients()
        # Ranks along tp see the same samples, so only the first one reports a loss.
        reported_loss = loss_sum if self.topology.tp_rank == 0 else torch.zeros_like(loss_sum)
        return reported_loss, *self.update()

    def _accumulate(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Run the forward and backward passes of all micro-batches. Return the summed loss."""
        losses = []
        for index, micro_batch in enumerate(zip(*tensors, strict=True), start=1):
            is_last = index == len(tensors[0])
            # DDP averages once per step. FSDP reduce-scatters once per micro-batch and all-reduces
            # over replicas once per step.
            if isinstance(self.module, FSDPModule):
                self.module.set_requires_all_reduce(is_last)
            elif isinstance(self.module, DistributedDataParallel):
                self.module.require_backward_grad_sync = is_last
            loss = self.module(*micro_batch)
            (loss.sum() * self.loss_factor).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum(0)

    def update(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Unscale and clip the gradients, and run the optimizer. Skip the update if fp16 gradients
        overflowed, if any gradient is non-finite with `on_nonfinite=skip`, or if mixtures had too
        few buffers. Return the norms of the unclipped gradients."""
        for parameter, local in self.local_params.items():
            local.grad = local_part(parameter.grad)
        if self.fp16:
            local_grads = [local.grad for local in self.local_params.values()]
            foreach_mul_(local_grads, 1.0 / self.loss_scale)
        grad_norm, param_grad_norms = gradients.global_norm(
            self.parameters, self.topology, self.embedding_copies
        )
        overflow = grad_norm.isfinite().logical_not()
        reasons = [overflow] if self.fp16 or self.config.on_nonfinite == "skip" else []
        if self.exchanges:
            reasons.append(needs_larger_buffers(self.exchanges))
        if reasons:
            # The update need not wait for the host.
            self.optimizer.found_inf = torch.stack(reasons).any().float()
        self._clip(grad_norm)
        if not self.optimizer.state:
            # Return cached memory to the driver, because Adam moments in that memory would fragment
            # the segments that activations use.
            if self.topology.device_type == "cuda":
                torch.cuda.empty_cache()
            self.init_optimizer_state(0)
        self.optimizer.step()
        for parameter in (*self.parameters, *self.local_params.values()):
            parameter.grad = None
        if self.fp16:
            self._update_loss_scale(overflow)
        return grad_norm, param_grad_norms

    def init_optimizer_state(self, num_steps: float) -> None:
        """Set the Adam moments of all parameters to 0, and the step counters to `num_steps`."""
        step = torch.tensor(float(num_steps), device=self.topology.device)
        init_state(self.optimizer, step)

    def _clip(self, grad_norm: torch.Tensor) -> None:
        """Let the optimizer divide the gradients so that their global norm is at most
        max_grad_norm."""
        limit = self.config.max_grad_norm
        if limit is not None:
            self.optimizer.grad_scale = ((grad_norm + 1e-6) / limit).clamp(min=1.0)

    def _update_loss_scale(self, overflow: torch.Tensor) -> None:
        """Update the loss scale for the next step."""
        good_steps = torch.where(overflow, 0.0, self.good_steps + 1)
        higher = torch.where(good_steps % LOSS_SCALE_WINDOW == 0, 2.0, 1.0)
        scale = self.loss_scale * torch.where(overflow, 0.5, higher)
        self.good_steps.copy_(good_steps)
        self.loss_scale.copy_(scale.clamp(min=1.0))

    def eval_step(self, *arrays: np.ndarray) -> torch.Tensor:
        total = torch.zeros((), device=self.topology.device)
        mode = base.evaluation_mode(self.stages, compiles=self.config.has_pairs)
        with mode, self.step_graph.memory():
            loss = self._forward(*to_device(self.topology.device, *arrays))
            if loss is None or self.topology.tp_rank > 0:
                return total
            return total + loss.detach()

    def logits(self, input_ids: torch.Tensor, past: KVCache | None = None) -> torch.Tensor:
        with base.evaluation_mode(self.stages):
            logits = self._forward(input_ids.to(self.topology.device), past=past)
        assert logits is not None, "there is no pipeline"
        return logits

    def _forward(self, *tensors: torch.Tensor, **options: KVCache | None) -> torch.Tensor | None:
        """Run the forward pass and return its output, or None on ranks without the last stage."""
        run = self.module if self.pipeline is None else self.pipeline.forward
        output = run(*tensors, **options)
        # Free gathered parameters. A replayed step gathers its own copies and would not update
        # these. It reads those that stay gathered.
        for module in self.stages.modules():
            is_kept = self.plan.keeps_outer_weights_gathered and module is self.module
            if isinstance(module, FSDPModule) and not is_kept:
                module.reshard()
        return output

    def state_parts(self) -> Iterator[Part]:
        rank = self.topology.rank
        disk = self.plan.ranks_on_disk(rank)
        # A copy of the tied embedding is written only if the files of the first stage may be on
        # another disk.
        writes_copies = self.plan.has_node_local_files and self.topology.pp_rank > 0
        for number, (name, parameter) in enumerate(self.named_params):
            local, start = locate_local(parameter)
            shape = list(parameter.shape)
            if name in self.vocab_names:
                shape[0] = self.plan.size.vocab_size
            written_here = rank == choose_writer(parameter, number, self.topology, disk)
            if parameter in self.embedding_copies and not writes_copies:
                written_here = False
            tensors = {"weight": local, **self._adam_state(parameter)}
            tensors.pop("step", None)
            for key, tensor in tensors.items():
                yield build_part(f"{key}/{name}", tensor, shape, start, written_here=written_here)

    def counters(self) -> dict[str, float]:
        return {
            "adam_steps": float(self._adam_state(self.parameters[0]).get("step", 0)),
            "loss_scale": float(self.loss_scale),
            "good_steps": int(self.good_steps),
        }

    def _adam_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the Adam moments and step counter of a parameter, or {} before the first step."""
        return self.optimizer.state.get(self.local_params[parameter], {})

    @torch.no_grad()
    def load(self, tensor_files: TensorFiles, counters: dict[str, float]) -> None:
        self.optimizer.state.clear()  # a checkpoint before the first step has no Adam state
        if counters["adam_steps"]:
            self.init_optimizer_state(counters["adam_steps"])
        for part in self.state_parts():
            part.get().copy_(tensor_files.read(part))
        self.loss_scale.fill_(counters["loss_scale"])
        self.good_steps.fill_(counters["good_steps"])
        self.step_graph.drop_graph()
