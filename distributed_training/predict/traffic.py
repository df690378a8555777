"""Compute the communication volume of a step with the formulas in strategies/LAWS.md. This
module does not import torch."""

from collections import Counter, defaultdict

from distributed_training.plan.plan import Draft
from distributed_training.predict.costs import used_by
from distributed_training.predict.mechanism import PipelineRank, pipeline_ranks, sent_bytes


def tensor_bytes(rank: PipelineRank) -> Counter[tuple[str, str]]:
    """Return the total size in bytes of the tensors that a rank communicates per step, by axis and
    operation. Tensors of at most 8 bytes are omitted."""
    total: Counter[tuple[str, str]] = Counter()
    for mechanism in used_by(rank.plan):
        total.update(mechanism.layer_traffic(rank))
        total.update(mechanism.data_parallel_traffic(rank))
    return +total


def sent_by_operation(rank: PipelineRank) -> dict[str, float]:
    """Return the number of bytes that a process sends per step, by axis and operation. The keys are
    strings such as "tp all_reduce"."""
    return {
        f"{axis} {operation}": sent_bytes(operation, size, 2 if axis == "pp" else rank.mesh[axis])
        for (axis, operation), size in sorted(tensor_bytes(rank).items())
    }


def sent_by_axis(plan: Draft) -> dict[str, float]:
    """Return the number of bytes that a process of the busiest pipeline rank sends per step, by
    axis. The busiest pipeline rank is the one whose processes send the most bytes."""
    sent_bytes_by_operation = max(
        map(sent_by_operation, pipeline_ranks(plan)), key=lambda sent: sum(sent.values())
    )
    by_axis: dict[str, float] = defaultdict(float)
    for name, size in sent_bytes_by_operation.items():
        by_axis[name.split()[0]] += size
    return dict(by_axis)
