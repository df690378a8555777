"""Compute the communication volume of a step with the formulas in strategies/*/README.md. This
module does not import torch."""

from collections import Counter, defaultdict

from distributed_training.plan.plan import Draft
from distributed_training.predict.costs import used_by
from distributed_training.predict.mechanism import Bytes, Place, all_places, sent_bytes


def tensor_bytes(at: Place) -> Bytes:
    """Return the number of bytes that a process exchanges per step, by axis and operation.
    Exchanges of at most 8 bytes are omitted."""
    total: Bytes = Counter()
    for mechanism in used_by(at.plan):
        total += mechanism.traffic(at) + mechanism.exchange(at)
    return total


def sent_by_kind(at: Place) -> dict[str, float]:
    """Return the number of bytes that a process sends per step, by axis and operation. The keys are
    strings such as "tp all_reduce"."""
    return {
        f"{axis} {kind}": sent_bytes(kind, size, 2 if axis == "pp" else at.mesh[axis])
        for (axis, kind), size in sorted(tensor_bytes(at).items())
    }


def sent_by_axis(plan: Draft) -> dict[str, float]:
    """Return the number of bytes that a process sends per step over each axis. The process is on
    the pipeline rank whose processes send the most."""
    most = max(map(sent_by_kind, all_places(plan)), key=lambda sent: sum(sent.values()))
    by_axis: dict[str, float] = defaultdict(float)
    for name, size in most.items():
        by_axis[name.split()[0]] += size
    return dict(by_axis)
