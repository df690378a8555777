"""Cost of PyTorch's FSDP: state sharded over dp_shard, and replicas of shards over dp_replicate.
No torch import."""

from collections import Counter

from distributed_training.predict.costs.lora import base_bytes
from distributed_training.predict.mechanism import Bytes, Mechanism, Place


def exchange(at: Place) -> Bytes:
    """Return the gathers of a block before its forward and its backward pass in every micro-batch,
    and the scatter of its gradients. In a pipeline they run once per step, around its phase."""
    traffic: Bytes = Counter()
    if at.shards > 1:
        around = at.width * at.around
        blocks = base_bytes(at) - around + at.width * at.adapters
        traffic["dp_shard", "all_gather"] = at.rounds * ((1 if at.pp > 1 else 2) * blocks + around)
        traffic["dp_shard", "reduce_scatter"] = at.rounds * 4 * at.learning
    if at.mesh["dp_replicate"] > 1:  # between replicas, once per step
        traffic["dp_replicate", "all_reduce"] = 4 * at.learning // at.shards
    return traffic


def _moved(at: Place) -> float:
    """Return the bytes of parameters that are copied out of a buffer twice, and of widened
    gradients that are copied into another one."""
    return 4 * at.width + 4 + at.width if at.pp == 1 else 0


FSDP = Mechanism(
    used=lambda plan: plan.uses_fsdp, exchange=exchange, moved=_moved, launches=lambda at: 1
)
