"""Estimate the cost of tensor parallelism, which splits every layer over tp. This module does not
import torch."""

from collections import Counter

import numpy as np

from distributed_training.predict.mechanism import (
    NETWORK,
    Bytes,
    Cost,
    Mechanism,
    Moment,
    Parts,
    Passes,
    Place,
    Timing,
)
from distributed_training.predict.rates import FITTED


def traffic(at: Place) -> Bytes:
    """Return the traffic over tp. With sequence parallelism, a block runs two all-gathers and two
    reduce-scatters in each direction. Without it, a block runs two all-reduces instead. The
    embedding, output layer and loss add exchanges. The gradients of `at.terms` parameters are
    summed over tp once per step."""
    count = at.micro_batches
    exchanged = count * 4 * at.num_blocks * at.hidden
    reduced = 4 * at.terms // at.shards
    gathered = 0
    if at.last:
        exchanged += count * at.hidden
        if at.config.loss_chunk_tokens:  # two fp32 numbers per token and process
            gathered += count * 8 * at.tokens * at.tp
        else:
            reduced += count * 12 * at.tokens
    if at.first:  # parameters are fp32 if FSDP does not round them
        width = at.width if at.plan.num_processes > at.tp else 4
        exchanged += at.trained * count * at.tokens * at.size.hidden_size * width
    # Recomputation stops before the last exchange of the forward pass, whose result is unused.
    again = at.recomputes * count * at.num_blocks * at.hidden
    # With "selective", the sum is kept, and compiled blocks do not repeat it.
    keeps_sum = at.config.activation_checkpointing == "selective" and at.config.compile
    sum_again = 0 if keeps_sum else again
    if not at.config.sequence_parallel:
        sums = exchanged + sum_again + reduced
        return Counter({("tp", "all_reduce"): sums, ("tp", "all_gather"): gathered})
    return Counter(
        {
            ("tp", "all_reduce"): reduced,
            ("tp", "all_gather"): exchanged + 2 * again + gathered,
            ("tp", "reduce_scatter"): exchanged + sum_again,
        }
    )


def exchange_in_block(at: Timing) -> Cost:
    """Return the cost of a block's exchanges over tp in one direction: two all-gathers and two
    reduce-scatters, or two all-reduces."""
    if at.tp == 1:
        return np.zeros(3)
    if not at.config.sequence_parallel:
        return at.collective("tp", "all_reduce", 2 * at.hidden, 2) * NETWORK
    seconds = at.collective("tp", "all_gather", 4 * at.hidden, 4)
    if at.config.async_tp:
        seconds *= 1 - FITTED.async_tp_share
    return seconds * NETWORK


def held(at: Place, moment: Moment, state: Parts) -> Parts:
    """Return the size in bytes of an untied embedding's gradient, which is summed over tp and then
    copied to the parameter's layout."""
    alone = at.pp == 1 and not at.plan.uses_fsdp
    if moment == "update" and alone and at.trained and not at.size.tied:
        return {"buffers": 2 * 4 * at.embedding}
    return {}


def block(at: Timing) -> Passes:
    return np.outer((1, 1, 0), exchange_in_block(at))


TP = Mechanism(
    used=lambda plan: plan.mesh["tp"] > 1,
    held=held,
    traffic=traffic,
    block=block,
    launches=lambda at: 1,
)
