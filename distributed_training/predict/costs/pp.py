"""Estimate the cost of pipeline parallelism, which partitions layers into stages over pp. The
module predict/simulate.py computes how long stages wait. This module does not import torch."""

from collections import Counter

from distributed_training.plan.schedules import P2P_CHANNELS
from distributed_training.predict.costs.lora import base_bytes
from distributed_training.predict.mechanism import (
    ComponentBytes,
    Mechanism,
    PipelineRank,
    StepPoint,
    Timing,
    Traffic,
)
from distributed_training.predict.rates import FITTED


def stage_traffic(rank: PipelineRank) -> Traffic:
    """Return the traffic between stages in one step: activations, their gradients and, if the
    embedding is tied, the embedding's gradient."""
    values = rank.num_boundaries * rank.num_microbatches * rank.hidden_bytes
    traffic: Traffic = Counter({("pp", "send"): int(values * rank.hidden_share)})
    if rank.has_first_stage != rank.has_last_stage and rank.size.tied and rank.trained_share:
        if rank.strategy.traits.takes_json:
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
    if rank.strategy.traits.takes_json:
        return {}
    keeps_copy = rank.mesh["dp_replicate"] * rank.shards > 1 or rank.dtype_bytes < 4
    return {"parameters": keeps_copy * rank.dtype_bytes, "gradients": 4 - 4 / rank.shards}


def stage_bytes(rank: PipelineRank, point: StepPoint) -> ComponentBytes:
    """Return the sizes in bytes of the embedding's gradient and of PyTorch's receive buffers. There
    is one buffer per message in a step. Gathered parameters are moved from the component
    "parameters" to the component "copies"."""
    copies = stage_state(rank).get("parameters", 0) * rank.trained_parameters
    if rank.plan.uses_fsdp and not rank.trained_share:
        copies += base_bytes(rank)
    component_bytes = {"copies": copies, "parameters": -copies}
    if point == "passes":
        received_bytes = (
            rank.num_boundaries * rank.num_microbatches * rank.hidden_bytes * rank.hidden_share
        )
        component_bytes["activations"] = (
            received_bytes
            + rank.has_first_stage * rank.trained_share * 4 * rank.embedding_parameters
        )
    return component_bytes


def pending_bytes(rank: PipelineRank) -> float:
    """Return the number of bytes per block and micro-batch that are kept from the backward pass for
    inputs (I) until the backward pass for weights (W). The activations are not counted.

    In compiled blocks, the inputs of all matrices and the gradients of their outputs replace the
    activations and have the same total size (parallel/zero_bubble.py). Sequence parallelism needs
    additional memory, because the gradients of the two results that a block sums over tp are
    unsharded. In uncompiled blocks, the gradients are kept in addition to the activations."""
    if rank.config.compile:
        return 2 * (1 - rank.hidden_share) * rank.hidden_bytes
    return rank.tokens * rank.dtype_bytes * sum(rows for rows, _ in rank.size.block_matrices)


PP = Mechanism(
    is_used=lambda plan: plan.mesh["pp"] > 1,
    state=stage_state,
    additional_bytes=stage_bytes,
    layer_traffic=stage_traffic,
)
