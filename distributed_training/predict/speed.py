"""Estimate the duration of one optimizer step in seconds, and the step's main bottleneck. This
module does not import torch.

Matrix multiplications take FLOPs / rate, and attention's rate grows with the sequence length.
Element-wise operations take bytes / bandwidth, and each kernel takes time to start. A collective
takes its latency plus (bytes sent in a ring) / bandwidth. A pipeline is simulated in its schedule's
order. The host launches kernels while the GPU computes, so the slower of the two counts. With a
CUDA graph, the host's time does not count."""

from typing import NamedTuple

import numpy as np

from distributed_training.plan.orders import Step, find_orders
from distributed_training.plan.plan import Draft
from distributed_training.predict.costs import used_by
from distributed_training.predict.costs.loss import head
from distributed_training.predict.costs.pp import message_s
from distributed_training.predict.mechanism import Cost, Passes, Place, Timing, all_places
from distributed_training.predict.rates import FITTED, Rates
from distributed_training.predict.simulate import flow, length_of, simulate


class StepTime(NamedTuple):
    """Time of a step in seconds, and the main bottleneck of the slowest process."""

    seconds: float
    bound_by: str  # arithmetic, memory, network, bubble, host RAM, disk or host


def estimate_step(plan: Draft, rates: Rates) -> StepTime:
    """Estimate the time of one step."""
    work = Work(plan, rates)
    graph = work.config.cuda_graphs is True  # one launch per step
    processes = all_places(plan)
    costs = work.operations()
    orders = find_orders(plan)
    seconds = {key: float(cost.sum()) for key, cost in costs.items()}
    gives = flow(plan.layout.ranks, message_s(work))
    on_gpu = length_of(simulate(orders, seconds, gives))
    busy = [sum(seconds[kind, stage] for kind, stage, _ in order) for order in orders]
    here = plan.processes_here
    if rates.on_host:  # while a stage waits, other stages use its cores
        on_gpu = max(sum(busy) / len(busy), on_gpu * min(1.0, plan.machine.num_cpus / here))
    phase = on_gpu
    if work.pp > 1 and not (graph or rates.on_host):  # each stage's host launches its operations
        phase = length_of(simulate(orders, seconds, gives, work.launching()))
    slowest = busy.index(max(busy))
    process = processes[slowest]
    spent = np.sum([costs[kind, stage] for kind, stage, _ in orders[slowest]], axis=0).tolist()
    computing = sum(spent)
    data = work.data_parallel(process, computing)
    update = work.update(process)
    step_host, waits = work.host_step(process)
    launching = 0.0
    if not graph:
        blocks = max(other.num_blocks for other in processes)
        launching = work.host_block() * blocks * work.micro_batches + step_host
    gpu = phase + data + update
    learning = max(other.learning for other in processes)
    off_device = {"host RAM": 0.0, "disk": 0.0}
    for mechanism in work.mechanisms:
        off_device |= mechanism.off_device(work, learning)
    total = gpu + launching if rates.on_host else max(gpu, launching)
    total += waits
    total += sum(off_device.values())
    parts = dict(zip(("arithmetic", "memory", "network"), spent, strict=True))
    parts["memory"] += update
    parts["network"] += data
    parts["bubble"] = max(0.0, on_gpu - computing) if work.pp > 1 else 0.0
    parts |= off_device
    parts["host"] = max(0.0, total - sum(parts.values()))
    return StepTime(total, max(parts, key=lambda name: parts[name]))


class Work(Timing):
    """Times and costs of the individual parts of a plan's step."""

    def __init__(self, plan: Draft, rates: Rates) -> None:
        super().__init__(plan, rates)
        self.mechanisms = used_by(plan)

    def operations(self) -> dict[Step, Cost]:
        """Return the cost of each kind of operation on each stage, for one micro-batch."""
        forward, inputs, weights = self.block()
        blocks = self.plan.layout.blocks_per_stage
        costs = {}
        for stage, number in enumerate(blocks):
            costs["F", stage] = number * forward
            costs["I", stage] = number * inputs
            costs["W", stage] = number * weights  # only for the blocks' matrices
            if stage == len(blocks) - 1:
                of_head = head(self)
                costs["F", stage] += of_head[0]
                costs["I", stage] += of_head[1] + of_head[2]
            costs["B", stage] = costs["I", stage] + costs["W", stage]
        return costs

    def block(self) -> Passes:
        """Return the costs of one block for one micro-batch."""
        costs = sum((mechanism.block(self) for mechanism in self.mechanisms), np.zeros((3, 3)))
        forward, inputs, weights = costs
        weights += self.moving(self._gradient_bytes())
        weights *= self.trained
        for mechanism in self.mechanisms:
            for cost in mechanism.again(self, forward):
                inputs += cost
        return costs

    def _gradient_bytes(self) -> float:
        """Return the number of bytes that are read and written per micro-batch for a block's
        gradients and rounded weights."""
        whole = self.size.block_parameters
        split = self.size.block_parameters_split
        per_parameter = sum(mechanism.moved(self) for mechanism in self.mechanisms)
        return per_parameter * (whole - split + split / self.tp)

    def update(self, process: Place) -> float:
        """Return the time in seconds that a process needs for clipping and the optimizer step."""
        rate = self.rates.update_memory_bytes or self.rates.memory_bytes
        return sum(mechanism.updated(process) for mechanism in self.mechanisms) / rate

    def data_parallel(self, process: Place, computing: float) -> float:
        """Return the time in seconds that data-parallel exchanges add to the computation time."""
        steps = self.plan.steps_between_exchanges
        times = 1 / steps if steps else (process.num_blocks + 1.0) * self.rounds
        seconds = sum(
            self.collective(axis, kind, size, times)
            for mechanism in self.mechanisms
            for (axis, kind), size in mechanism.exchange(process).items()
            if self.mesh[axis] > 1
        )
        if self.pp > 1 or steps:  # no overlap: they run after the pipeline phase or the update
            return seconds
        overlapped = min(seconds, computing)
        return FITTED.interference * overlapped + seconds - overlapped

    def launching(self) -> dict[Step, float]:
        """Return the time in seconds that the host needs to launch each operation on each stage."""
        shares = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
        return {
            (kind, stage): self.host_block() * number * share + self.rates.host.exchange
            for stage, number in enumerate(self.plan.layout.blocks_per_stage)
            for kind, share in shares.items()
        }

    def host_block(self) -> float:
        """Return the time in seconds that the host needs to launch the forward and backward passes
        of one block, including the block's exchanges."""
        exchanges = sum(mechanism.launches(self) for mechanism in self.mechanisms)
        return float(self.rates.host.block + exchanges * self.rates.host.exchange)

    def host_step(self, process: Place) -> tuple[float, float]:
        """Return (seconds of host work outside the blocks, seconds that the GPU waits for
        hooks)."""
        host = self.rates.host
        calls = [mechanism.hooks(process, self.rates) for mechanism in self.mechanisms]
        visits, waits = map(sum, zip(*calls, strict=True))
        tensors = host.tensor * self.size.block_tensors * process.num_blocks
        return host.step + tensors * visits, waits
