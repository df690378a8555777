"""Seconds of one optimizer step, by what they go to. No torch import.

A pipeline is simulated in its schedule's own order. Launching from the host runs beside the GPU:
the slower of both counts, unless a CUDA graph launches all.
"""

from __future__ import annotations

from dataclasses import dataclass

from distributed_training.plan.plan import Plan
from distributed_training.predict.constants import FITTED
from distributed_training.predict.kernels import Cost, Work
from distributed_training.predict.orders import simulate
from distributed_training.predict.rates import Rates
from distributed_training.predict.stages import find_orders
from distributed_training.predict.traffic import formulas_by_place


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step, and what they are spent on by the slowest process."""

    seconds: float
    parts: dict[str, float]  # arithmetic, memory, network, bubble, host, host RAM, disk

    @property
    def bound_by(self) -> str:
        """What takes most of it."""
        return max(self.parts, key=lambda name: self.parts[name])


def estimate_step(plan: Plan, rates: Rates) -> StepTime:
    """The time of one step."""
    return _Step(plan, rates).estimate()


class _Step(Work):
    def __init__(self, plan: Plan, rates: Rates) -> None:
        super().__init__(plan, rates)
        self.processes = formulas_by_place(plan)
        self.graph = plan.config.cuda_graphs is True  # one launch a step

    def estimate(self) -> StepTime:
        costs = self.operations()
        orders = find_orders(self.plan)
        ranks = self.plan.layout.ranks
        seconds = {key: cost.total for key, cost in costs.items()}
        message = self.message() if self.pp > 1 else 0.0
        on_gpu, busy = simulate(orders, seconds, ranks, message)
        phase = on_gpu
        if self.rates.on_host:  # while a stage waits, others have its share of a core
            on_gpu = max(sum(busy) / len(busy), on_gpu * self.rates.core_share)
            phase = on_gpu
        elif self.pp > 1 and not self.graph:  # the host of each stage launches its operations
            phase, _ = simulate(orders, seconds, ranks, message, self._launching())
        slowest = max(range(self.pp), key=lambda place: busy[place])
        total = sum((costs[kind, stage] for kind, stage, _ in orders[slowest]), start=Cost())
        return self._add_up(total, slowest, on_gpu, phase)

    def _launching(self) -> dict[tuple[str, int], float]:
        """Seconds in which the host launches each kind of operation of each stage."""
        forward = FITTED.forward_launches
        shares = {"F": forward, "B": 1 - forward, "I": forward, "W": 1 - 2 * forward}
        return {
            (kind, stage): self._host_block() * number * share + self.rates.host.operation
            for stage, number in enumerate(self.plan.layout.blocks_per_stage)
            for kind, share in shares.items()
        }

    def _add_up(self, total: Cost, place: int, on_gpu: float, phase: float) -> StepTime:
        data = self._data_parallel(place, total.total)
        update = self.update(self.processes[place])
        step_host, waits = self._host_step(place)
        launching = 0.0
        if not self.graph:
            blocks = max(process.num_blocks for process in self.processes)
            launching = self._host_block() * blocks * self.micro_batches + step_host
        gpu = phase + data + update
        if self.rates.on_host:
            if self.pp > 1:
                launching += 2 * self.micro_batches * self.rates.host.operation
            seconds = gpu + launching + waits
        else:
            seconds = max(gpu, launching) + waits
        offload, disk = self._away()
        seconds += offload + disk
        parts = {
            "arithmetic": total.arithmetic,
            "memory": total.memory + update,
            "network": total.network + data,
            "bubble": max(0.0, on_gpu - total.total) if self.pp > 1 else 0.0,
            "host RAM": offload,
            "disk": disk,
        }
        parts["host"] = max(0.0, seconds - sum(parts.values()))
        listed = sum(parts.values())
        starved = max(gpu, launching) > FITTED.starved * (on_gpu + data + update)
        if starved and not self.rates.on_host:  # the GPU waits for launches
            parts["host"] = max(gpu, launching)
        elif listed > seconds:  # the slowest stage's, which others' beat
            parts = {name: part * seconds / listed for name, part in parts.items()}
        return StepTime(seconds=seconds, parts=parts)

    def _data_parallel(self, place: int, computing: float) -> float:
        """What exchanges of gradients and gathers of parameters add to computing beside them."""
        process = self.processes[place]
        every = process.steps_between_exchanges
        # After the pipeline's phase, or the update; else beside each micro-batch's passes.
        apart = self.pp > 1 or bool(every)
        times = float(process.num_blocks + 1)
        if every:  # all at once
            times = 1 / every
        elif self.pp == 1:
            times *= self.micro_batches
        seconds = sum(
            self.collective(axis, kind, size, times)
            for (axis, kind), size in process.data().items()
            if self.mesh[axis] > 1
        )
        if apart:
            return seconds
        beside = min(seconds, computing * FITTED.overlapped_share)
        return FITTED.interference * beside + seconds - beside

    def _away(self) -> tuple[float, float]:
        """Seconds of an optimizer on the host, and of files."""
        strategy = self.strategy
        share = self.plan.layout.num_learning / self.shards
        if strategy.swaps_to_disk:
            together = share * min(self.node_size, self.plan.num_processes)  # one disk a node
            return 0.0, FITTED.swapped_bytes * together / self.rates.disk_bytes
        if strategy.steps_on_host:
            together = share * min(self.node_size, self.shards)
            return self.rates.host_adam_s * together, 0.0
        return 0.0, 0.0

    def _host_block(self) -> float:
        """Seconds to launch one block, forward and backward."""
        host = self.rates.host
        config = self.plan.config
        cost = host.block
        if not config.compile:
            split = self.plan.schedule.splits_backward
            cost = host.split_block if split else host.eager_block
        if self.tp > 1:
            cost += host.tensor_parallel
        if self.strategy.zero_stage == 3:
            cost += host.zero3_block
            if self.shards > 1:
                cost += host.zero3_gather
        elif self.plan.uses_fsdp:
            cost += host.fsdp_unit
        return cost

    def _host_step(self, place: int) -> tuple[float, float]:
        """(seconds of launching besides blocks, seconds that the GPU waits for it)."""
        host = self.rates.host
        strategy = self.strategy
        process = self.processes[place]
        blocks = process.num_blocks
        tensors = self.size.block_tensors * blocks
        if not strategy.traits.takes_deepspeed_json:
            each = 0.0
            if self.plan.uses_ddp:
                each += host.ddp_tensor
            if self.plan.uses_fsdp or self.tp > 1:
                each += host.dtensor
            if self.pp > 1 and not self.plan.uses_fsdp:
                each += host.stage_tensor
            return host.step + each * tensors, 0.0
        if strategy.zero_stage == 3:
            wait = host.zero3_shared_wait if self.shards > 1 else host.zero3_wait
            if strategy.swaps_to_disk:
                wait += host.swapped_block
            return host.step, wait * blocks
        # A hook for each tensor runs in every micro-batch, whether or not it exchanges anything.
        count = self.micro_batches
        wait = host.zero_wait * blocks * count + host.zero_update * tensors / self.shards
        return host.step + host.zero_tensor * tensors * count, wait
