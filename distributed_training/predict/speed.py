"""Estimate the duration of one optimizer step in seconds, and the step's main bottleneck. This
module does not import torch.

Durations are estimated as follows:
- matrix multiplications: `FLOPs / rate`. The rate of attention grows with the sequence length.
- element-wise operations: `bytes / bandwidth`, plus the time to start each kernel
- collectives: `latency + bytes / bandwidth`, with the bytes that a process sends in a ring
- pipelines: simulation of the operations in the order of the schedule

The host launches kernels while the GPU computes, so the slower of the host and the GPU determines
the time of the step. With a CUDA graph, the host's time does not count.

Here and in the other modules of predict/, floats are added with `math.fsum`, because `sum` rounds
differently since Python 3.12."""

import math
from typing import NamedTuple

from distributed_training.plan.orders import Step, find_orders
from distributed_training.plan.plan import Draft
from distributed_training.predict.costs import used_by
from distributed_training.predict.costs.loss import head_costs
from distributed_training.predict.costs.pp import embedding_gradient_bytes, message_s
from distributed_training.predict.costs.zero import offload_s
from distributed_training.predict.mechanism import (
    NO_COST,
    Cost,
    PassCosts,
    PipelineRank,
    Timing,
    pipeline_ranks,
)
from distributed_training.predict.rates import FITTED, Rates, gpu_rates
from distributed_training.predict.simulate import map_consumers, simulate, total_duration
from distributed_training.settings.machine import parse_gpu


class StepTime(NamedTuple):
    """Time of a step in seconds, and the main bottleneck of the slowest rank."""

    seconds: float
    bound_by: str  # arithmetic, memory, network, bubble, host RAM, disk or host
    forward_s: float  # time of the forward passes through all stages, one after another


def estimate_step(plan: Draft, rates: Rates) -> StepTime:
    """Estimate the time of one step."""
    step = StepCosts(plan, rates)
    is_graph = step.config.cuda_graphs is True  # one launch per step
    ranks = pipeline_ranks(plan)
    orders = find_orders(plan)
    costs = step.operation_costs()
    durations = {key: cost.total_s for key, cost in costs.items()}
    # These sums are exact, so that ranks whose operations differ only in their order are equally
    # busy in every version of Python.
    busy_s = [math.fsum(durations[kind, stage] for kind, stage, _ in order) for order in orders]
    # If several ranks are equally busy, the rank with the most parameters is the slowest.
    slowest = max(ranks, key=lambda rank: (busy_s[rank.index], rank.trained_parameters))
    computing = sum((costs[kind, stage] for kind, stage, _ in orders[slowest.index]), NO_COST)
    consumers = map_consumers(plan.stages.ranks, message_s(step))
    gpu_passes_s = total_duration(simulate(orders, durations, consumers))
    if rates.on_host:  # while a stage waits, other stages can use its CPU cores
        share_of_cores = min(1.0, plan.machine.num_cpus / plan.processes_here)
        gpu_passes_s = max(math.fsum(busy_s) / len(busy_s), gpu_passes_s * share_of_cores)
    passes_s = gpu_passes_s
    if step.pp > 1 and not (is_graph or rates.on_host):  # each stage's host launches its operations
        passes_s = total_duration(simulate(orders, durations, consumers, step.launch_s()))
    data_parallel_s = step.data_parallel_s(slowest, computing.total_s)
    update_s = step.update_s(slowest)
    host_step_s, hook_wait_s = step.host_step_s(slowest)
    launch_s = 0.0
    if not is_graph:
        max_blocks = max(rank.num_blocks for rank in ranks)
        launch_s = step.host_block_s() * max_blocks * step.num_microbatches + host_step_s
    gpu_s = passes_s + data_parallel_s + update_s
    offload_seconds = offload_s(step, max(rank.trained_parameters for rank in ranks))
    total_s = gpu_s + launch_s if rates.on_host else max(gpu_s, launch_s)
    total_s += hook_wait_s
    total_s += math.fsum(offload_seconds.values())
    bottlenecks = {
        "arithmetic": computing.arithmetic_s,
        "memory": computing.memory_s + update_s,
        "network": computing.network_s + data_parallel_s,
        "bubble": max(0.0, gpu_passes_s - computing.total_s),
        **offload_seconds,
    }
    bottlenecks["host"] = max(0.0, total_s - math.fsum(bottlenecks.values()))
    return StepTime(
        total_s,
        max(bottlenecks, key=lambda name: bottlenecks[name]),
        math.fsum(durations["F", stage] for stage in range(len(plan.stages.block_ranges)))
        * step.num_microbatches,
    )


def predict_ends(plan: Draft, rates: Rates | None) -> tuple[tuple[float, ...], ...]:
    """Return the expected end of each operation of each rank in seconds if the pipeline is
    V-shaped, otherwise (). If the rates are unknown, use those of an H200."""
    if not plan.schedule.v_shaped:
        return ()
    step = StepCosts(plan, rates or gpu_rates(parse_gpu("H200")))
    durations = {key: cost.total_s for key, cost in step.operation_costs().items()}
    orders = find_orders(plan)
    spans = simulate(orders, durations, map_consumers(plan.stages.ranks, message_s(step)))
    return tuple(
        tuple(spans[kind, stage][number][1] for kind, stage, number in order) for order in orders
    )


