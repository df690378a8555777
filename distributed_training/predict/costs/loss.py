"""Estimate the cost of the output layer and the loss. The loss is computed for all tokens at once
or in chunks. This module does not import torch."""

import math
from typing import NamedTuple

from distributed_training.predict.mechanism import (
    GRADIENT_SUM_BYTES,
    ComponentBytes,
    Cost,
    Mechanism,
    PassCosts,
    PipelineRank,
    Sizes,
    StepPoint,
    Timing,
)
from distributed_training.predict.rates import FITTED

EAGER_BYTES_PER_LOGIT = 17  # allocated by loss_and_gradient for a chunk, without compilation


def _chunk_tokens(sizes: Sizes) -> int:
    """Return the number of tokens per chunk, or 0 if the loss is not computed in chunks. A loss
    that is sharded over tp, or of pairs of answers, always has at least one chunk."""
    tokens = int(sizes.config.loss_chunk_tokens)
    if not tokens and (sizes.tp > 1 or sizes.config.has_pairs):
        return sizes.tokens
    return tokens


class LossBytes(NamedTuple):
    """Memory in bytes that the loss of one micro-batch needs on the last stage."""

    kept_bytes: float  # from forward to backward
    peak_bytes: float
    outer_bytes: float  # for the last norm and the output layer, throughout the passes
    output_gradient_bytes: float  # gradient of the output layer's weight, if not counted elsewhere


def loss_bytes(rank: PipelineRank) -> LossBytes:
    """Return the sizes in bytes of the logits and of the tensors that coexist with them.

    The compiled loss keeps the logits and overwrites them with their gradient. Without compilation,
    log_softmax keeps its fp32 result, and its backward pass holds two more tensors of that size."""
    rounds_or_shards = rank.strategy.traits.has_master_weights or rank.plan.uses_fsdp
    output_gradient_bytes = 0.0
    if rank.trained_share and not rank.has_buckets and rank.num_microbatches == 1:
        output_gradient_bytes = (
            rank.dtype_bytes if rounds_or_shards else rank.weight_bytes
        ) * rank.embedding_parameters
    outer_bytes = rank.hidden_bytes * (
        rank.hidden_share + 2
    )  # input and output of the norm, and one gradient
    if rank.kind.traced_values and rank.size.vocab_size % 8:  # models/hub/model.py aligns a copy
        outer_bytes += rank.dtype_bytes * rank.embedding_parameters
    num_logits = rank.tokens * rank.size.padded_vocab_size / rank.tp
    chunk = _chunk_tokens(rank)
    if chunk:
        # The gradients of the hidden states and of the output layer's weight are kept. The peak
        # also includes one chunk. If the weights are fp32, an fp32 copy of the weight's gradient
        # exists after the last chunk, and the larger of chunk and copy counts. In fp16, this
        # gradient is kept in fp32, and each chunk's share of it exists in fp16 and in fp32.
        output_parameters = rank.trained_share * rank.embedding_parameters
        is_fp16 = rank.config.precision == "fp16"
        gradient_bytes = 4 if is_fp16 else rank.dtype_bytes
        kept = rank.hidden_bytes + gradient_bytes * output_parameters
        share = min(chunk, rank.tokens) / rank.tokens
        eager_bytes = 0 if rank.config.compile else EAGER_BYTES_PER_LOGIT
        chunk_bytes = share * num_logits * (rank.dtype_bytes + eager_bytes)
        if is_fp16:
            chunk_bytes += 6 * output_parameters
        if rank.dtype_bytes < rank.weight_bytes and not rounds_or_shards:
            chunk_bytes = max(chunk_bytes, 4 * output_parameters)
        return LossBytes(kept, kept + chunk_bytes, outer_bytes, output_gradient_bytes)
    outer_bytes += rank.trained_share * rank.dtype_bytes * rank.embedding_parameters
    kept, peak = (rank.dtype_bytes, rank.dtype_bytes) if rank.config.compile else (4, 12)
    return LossBytes(kept * num_logits, peak * num_logits, outer_bytes, output_gradient_bytes)


def _second_gradient_bytes(rank: PipelineRank, point: StepPoint) -> ComponentBytes:
    """Return the size in bytes of a tied embedding's second gradient, which is added to the first
    gradient."""
    in_fsdp_buffers = rank.plan.uses_fsdp and rank.pp == 1
    if point == "update" and rank.trained_share and not in_fsdp_buffers:
        copies = 2 if rank.tp > 1 else 1  # autograd adds DTensors in new memory
        return {"buffers": copies * rank.weight_bytes * rank.embedding_parameters}
    return {}


def head_costs(timing: Timing) -> PassCosts:
    """Return the costs of the output layer and the loss for each pass of one micro-batch."""
    d = timing.size.hidden_size
    vocabulary = timing.size.padded_vocab_size / timing.tp
    rate = timing.rates.head_memory_bytes_per_s or timing.rates.memory_bytes_per_s
    bytes_per_logit = vars(FITTED.logit_traffic)[timing.compile_mode] * timing.dtype_bytes / 2
    logit_bytes = bytes_per_logit * timing.tokens * vocabulary
    traffic = Cost(memory_s=0.5 * (logit_bytes / rate))
    # Each chunk reads and writes the gradient of the output layer's weight. In a pipeline, the
    # gradient is added to those of earlier micro-batches.
    chunk = _chunk_tokens(timing)
    num_accesses = 2 * math.ceil(timing.tokens / chunk) if chunk else 0
    per_parameter = num_accesses * timing.dtype_bytes
    per_parameter += GRADIENT_SUM_BYTES if timing.pp > 1 else 0
    weights = timing.gemm_cost(d, timing.tokens, vocabulary)
    weights += timing.memory_cost(per_parameter * vocabulary * d)
    forward = timing.gemm_cost(timing.tokens, d, vocabulary) + traffic
    inputs = timing.gemm_cost(timing.tokens, vocabulary, d) + traffic
    if timing.config.has_pairs:  # The backward pass computes the logits again.
        inputs += forward
    return PassCosts(forward=forward, inputs=inputs, weights=timing.trained_share * weights)


TIED = Mechanism(
    is_used=lambda plan: plan.size.tied and not plan.strategy.traits.uses_zero,
    additional_bytes=_second_gradient_bytes,
)
