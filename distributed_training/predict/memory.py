"""Estimate the peak memory of one rank by component. For each of three points in a step, add up the
memory that the mechanisms in predict/costs need. The largest sum is the peak. This module does not
import torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributed_training.plan.orders import find_orders
from distributed_training.plan.plan import Draft
from distributed_training.predict.costs import used_by
from distributed_training.predict.costs.checkpointing import boundary_bytes, bytes_on_host
from distributed_training.predict.costs.lora import frozen_bytes
from distributed_training.predict.costs.loss import loss_bytes
from distributed_training.predict.costs.pp import embedding_gradient_bytes, pending_bytes
from distributed_training.predict.costs.precision import SAVED_BYTES
from distributed_training.predict.costs.zero import bucket_bytes
from distributed_training.predict.mechanism import (
    ComponentBytes,
    PipelineRank,
    StepPoint,
    pipeline_ranks,
)
from distributed_training.predict.rates import FITTED

STATE = ("parameters", "gradients", "optimizer")
COMPONENTS = (*STATE, "copies", "buffers", "activations", "logits")


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Estimated peak memory of the processes on each pipeline rank, in bytes."""

    by_rank: list[dict[str, int]]  # for each pipeline rank: component -> bytes at the peak
    likely_bytes: list[int]  # typical range of the GPU memory needed (10th to 90th percentile)
    context_bytes: int  # GPU memory outside PyTorch's allocator; 0 without a GPU
    host_bytes: int  # RAM per process
    # Size in bytes of each component of the model state, for the process with the most parameters:
    # the components in STATE on the device, and "host" and "disk" for offloaded state
    state: dict[str, int]

    @property
    def peak_by_component(self) -> dict[str, int]:
        """Memory by component, in bytes, of the process that uses the most memory."""
        return max(self.by_rank, key=_sum_bytes)

    @property
    def peak_bytes(self) -> int:
        """Total size in bytes of the tensors in the process that uses the most memory."""
        return sum(self.peak_by_component.values())

    @property
    def needed_bytes(self) -> int:
        """Amount of memory that a GPU must have, in bytes."""
        return self.peak_bytes + self.context_bytes


def estimate_memory(plan: Draft) -> MemoryEstimate:
    """Estimate the peak memory of a plan's processes by component."""
    ranks = pipeline_ranks(plan)
    states = list(map(_estimate_state, ranks))
    block_bytes = _block_bytes(ranks[0], ranks[0].recomputed_share)
    by_rank = [_find_peak(process, states[process.index], block_bytes) for process in ranks]
    peak = max(map(_sum_bytes, by_rank))
    context_bytes = _context_bytes(plan)
    likely_shares = vars(FITTED.likely_bytes)[ranks[0].compile_mode]
    fullest = max(ranks, key=lambda process: process.parameters)
    state = states[fullest.index]
    fitted_bytes = FITTED.process_bytes
    host_bytes = state["host"] + (fitted_bytes.cuda if plan.machine.num_gpus else fitted_bytes.cpu)
    if plan.machine.torch_has_cuda and not plan.machine.num_gpus:
        host_bytes += fitted_bytes.cuda_libraries
    host_bytes += max(map(bytes_on_host, ranks))
    host_bytes += 2 * plan.strategy.swap_buffer_values  # two bytes per value, even in fp32 runs
    if plan.strategy.traits.package or plan.mesh["tp"] > 1:
        host_bytes += fitted_bytes.libraries
    if plan.num_processes == 1 and not plan.tokenized:
        host_bytes += fitted_bytes.tokenizing
    # DeepSpeed receives the whole model on the host. Other strategies read or initialize this
    # process's shards of two parameters at a time. Without a GPU, the peak memory of a step is also
    # in RAM, with what the C library keeps of freed tensors.
    model_bytes = 4.0 * plan.size.num_parameters
    if plan.strategy.traits.builds_on_device:
        num_shards = plan.mesh["tp"] * (ranks[0].shards if plan.uses_fsdp else 1)
        model_bytes = 8 * plan.size.padded_vocab_size * plan.size.hidden_size / num_shards
    if plan.machine.num_gpus:
        host_bytes += model_bytes
        if plan.machine.shares_memory:
            host_bytes += peak + context_bytes
    else:
        kept_share = 0 if plan.config.compile else fitted_bytes.kept_share
        host_bytes += max((1 + kept_share) * peak, model_bytes)
    copy_bytes = checkpoint_copy_bytes(plan, ranks)
    if (host_bytes + copy_bytes) * plan.processes_here <= plan.machine.ram_bytes:
        host_bytes += copy_bytes  # otherwise training waits during saves
    return MemoryEstimate(
        by_rank=by_rank,
        likely_bytes=[round(share * peak) + context_bytes for share in likely_shares],
        context_bytes=context_bytes,
        host_bytes=int(host_bytes),
        state=state,
    )


def _context_bytes(plan: Draft) -> int:
    """Return the GPU memory outside PyTorch's allocator."""
    if plan.machine.num_gpus == 0:
        return 0
    num_bytes: int = FITTED.gpu_context_bytes.alone
    if plan.num_processes > 1:
        num_bytes += FITTED.gpu_context_bytes.nccl
    return num_bytes


def checkpoint_copy_bytes(plan: Draft, ranks: Sequence[PipelineRank]) -> int:
    """Return the number of bytes that a process copies for a checkpoint: its share of the
    weights and Adam moments, and its engine's private state."""
    if plan.config.checkpoint_every in (0, "signal") or plan.strategy.swaps_to_disk:
        return 0
    trained_parameters = max(process.trained_parameters for process in ranks)
    num_writers = plan.batch.num_replicas * plan.mesh["cp"]
    per_parameter = (
        SAVED_BYTES[plan.config.optimizer] / num_writers + plan.engine_bytes_per_parameter
    )
    if plan.steps_between_exchanges is not None:  # replicas differ
        per_parameter += 12
    return round(trained_parameters * per_parameter)


