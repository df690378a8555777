"""Estimate the cost of DeepSpeed's ZeRO. The ZeRO stage determines which state is sharded. State
may be offloaded to the CPU or to NVMe. This module does not import torch."""

from collections import Counter

from distributed_training.predict.costs.precision import MOMENT_BYTES
from distributed_training.predict.mechanism import Bytes, Mechanism, Moment, Parts, Place
from distributed_training.predict.rates import FITTED, Rates

# Bytes per parameter that AdamW and clipping read and write, without Adam moments, for the weight,
# the rounded weight and the gradient. The gradient is also widened, scaled and added.
UPDATE_BYTES = 44
# Bytes per parameter that a step with its state on disk reads and writes there: fp32 weights and
# Adam moments 12 + 12, gradients 4 + 4, rounded weights 2 per pass and 2 after the update.
SWAPPED_BYTES = 38
OFFLOADED = {"cpu": "host", "nvme": "disk"}  # DeepSpeed's device -> component of state


def state(at: Place) -> Parts:
    """Return the number of bytes per parameter for each component of the state: weights and
    gradients in the compute dtype, the fp32 master copy, and both Adam moments (ZeRO paper, section
    3.1)."""
    stage = at.zero.stage
    state: dict[str, float] = {
        "parameters": at.width / (at.shards if stage >= 3 else 1),
        "gradients": at.width / (at.shards if stage >= 2 else 1),
        "optimizer": 12 / (at.shards if stage >= 1 else 1),
        "host": 0,
        "disk": 0,
    }
    for what, part in (("optimizer", "optimizer"), ("param", "parameters")):
        if device := OFFLOADED.get(at.strategy.offload[what]):
            state[device] += state.pop(part)
    if at.strategy.steps_on_host:  # fp32 gradients are in RAM until the optimizer step
        state["host"] += 4 / at.shards
        del state["gradients"]
    return state


def gathered(at: Place, moment: Moment, state: Parts) -> Parts:
    """Return the size in bytes of the parameters that stage 3 has gathered from other processes or
    fetched from the host or a disk."""
    if at.zero.stage < 3:
        return {}
    most = min(at.zero.stage3_max_live_parameters, at.parameters)
    share = 1 if at.strategy.fetches_parameters else 1 - 1 / at.shards
    return {"copies": at.width * most * share}


def buckets(at: Place) -> float:
    """Return the total size in bytes of two gradient buckets. One is filled while the other is
    reduced. ZeRO stages 0 and 3 and pipelines have no buckets."""
    if at.zero.stage not in (1, 2) or at.pp > 1:
        return 0
    return 2 * at.width * min(at.zero.reduce_bucket_size, at.learning)


def widened(at: Place, moment: Moment, state: Parts) -> Parts:
    """Return the size in bytes of the fp32 gradients that Adam needs for this process's shard,
    including a flat copy in the compute dtype."""
    if moment != "update" or at.strategy.steps_on_host:
        return {}
    return {"buffers": (4 + at.width) * at.learning / at.shards}


def exchange(at: Place) -> Bytes:
    """Return the traffic that the ZeRO stage causes for the whole model or, in a pipeline, for the
    layers of one pipeline stage."""
    learning = at.width * at.learning
    times = at.micro_batches if at.zero.stage > 1 else 1
    gathered = learning
    kind = "all_reduce"
    if at.zero.stage == 3:
        kind = "reduce_scatter"
        gathered = times * at.width * at.parameters
        if at.adapters:  # parameters remain gathered until the update
            gathered = at.width * at.parameters + learning
        if not at.zero.stage3_max_reuse_distance:
            gathered *= 2
    return Counter({("dp_shard", "all_gather"): gathered, ("dp_shard", kind): times * learning})


def updated(at: Place) -> float:
    if at.strategy.steps_on_host:
        return 0.0
    part = at.learning / (at.shards if at.zero.stage > 0 else 1)
    return (UPDATE_BYTES + 2 * MOMENT_BYTES[at.config.optimizer]) * part


def launches(at: Place) -> float:
    """Return the number of exchanges that stage 3 launches per block: an all-gather of parameters
    in each pass and, with several shards, a reduce-scatter of gradients."""
    if at.zero.stage < 3:
        return 0
    return 2 if at.shards == 1 else 3


def hooks(at: Place, rates: Rates) -> tuple[float, float]:
    """Return (number of hook calls per tensor, seconds that the GPU waits for hooks). In ZeRO
    stages 0 to 2, hooks run for each tensor in every micro-batch, even if they exchange nothing."""
    wait_s = rates.host.wait * at.num_blocks
    if at.zero.stage < 3:
        return at.micro_batches, wait_s / at.shards
    return 0, wait_s if at.shards == 1 else 2 * wait_s


def off_device(at: Place, learning: float) -> dict[str, float]:
    """Return the time in seconds that a node needs for file access, or for the optimizer step on
    the host."""
    here = at.plan.processes_here
    share = learning / at.shards
    if at.strategy.swaps_to_disk:
        return {"disk": SWAPPED_BYTES * (share * here) / FITTED.disk_bytes_per_s}
    if at.strategy.steps_on_host:
        return {"host RAM": FITTED.host_adam_s * (share * min(here, at.shards))}
    return {}


ZERO = Mechanism(
    used=lambda plan: plan.strategy.traits.takes_json,
    held=gathered,
    # During the passes, stage 3 has a flat buffer for all gradients.
    gradients=lambda at, moment: at.zero.stage == 3 and moment == "passes",
    buckets=buckets,
    # Two bytes per value, even in fp32 runs
    on_host=lambda at: 2 * at.strategy.swap_buffer_values,
    exchange=exchange,
    launches=launches,
    off_device=off_device,
)
MASTER_COPY = Mechanism(
    used=lambda plan: plan.strategy.traits.rounds_weights,
    state=state,
    held=widened,
    updated=updated,
)
HOOKS = Mechanism(used=lambda plan: plan.strategy.traits.hooks_between_blocks, hooks=hooks)
