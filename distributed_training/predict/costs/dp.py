"""Estimate the cost of data parallelism with full replicas, whose gradients are averaged by
PyTorch's DDP or by a strategy's own engine. This module does not import torch."""

from collections import Counter

from distributed_training.predict.mechanism import Bytes, Mechanism, Moment, Parts, Place
from distributed_training.settings.keys import Options


def exchange(at: Place) -> Bytes:
    """Return the traffic per step for averaging gradients. If an engine instead averages parameters
    every few steps, return the mean traffic per step."""
    kinds = {"all_reduce": 2 * at.learning}
    if at.config.gradient_compression == "none":
        matrices = _matrices(at) * at.trained  # adapters are as small as compressed matrices
        values = at.plan.engine_options
        options = at.strategy.options(values) if values else Options()
        kinds = options.sent_bytes(at.learning, matrices, at.mesh["dp_replicate"])
    steps = at.plan.steps_between_exchanges or 1
    return Counter({("dp_replicate", kind): sent // steps for kind, sent in kinds.items()})


def _matrices(at: Place) -> list[tuple[int, int]]:
    """Return the (rows, columns) of each matrix in the model."""
    size = at.size
    hidden = size.hidden_size
    tables = [(size.padded_vocab_size, hidden)] * (1 if size.tied else 2)
    positions = (size.position_parameters // hidden, hidden)
    return [*size.block_matrices] * at.num_blocks + [*tables, positions]


def held(at: Place, moment: Moment, state: Parts) -> Parts:
    """Return the size in bytes of the gradient sum. Until the last micro-batch, this sum exists in
    addition to the buckets."""
    return {"buffers": state["gradients"]} if at.has_buckets and at.micro_batches > 1 else {}


# Scaled gradients are copied into the buckets once per step.
DP = Mechanism(
    used=lambda plan: plan.only_copies and not plan.strategy.traits.takes_json,
    held=held,
    gradients=lambda at, moment: at.has_buckets,
    exchange=exchange,
    moved=lambda at: 8 / at.micro_batches if at.has_buckets else 0,
)