def _sum_bytes(parts: ComponentBytes) -> float:
    return math.fsum(parts.values())


def _estimate_state(rank: PipelineRank) -> dict[str, int]:
    state = dict.fromkeys((*STATE, "host", "disk"), 0.0)
    for mechanism in used_by(rank.plan):
        for component, size in mechanism.state(rank).items():
            state[component] += size
    state["optimizer"] += rank.plan.engine_bytes_per_parameter
    state = {component: size * rank.trained_parameters for component, size in state.items()}
    if not rank.trained_share:
        for component, size in frozen_bytes(rank).items():
            state[component] += size
    return {component: round(size) for component, size in state.items()}


def _find_peak(
    rank: PipelineRank, state: Mapping[str, int], block_bytes: tuple[float, float]
) -> dict[str, int]:
    """Return a process's memory by component, in bytes, at the point in a step where the process
    uses the most memory. `state` is the result of `_estimate_state`, and `block_bytes` that of
    `_block_bytes`."""
    passes = _bytes_at(rank, state, "passes")
    activation_bytes, logit_bytes = _peak_activations(rank, *block_bytes)
    passes["activations"] += activation_bytes
    passes["logits"] = logit_bytes
    passes["buffers"] += max(0, bucket_bytes(rank) - logit_bytes)
    candidates = [passes, _bytes_at(rank, state, "update")]
    if rank.pp == 1:
        first_block = _bytes_at(rank, state, "first block")
        # The first block recomputes its activations if any block does.
        recomputed = math.ceil(rank.recomputed_share)
        first_block["activations"] = math.fsum(_block_bytes(rank, recomputed))
        candidates.append(first_block)
    fullest = max(candidates, key=_sum_bytes)
    return {name: round(size) for name, size in fullest.items()}


def _block_bytes(rank: PipelineRank, recomputed: float) -> tuple[float, float]:
    """Return (mean bytes that a block keeps for its backward pass, additional bytes that a backward
    pass needs at most) if the share `recomputed` of the blocks recomputes activations."""
    mechanisms = used_by(rank.plan)
    kept = 0.0
    backward = 0.0
    for share, sizes in rank.by_kind():
        kept_bytes = [mechanism.activation_bytes(sizes, recomputed) for mechanism in mechanisms]
        kept += share * math.fsum(kept_bytes)
        needed_bytes = [mechanism.backward_bytes(sizes, recomputed) for mechanism in mechanisms]
        backward = max(backward, math.fsum(needed_bytes))
    return kept, backward


def _bytes_at(rank: PipelineRank, state: Mapping[str, int], point: StepPoint) -> dict[str, float]:
    """Return the sizes in bytes of state, gradients, copies and buffers at a point in a step."""
    mechanisms = used_by(rank.plan)
    sizes: dict[str, float] = {component: state.get(component, 0) for component in COMPONENTS}
    for mechanism in mechanisms:
        for component, size in mechanism.additional_bytes(rank, point).items():
            sizes[component] += size
    sizes["gradients"] *= max(mechanism.gradient_share(rank, point) for mechanism in mechanisms)
    return sizes


def _peak_activations(rank: PipelineRank, per_block: float, backward: float) -> tuple[float, float]:
    """Return (bytes of block activations, bytes of logits) during the operation in which their sum
    is largest. A block keeps `per_block` bytes, and its backward pass needs `backward` additional
    bytes."""
    blocks = rank.plan.stages.blocks_per_stage
    loss = loss_bytes(rank)
    outer_loss_bytes = loss.outer_bytes if rank.has_last_stage else 0
    # Frozen blocks have no weight gradients, so I frees what B frees.
    pending = pending_bytes(rank) if rank.trained_share else -per_block
    block_changes = {"F": per_block, "B": -per_block, "I": pending, "W": -per_block - pending}
    output = boundary_bytes(rank) if rank.pp > 1 else 0
    embedding_gradient, _ = embedding_gradient_bytes(rank)
    block_bytes = logit_bytes = 0.0
    peak = (0.0, 0.0)
    # Sizes before and after an operation. Repeated micro-batches find the same sizes again.
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    for operation, stage, _ in find_orders(rank.plan)[rank.index]:
        state = (operation, stage, block_bytes, logit_bytes)
        if state in known:
            block_bytes, logit_bytes = known[state]
            continue
        current = (block_bytes, logit_bytes)
        is_last_stage = stage == len(blocks) - 1
        block_bytes += blocks[stage] * block_changes[operation]
        # Every stage keeps its output. In the first stage, this is counted here. The other stages
        # have their input in a receive buffer, which is counted twice instead.
        if stage == 0 and operation != "W":
            block_bytes += output if operation == "F" else -output
        if is_last_stage and operation != "W":
            logit_bytes += loss.kept_bytes if operation == "F" else -loss.kept_bytes
        known[state] = (block_bytes, logit_bytes)
        if operation == "F":
            current = (block_bytes, logit_bytes)
        candidates = [current]
        if is_last_stage and operation != "W":
            candidates.append((current[0], current[1] + loss.peak_bytes - loss.kept_bytes))
        if operation in "BI":
            logits = current[1]
            if is_last_stage:
                logits += loss.output_gradient_bytes - loss.kept_bytes
            freed = outer_loss_bytes if rank.pp == 1 else 0
            candidates.append((current[0] + backward - freed, logits))
            if stage == 0:
                candidates.append((block_bytes + embedding_gradient, logit_bytes))
        peak = max(peak, *candidates, key=sum)
    return peak[0] + outer_loss_bytes, peak[1]
