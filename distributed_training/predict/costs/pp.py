"""Estimate the cost of pipeline parallelism, which partitions layers into stages over pp. This
module does not import torch. predict/simulate.py computes how long stages wait."""

from collections import Counter

from distributed_training.plan.schedules import P2P_CHANNELS
from distributed_training.predict.mechanism import Bytes, Mechanism, Moment, Parts, Place, Timing
from distributed_training.predict.rates import FITTED


def traffic(at: Place) -> Bytes:
    """Return the traffic for activations and their gradients and, once per step, for the gradient
    of a tied embedding."""
    sent = at.edges * at.micro_batches * at.hidden // at.parts
    traffic: Bytes = Counter({("pp", "send"): sent})
    if at.first != at.last and at.size.tied and at.trained:
        if at.strategy.traits.rounds_weights:
            traffic["pp", "all_reduce"] = at.width * at.embedding
        else:
            traffic["pp", "send"] += 4 * at.embedding // at.shards
    return traffic


def message_s(at: Timing) -> float:
    """Return the time in seconds to send a result from one stage to the next."""
    rate = at.rates.link_bytes
    latency = at.rates.link_latency_s
    if at.plan.num_processes // at.pp >= at.plan.processes_here:  # on another node
        rate = at.rates.network_bytes
        latency *= 2
    rate = min(rate, P2P_CHANNELS * FITTED.channel_bytes_per_s)
    return latency + at.hidden * at.between / rate


def state(at: Place) -> Parts:
    """Return the number of additional bytes per parameter that stages with fp32 weights keep
    throughout a step. These bytes hold gathered or rounded parameters, and unsharded gradients."""
    if at.strategy.traits.rounds_weights:
        return {}
    copied = at.mesh["dp_replicate"] * at.shards > 1 or at.width < 4
    return {"parameters": copied * at.width, "gradients": 4 - 4 / at.shards}


def held(at: Place, moment: Moment, state: Parts) -> Parts:
    """Return the sizes in bytes of PyTorch's receive buffers, one per message of a step, and of the
    embedding's gradient. Gathered parameters are moved from the component "parameters" to the
    component "copies"."""
    parts = {}
    if not at.strategy.traits.rounds_weights:
        shard = (4 if at.trained else at.width) * at.parameters / at.shards
        parts["copies"] = state["parameters"] - shard
        parts["parameters"] = -parts["copies"]
    if moment == "passes":
        received = at.edges * at.micro_batches * at.hidden * at.between
        parts["activations"] = received + at.first * at.trained * 4 * at.embedding
    return parts


def pending_bytes(at: Place) -> float:
    """Return the number of bytes per block and micro-batch that are kept from the backward pass for
    inputs (I) to the backward pass for weights (W), in addition to the activations.

    In compiled blocks, the inputs of all matrices and the gradients of their outputs replace the
    activations and have the same total size (parallel/zero_bubble.py). With sequence parallelism,
    additional memory is needed, because the gradients of both sums over tp are unsharded. In
    uncompiled blocks, the gradients are kept in addition to the activations."""
    if at.config.compile:
        return 2 * (1 - at.between) * at.hidden
    return at.tokens * at.width * sum(rows for rows, _ in at.size.block_matrices)


PP = Mechanism(used=lambda plan: plan.mesh["pp"] > 1, state=state, held=held, traffic=traffic)