class StepCosts(Timing):
    """Times and costs of the individual parts of a plan's step."""

    def __init__(self, plan: Draft, rates: Rates) -> None:
        super().__init__(plan, rates)
        self.mechanisms = used_by(plan)

    def operation_costs(self) -> dict[Step, Cost]:
        """Return the cost of each kind of operation on each stage, for one micro-batch."""
        kinds = [(sizes.kind.layers, sizes.costs_of_kind()) for _, sizes in self.by_kind()]
        blocks = self.plan.stages.block_ranges
        costs = {}
        for stage, layers in enumerate(blocks):
            numbers = [len(frozenset(kind_layers).intersection(layers)) for kind_layers, _ in kinds]
            for index, operation in enumerate("FIW"):  # W is only for the blocks' matrices
                of_kinds = [
                    number * passes[index]
                    for number, (_, passes) in zip(numbers, kinds, strict=True)
                ]
                costs[operation, stage] = sum(of_kinds, NO_COST)
            if stage == 0:
                costs["I", stage] += self.memory_cost(embedding_gradient_bytes(self)[1])
            if stage == len(blocks) - 1:
                head = head_costs(self)
                costs["F", stage] += head.forward
                costs["I", stage] += head.inputs + head.weights
            costs["B", stage] = costs["I", stage] + costs["W", stage]
        return costs

    def costs_of_kind(self) -> PassCosts:
        """Return the costs of a block of one kind for one micro-batch."""
        costs = [mechanism.block_costs(self) for mechanism in self.mechanisms]
        forward, inputs, weights = (sum(parts, NO_COST) for parts in zip(*costs, strict=True))
        # Bytes read and written per micro-batch for the block's gradients and rounded weights
        split_parameters = self.kind.split_parameters
        num_parameters = self.kind.parameters - split_parameters + split_parameters / self.tp
        per_parameter = sum(mechanism.moved_bytes(self) for mechanism in self.mechanisms)
        weights += self.memory_cost(per_parameter * num_parameters)
        for mechanism in self.mechanisms:
            for cost in mechanism.recomputed_costs(self, forward):
                inputs += self.recomputed_share * cost
        return PassCosts(forward, inputs, self.trained_share * weights)

    def update_s(self, process: PipelineRank) -> float:
        """Return the time in seconds that a process needs for clipping and the optimizer step."""
        num_bytes = math.fsum(mechanism.update_bytes(process) for mechanism in self.mechanisms)
        return num_bytes / self.rates.memory_bytes_per_s

    def data_parallel_s(self, process: PipelineRank, computing_s: float) -> float:
        """Return the time in seconds that data-parallel communication adds to the step."""
        steps = self.plan.steps_between_exchanges
        num_collectives = (
            1 / steps if steps else (process.num_blocks + 1.0) * self.exchanges_per_step
        )
        kernels_s = copies_s = 0.0
        for mechanism in self.mechanisms:
            for (axis, operation), size in mechanism.data_parallel_traffic(process).items():
                if self.mesh[axis] == 1:
                    continue
                seconds = self.collective_s(axis, operation, size, num_collectives)
                if operation == "copy":  # which needs no kernel
                    copies_s += seconds
                else:
                    kernels_s += seconds
        total_s = kernels_s + copies_s
        # These collectives do not overlap, because they run after the pipeline's passes or after
        # the update.
        if self.pp > 1 or steps:
            return total_s
        interfering_s = FITTED.interference * kernels_s + FITTED.copy_interference * copies_s
        if total_s <= computing_s:
            return interfering_s
        overlapped = computing_s / total_s
        return overlapped * interfering_s + (1 - overlapped) * total_s

    def launch_s(self) -> dict[Step, float]:
        """Return the time in seconds that the host needs to launch each operation on each stage."""
        shares = dict.fromkeys("FIW", 1 / 3) | {"B": 2 / 3}
        return {
            (kind, stage): self.host_block_s() * number * share + self.rates.host.exchange
            for stage, number in enumerate(self.plan.stages.blocks_per_stage)
            for kind, share in shares.items()
        }

    def host_block_s(self) -> float:
        """Return the time in seconds that the host needs to launch the forward and backward passes
        of one block, including the block's collectives."""
        exchanges = sum(mechanism.num_launches(self) for mechanism in self.mechanisms)
        return float(self.rates.host.block + exchanges * self.rates.host.exchange)

    def host_step_s(self, process: PipelineRank) -> tuple[float, float]:
        """Return (seconds of host work outside the blocks, seconds that the GPU waits for
        hooks)."""
        host = self.rates.host
        calls = [mechanism.hook_costs(process, self.rates) for mechanism in self.mechanisms]
        hook_calls, wait_s = map(sum, zip(*calls, strict=True))
        num_tensors = sum(share * sizes.kind.tensors for share, sizes in self.by_kind())
        seconds_per_call = host.tensor * num_tensors * process.num_blocks
        return host.step + seconds_per_call * hook_calls, wait_s
