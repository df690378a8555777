"""Estimate the cost of a pipeline: layers partitioned into stages over pp. No torch import.
predict/simulate.py computes the time that stages wait."""

from collections import Counter

from distributed_training.plan.schedules import P2P_CHANNELS
from distributed_training.predict.mechanism import Bytes, Mechanism, Moment, Parts, Place, Timing
from distributed_training.predict.rates import FITTED


def traffic(at: Place) -> Bytes:
    """Return the traffic of activations and their gradients and, once per step, of the gradient of
    a tied embedding."""
    sent = at.edges * at.micro_batches * at.hidden // at.parts
    traffic: Bytes = Counter({("pp", "send"): sent})
    if at.first != at.last and at.size.tied and at.trained:
        if at.strategy.traits.rounds_weights:
            traffic["pp", "all_reduce"] = at.width * at.embedding
        else:
            traffic["pp", "send"] += 4 * at.embedding // at.shards
    return traffic


def message_s(at: Timing) -> float:
    """Return the seconds that a result of one stage takes to reach the next stage."""
    rate = at.rates.link_bytes
    latency = at.rates.link_latency_s
    if at.plan.num_processes // at.pp >= at.plan.processes_here:  # on another node
        rate = at.rates.network_bytes
        latency *= 2
    rate = min(rate, P2P_CHANNELS * FITTED.channel_bytes_per_s)
    return latency + at.hidden * at.between / rate


def state(at: Place) -> Parts:
    """Return the bytes per parameter that fp32 stages have for all micro-batches of a step:
    gathered or rounded parameters, and whole gradients."""
    if at.strategy.traits.rounds_weights:
        return {}
    copied = at.mesh["dp_replicate"] * at.shards > 1 or at.width < 4
    return {"parameters": copied * at.width, "gradients": 4 - 4 / at.shards}


def held(at: Place, moment: Moment, state: Parts) -> Parts:
    """Return torch's buffers for each message of a step that this process receives, and the
    gradient of the embedding. Gathered parameters count as copies."""
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
    """Return the bytes of a block that a micro-batch adds to those it keeps, from I to W.

    In compiled blocks, the inputs of all matrices and the gradients of their outputs are together
    as large as the activations that they replace (parallel/zero_bubble.py). With tp, the gradients
    of both sums are whole even if the hidden states between layers are sharded. In uncompiled
    blocks, the gradients are added to the activations."""
    if at.config.compile:
        return 2 * (1 - at.between) * at.hidden
    return at.tokens * at.width * sum(rows for rows, _ in at.size.block_matrices)


PP = Mechanism(used=lambda plan: plan.mesh["pp"] > 1, state=state, held=held, traffic=traffic)
