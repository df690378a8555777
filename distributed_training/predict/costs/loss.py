"""Estimate the cost of the output layer and the loss, computed at once or in chunks. This module
does not import torch."""

import math
from typing import NamedTuple

import numpy as np

from distributed_training.predict.mechanism import (
    MEMORY,
    Mechanism,
    Moment,
    Parts,
    Passes,
    Place,
    Timing,
)
from distributed_training.predict.rates import FITTED

SPLIT_LOGIT_BYTES = 2  # per logit of a micro-batch whose W has not run yet
EAGER_CHUNK = 17  # bytes that loss_and_gradient allocates per logit of a chunk, uncompiled


class LossBytes(NamedTuple):
    """Memory in bytes that the loss of one micro-batch needs on the last stage."""

    kept: float  # from forward to backward
    peak: float
    waiting: float  # from I to W
    around: float  # for the last norm and the output layer, throughout the passes
    after: float  # for the output rows' gradient, if it is not counted elsewhere


def loss_bytes(at: Place) -> LossBytes:
    """Return the sizes in bytes of the logits and of the tensors that coexist with them.

    The compiled loss keeps the logits and overwrites them with their gradient. Without compilation,
    log_softmax keeps its fp32 result, and its backward pass holds two more tensors of that size.
    With tp, the probabilities are kept in fp32, and the gradient is a separate tensor."""
    sharded = at.strategy.traits.rounds_weights or at.plan.uses_fsdp
    after = 0.0
    if at.trained and not at.has_buckets and at.micro_batches == 1:
        after = (at.width if sharded else 4) * at.embedding
    around = at.hidden * (at.between + 2)  # input and output of the norm, and one gradient
    count = at.tokens * at.size.padded_vocab_size / at.tp
    chunk = int(at.config.loss_chunk_tokens)
    if chunk:
        # The gradients of the hidden states and output rows are kept. The peak also includes one
        # chunk or, if the weights are fp32, an fp32 copy of the output rows' gradient after the
        # last chunk.
        rows = at.trained * (at.size.padded_vocab_size * at.size.hidden_size / at.tp)
        kept = at.hidden + at.width * rows
        share = min(chunk, at.tokens) / at.tokens
        beside = share * count * (at.width if at.config.compile else at.width + EAGER_CHUNK)
        if at.width < 4 and not sharded:
            beside = max(beside, 4 * rows)
        return LossBytes(kept, kept + beside, 0, around, after)
    around += at.trained * at.width * at.embedding
    kept, peak = {
        "split": (4, 4 + at.width), "compiled": (at.width, at.width), "eager": (4, 12)
    }[_kind(at)]  # fmt: skip
    waiting = 0 if at.config.compile else SPLIT_LOGIT_BYTES
    return LossBytes(kept * count, peak * count, waiting * count, around, after)


def _kind(at: Place) -> str:
    return "split" if at.tp > 1 else at.way  # with tp, the loss consists of several kernels


def _second_gradient(at: Place, moment: Moment, state: Parts) -> Parts:
    """Return the size in bytes of a tied embedding's second gradient, which is added to the
    first."""
    in_fsdp_buffers = at.plan.uses_fsdp and at.pp == 1
    if moment == "update" and at.trained and not in_fsdp_buffers:
        return {"buffers": 4 * at.embedding}
    return {}


def head(at: Timing) -> Passes:
    """Return the costs of the output layer and the loss for each pass of one micro-batch."""
    d = at.size.hidden_size
    vocabulary = at.size.padded_vocab_size / at.tp
    rate = at.rates.memory_bytes
    kind = _kind(at)
    if kind != "split":  # PyTorch's loss is one kernel
        rate = at.rates.head_memory_bytes or rate
    moved = vars(FITTED.logit_traffic)[kind] * at.width / 2 * at.tokens * vocabulary
    traffic = 0.5 * (moved / rate) * MEMORY
    # Each chunk reads and writes the gradient of the output rows.
    chunk = int(at.config.loss_chunk_tokens)
    times = 2 * math.ceil(at.tokens / chunk) if chunk else 0
    weights = at.gemm(d, at.tokens, vocabulary) + at.moving(times * at.width * vocabulary * d)
    return np.stack(
        [
            at.gemm(at.tokens, d, vocabulary) + traffic,
            at.gemm(at.tokens, vocabulary, d) + traffic,
            at.trained * weights,
        ]
    )


TIED = Mechanism(
    used=lambda plan: plan.size.tied and not plan.strategy.traits.rounds_weights,
    held=_second_gradient,
)
