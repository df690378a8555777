"""Cost of a pipeline: layers partitioned into stages over pp. No torch import.

predict/simulate.py finds the time in which stages wait."""

from collections import Counter

from distributed_training.plan.schedules import P2P_CHANNELS
from distributed_training.predict.mechanism import Bytes, Mechanism, Place, Timing
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
    """Return the seconds until a result of one stage has reached the next."""
    rate = at.rates.link_bytes
    latency = at.rates.link_latency_s
    if at.plan.num_processes // at.pp >= at.plan.processes_here:  # on another node
        rate = at.rates.network_bytes
        latency *= 2
    rate = min(rate, P2P_CHANNELS * FITTED.channel_bytes_per_s)
    return latency + at.hidden * at.between / rate


PP = Mechanism(used=lambda plan: plan.mesh["pp"] > 1, traffic=traffic)
