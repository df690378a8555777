"""Cost of the output layer and the loss, whole or in chunks. No torch import."""

import math

import numpy as np

from distributed_training.predict.mechanism import MEMORY, Passes, Timing
from distributed_training.predict.rates import FITTED


def head(at: Timing) -> Passes:
    """Return the costs of output layer and loss for one micro-batch, in each pass."""
    d = at.size.hidden_size
    vocabulary = at.size.padded_vocab_size / at.tp
    rate = at.rates.memory_bytes
    if at.loss != "split":  # torch's loss is one kernel
        rate = at.rates.head_memory_bytes or rate
    moved = vars(FITTED.logit_traffic)[at.loss] * at.width / 2 * at.tokens * vocabulary
    traffic = 0.5 * (moved / rate) * MEMORY
    # Each chunk but the first reads and writes the gradient of the output rows.
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
