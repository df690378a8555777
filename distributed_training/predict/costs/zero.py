"""Estimate the cost of DeepSpeed's ZeRO. The ZeRO stage determines which state is sharded. State
may be offloaded to the CPU or to NVMe. This module does not import torch."""

from distributed_training.predict.costs.precision import MOMENT_BYTES
from distributed_training.predict.mechanism import (
    ComponentBytes,
    Mechanism,
    PipelineRank,
    Sizes,
    StepPoint,
    Traffic,
)
from distributed_training.predict.rates import FITTED, Rates

# Bytes per parameter that AdamW and clipping read and write, without Adam moments, for the weight,
# the rounded weight and the gradient. The gradient is also widened, scaled and added.
UPDATE_BYTES = 44
# Bytes per parameter that a step reads and writes if the state is on disk. fp32 weights and Adam
# moments: 12 + 12. Gradients: 4 + 4. Rounded weights: 2 in each of the two passes, and 2 after the
# update.
SWAPPED_BYTES = 38
OFFLOADED = {"cpu": "host", "nvme": "disk"}  # offload device in DeepSpeed -> component of state


def state_bytes(rank: PipelineRank) -> ComponentBytes:
    """Return the number of bytes per parameter for each component of the state: weights and
    gradients in the compute dtype, the fp32 master copy, and both Adam moments (ZeRO paper, section
    3.1)."""
    stage = rank.zero.stage
    state = {
        "parameters": rank.dtype_bytes / (rank.shards if stage >= 3 else 1),
        "gradients": rank.dtype_bytes / (rank.shards if stage >= 2 else 1),
        "optimizer": 12 / (rank.shards if stage >= 1 else 1),
        "host": 0,
        "disk": 0,
    }
    for section, component in (("optimizer", "optimizer"), ("param", "parameters")):
        if device := OFFLOADED.get(rank.strategy.offload[section]):
            state[device] += state.pop(component)
    if rank.strategy.steps_on_host:  # fp32 gradients are in RAM until the optimizer step
        state["host"] += 4 / rank.shards
        del state["gradients"]
    return state


def additional_bytes(rank: PipelineRank, point: StepPoint) -> ComponentBytes:
    """Return the size in bytes of the parameters that ZeRO stage 3 has gathered from other
    processes or fetched from RAM or disk, and of the gradients that Adam needs for this process's
    shard: fp32 gradients and a flat copy in the compute dtype."""
    sizes = {"copies": 0.0, "buffers": 0.0}
    if rank.strategy.fetches_parameters:
        max_fetched = min(rank.zero.stage3_max_live_parameters, rank.parameters)
        sizes["copies"] = rank.dtype_bytes * max_fetched
    elif rank.zero.stage == 3 and rank.shards > 1 and point != "update":
        # A parameter stays gathered from its forward pass to its backward pass if few others are
        # used in between: the blocks after it, twice, and the output layer.
        reused = (rank.zero.stage3_max_reuse_distance + rank.embedding_parameters) / 2
        sizes["copies"] = rank.dtype_bytes * min(reused, rank.parameters)
    if point == "update" and not rank.strategy.steps_on_host:
        sizes["buffers"] = (4 + rank.dtype_bytes) * rank.trained_parameters / rank.shards
    return sizes


def bucket_bytes(rank: PipelineRank) -> float:
    """Return the total size in bytes of the two gradient buckets. One bucket is filled while the
    other is reduced. They are filled after the backward pass of the loss has freed the logits.
    Return 0 for ZeRO stage 0, ZeRO stage 3 and pipelines, because they have no buckets."""
    if rank.zero.stage not in (1, 2) or rank.pp > 1:
        return 0
    return 2 * rank.dtype_bytes * min(rank.zero.reduce_bucket_size, rank.trained_parameters)


def zero_traffic(rank: PipelineRank) -> Traffic:
    """Return the traffic that the ZeRO stage causes for the whole model or, in a pipeline, for the
    layers of one pipeline stage."""
    gradient_bytes = rank.dtype_bytes * rank.trained_parameters
    num_reductions = rank.num_microbatches if rank.zero.stage > 1 else 1
    gathered_bytes = gradient_bytes
    operation = "all_reduce"
    if rank.zero.stage == 3:
        operation = "reduce_scatter"
        gathered_bytes = num_reductions * rank.dtype_bytes * rank.parameters
        if rank.adapter_parameters:  # parameters remain gathered until the update
            gathered_bytes = rank.dtype_bytes * rank.parameters + gradient_bytes
        if not rank.zero.stage3_max_reuse_distance:
            gathered_bytes *= 2
    return {
        ("dp_shard", "all_gather"): gathered_bytes,
        ("dp_shard", operation): num_reductions * gradient_bytes,
    }


def update_bytes(rank: PipelineRank) -> float:
    if rank.strategy.steps_on_host:
        return 0.0
    num_updated = rank.trained_parameters / (rank.shards if rank.zero.stage > 0 else 1)
    return (UPDATE_BYTES + 2 * MOMENT_BYTES[rank.config.optimizer]) * num_updated


def num_launches(sizes: Sizes) -> float:
    """Return the number of collectives that ZeRO stage 3 launches per block: an all-gather in each
    pass and, if there are several shards, a reduce-scatter. Return 0 for other ZeRO stages."""
    if sizes.zero.stage < 3:
        return 0
    return 2 if sizes.shards == 1 else 3


def hook_costs(rank: PipelineRank, rates: Rates) -> tuple[float, float]:
    """Return (number of hook calls per tensor, seconds that the GPU waits for hooks). In ZeRO
    stages 0 to 2, hooks run for each tensor in every micro-batch, even if they exchange nothing."""
    wait_s = rates.host.wait * rank.num_blocks
    if rank.zero.stage < 3:
        return rank.num_microbatches, wait_s / rank.shards
    if rank.shards > 1:
        wait_s *= 2
    return 0, wait_s


def offload_s(sizes: Sizes, most_parameters: float) -> dict[str, float]:
    """Return the time in seconds that offloading adds to each step, keyed by bottleneck. The key is
    "disk" for file access, or "host RAM" for the optimizer step on the CPU. Return {} if offloading
    adds no time. `most_parameters` is the largest number of trained parameters on any rank."""
    processes_here = sizes.plan.processes_here
    shard_parameters = most_parameters / sizes.shards
    if sizes.strategy.swaps_to_disk:
        return {
            "disk": SWAPPED_BYTES * (shard_parameters * processes_here) / FITTED.disk_bytes_per_s
        }
    if sizes.strategy.steps_on_host:
        return {
            "host RAM": FITTED.host_adam_s * (shard_parameters * min(processes_here, sizes.shards))
        }
    return {}


ZERO = Mechanism(
    is_used=lambda plan: plan.strategy.traits.uses_zero,
    state=state_bytes,
    additional_bytes=additional_bytes,
    # During the passes, stage 3 has a flat buffer for all gradients.
    gradient_share=lambda rank, point: 1 if rank.zero.stage == 3 and point == "passes" else 0,
    data_parallel_traffic=zero_traffic,
    num_launches=num_launches,
    hook_costs=hook_costs,
    update_bytes=update_bytes,
)
