"""Estimate the cost of pipeline parallelism, which partitions layers into stages over pp. The
module predict/simulate.py computes how long stages wait. This module does not import torch."""

from distributed_training.plan.schedules import P2P_CHANNELS
from distributed_training.predict.costs.checkpointing import boundary_bytes
from distributed_training.predict.costs.lora import base_bytes
from distributed_training.predict.mechanism import (
    GRADIENT_SUM_BYTES,
    ComponentBytes,
    Mechanism,
    PipelineRank,
    Sizes,
    StepPoint,
    Timing,
    Traffic,
)
from distributed_training.predict.rates import FITTED


def stage_traffic(rank: PipelineRank) -> Traffic:
    """Return the traffic between stages in one step: activations, their gradients and, if the
    embedding is tied, the embedding's gradient."""
    values = rank.num_boundaries * rank.num_microbatches * rank.hidden_bytes
    traffic: Traffic = {("pp", "send"): int(values * rank.hidden_share)}
    if rank.has_first_stage != rank.has_last_stage and rank.size.tied and rank.trained_share:
        if rank.strategy.traits.has_master_weights:
            traffic["pp", "all_reduce"] = rank.dtype_bytes * rank.embedding_parameters
        else:
            traffic["pp", "send"] += 4 * rank.embedding_parameters // rank.shards
    return traffic


def message_s(timing: Timing) -> float:
    """Return the time in seconds to send a result from one stage to the next."""
    rate = timing.rates.link_bytes_per_s
    latency = timing.rates.link_latency_s
    # The next stage is on another node.
    if timing.plan.num_processes // timing.pp >= timing.plan.processes_here:
        rate = timing.rates.network_bytes_per_s
        latency *= 2
    rate = min(rate, P2P_CHANNELS * FITTED.channel_bytes_per_s)
    return latency + timing.hidden_bytes * timing.hidden_share / rate


def stage_state(rank: PipelineRank) -> ComponentBytes:
    """Return the number of additional bytes per parameter that stages with fp32 weights keep
    throughout a step. These bytes hold gathered or rounded parameters, and unsharded gradients."""
    if rank.strategy.traits.has_master_weights:
        return {}
    keeps_copy = rank.mesh["dp_replicate"] * rank.shards > 1 or rank.dtype_bytes < 4
    copy_bytes = rank.dtype_bytes if keeps_copy else 0
    return {"parameters": copy_bytes, "gradients": 4 - 4 / rank.shards}


def stage_bytes(rank: PipelineRank, point: StepPoint) -> ComponentBytes:
    """Return the size in bytes of PyTorch's receive buffers, one per message in a step. Gathered
    parameters are moved from the component "parameters" to the component "copies"."""
    copies = stage_state(rank).get("parameters", 0) * rank.trained_parameters
    if rank.plan.uses_fsdp and not rank.trained_share:
        copies += base_bytes(rank)
    num_messages = rank.num_boundaries * rank.num_microbatches if point == "passes" else 0
    received_bytes = num_messages * boundary_bytes(rank)
    return {"copies": copies, "parameters": -copies, "activations": received_bytes}


def embedding_gradient_bytes(sizes: Sizes) -> tuple[float, float]:
    """Return (bytes of memory, bytes read and written) for the embedding's gradient of one
    micro-batch. Compiled code sums this gradient in fp32 and rounds it. It is then added to the sum
    of earlier gradients. If the backward pass is split, only the rows of the micro-batch's tokens
    are added (parallel/zero_bubble.py)."""
    if sizes.pp == 1 or (sizes.plan.schedule.splits_backward and sizes.tp == 1):
        return 0, 0
    parameters = sizes.trained_share * sizes.embedding_parameters
    if sizes.config.compile and sizes.tp == 1 and sizes.dtype_bytes == 2:
        return 6 * parameters, (10 + GRADIENT_SUM_BYTES) * parameters
    gradient_bytes = sizes.dtype_bytes * parameters
    return gradient_bytes, gradient_bytes + GRADIENT_SUM_BYTES * parameters


def pending_bytes(rank: PipelineRank) -> float:
    """Return the number of bytes per block and micro-batch that are kept from the backward pass for
    inputs (I) until the backward pass for weights (W). The activations are not counted.

    The inputs of all matrices and the gradients of their outputs replace the activations
    (parallel/zero_bubble.py). In compiled blocks they have the same total size, and in uncompiled
    blocks they are smaller. Sequence parallelism needs additional memory, because the gradients of
    the two results that a block sums over tp are unsharded."""
    return 2 * (1 - rank.hidden_share) * rank.hidden_bytes


PP = Mechanism(
    is_used=lambda plan: plan.mesh["pp"] > 1,
    state=stage_state,
    additional_bytes=stage_bytes,
    layer_traffic=stage_traffic,
)
