"""Estimate the cost of data parallelism with full replicas, whose gradients are averaged by
PyTorch's DDP or by a strategy's own engine. This module does not import torch."""

from distributed_training.predict.mechanism import (
    ComponentBytes,
    Mechanism,
    PipelineRank,
    StepPoint,
    Traffic,
)


def gradient_traffic(rank: PipelineRank) -> Traffic:
    """Return the traffic per step for averaging gradients. If an engine instead averages parameters
    every few steps, return the mean traffic per step."""
    bytes_by_operation = {"all_reduce": 2 * rank.trained_parameters}
    if rank.config.gradient_compression == "none" and not rank.config.has_bf16_weights:
        # Adapters are as small as compressed matrices.
        matrices = _matrix_shapes(rank) if rank.trained_share else []
        options = rank.strategy.options(rank.plan.engine_options)
        bytes_by_operation = options.sent_bytes(
            rank.trained_parameters, matrices, rank.mesh["dp_replicate"]
        )
    steps = rank.plan.steps_between_exchanges or 1
    return {
        ("dp_replicate", operation): num_bytes // steps
        for operation, num_bytes in bytes_by_operation.items()
    }


def _matrix_shapes(rank: PipelineRank) -> list[tuple[int, int]]:
    """Return the (rows, columns) of each matrix in the model."""
    size = rank.size
    hidden = size.hidden_size
    vocabulary_matrices = [(size.padded_vocab_size, hidden)] * (1 if size.tied else 2)
    positions = (size.position_parameters // hidden, hidden)
    return [*size.matrix_shapes, *vocabulary_matrices, positions]


def gradient_sum_bytes(rank: PipelineRank, point: StepPoint) -> ComponentBytes:
    """Return the size in bytes of the sum of gradients over micro-batches. Until the last
    micro-batch, this sum exists in addition to the buckets."""
    if not rank.has_buckets or rank.num_microbatches == 1:
        return {}
    return {"buffers": rank.weight_bytes * rank.trained_parameters}


# Scaled gradients are copied into the buckets once per step.
DP = Mechanism(
    is_used=lambda plan: plan.only_copies and not plan.strategy.traits.uses_zero,
    additional_bytes=gradient_sum_bytes,
    gradient_share=lambda rank, point: 1 if rank.has_buckets else 0,
    data_parallel_traffic=gradient_traffic,
    moved_bytes=lambda rank: 8 / rank.num_microbatches if rank.has_buckets else 0,
)
