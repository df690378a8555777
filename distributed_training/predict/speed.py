"""Seconds of one optimizer step, by what they go to. No torch import.

A pipeline is simulated in its schedule's own order. Launching from the host runs beside the GPU:
the slower of both counts, unless a CUDA graph launches all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distributed_training.plan.plan import Plan
from distributed_training.predict.constants import FITTED
from distributed_training.predict.kernels import Work
from distributed_training.predict.orders import length_of, simulate
from distributed_training.predict.rates import Rates
from distributed_training.predict.stages import find_orders
from distributed_training.predict.traffic import formulas_by_place

# Bytes a parameter that a step on a disk reads and writes: fp32 weights and both moments 12 + 12,
# gradients 4 + 4, rounded weights 2 for each pass and 2 when they are new.
SWAPPED_BYTES = 38


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
        seconds = {key: float(cost.sum()) for key, cost in costs.items()}
        message = self.message() if self.pp > 1 else 0.0
        on_gpu = length_of(simulate(orders, seconds, ranks, message))
        busy = [sum(seconds[kind, stage] for kind, stage, _ in order) for order in orders]
        phase = on_gpu
        if self.rates.on_host:  # while a stage waits, others have its share of a core
            on_gpu = max(sum(busy) / len(busy), on_gpu * self.rates.core_share)
            phase = on_gpu
        elif self.pp > 1 and not self.graph:  # the host of each stage launches its operations
            phase = length_of(simulate(orders, seconds, ranks, message, self._launching()))
        slowest = busy.index(max(busy))
        spent = np.sum([costs[kind, stage] for kind, stage, _ in orders[slowest]], axis=0).tolist()
        return self._add_up(spent, slowest, on_gpu, phase)

    def _launching(self) -> dict[tuple[str, int], float]:
        """Seconds in which the host launches each kind of operation of each stage."""
        shares = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
        return {
            (kind, stage): self._host_block() * number * share + self.rates.host.exchange
            for stage, number in enumerate(self.plan.layout.blocks_per_stage)
            for kind, share in shares.items()
        }

    def _add_up(self, spent: Sequence[float], place: int, on_gpu: float, phase: float) -> StepTime:
        arithmetic, memory, network = spent
        computing = sum(spent)
        data = self._data_parallel(place, computing)
        update = self.update(self.processes[place])
        step_host, waits = self._host_step(place)
        launching = 0.0
        if not self.graph:
            blocks = max(process.num_blocks for process in self.processes)
            launching = self._host_block() * blocks * self.micro_batches + step_host
        gpu = phase + data + update
        if self.rates.on_host:
            seconds = gpu + launching + waits
        else:
            seconds = max(gpu, launching) + waits
        offload, disk = self._away()
        seconds += offload + disk
        parts = {
            "arithmetic": arithmetic,
            "memory": memory + update,
            "network": network + data,
            "bubble": max(0.0, on_gpu - computing) if self.pp > 1 else 0.0,
            "host RAM": offload,
            "disk": disk,
        }
        parts["host"] = max(0.0, seconds - sum(parts.values()))
        listed = sum(parts.values())
        if listed > seconds:  # the slowest stage's, which others' beat
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
        beside = min(seconds, computing)
        return FITTED.interference * beside + seconds - beside

    def _away(self) -> tuple[float, float]:
        """Seconds of an optimizer on the host, and of files."""
        strategy = self.strategy
        share = max(process.learning for process in self.processes) / self.shards
        if strategy.swaps_to_disk:
            together = share * min(self.node_size, self.plan.num_processes)  # one disk a node
            return 0.0, SWAPPED_BYTES * together / self.rates.disk_bytes
        if strategy.steps_on_host:
            together = share * min(self.node_size, self.shards)
            return self.rates.host_adam_s * together, 0.0
        return 0.0, 0.0

    def _host_block(self) -> float:
        """Seconds to launch one block, forward and backward, and what it exchanges."""
        host = self.rates.host
        exchanges = 0
        if self.tp > 1:
            exchanges += 1
        if self.strategy.zero_stage == 3:  # gathered for either pass; gradients where shared
            exchanges += 2 if self.shards == 1 else 3
        elif self.plan.uses_fsdp:
            exchanges += 1
        return float(host.block + exchanges * host.exchange)

    def _host_step(self, place: int) -> tuple[float, float]:
        """(seconds of launching besides blocks, seconds that the GPU waits for it)."""
        host = self.rates.host
        strategy = self.strategy
        blocks = self.processes[place].num_blocks
        tensors = host.tensor * self.size.block_tensors * blocks
        if not strategy.traits.takes_deepspeed_json:
            return host.step + (tensors if self.plan.num_processes > 1 else 0.0), 0.0
        wait = host.wait * blocks
        if strategy.zero_stage == 3:
            return host.step, wait if self.shards == 1 else 2 * wait
        # A hook for each tensor runs in every micro-batch, whether or not it exchanges anything.
        return host.step + tensors * self.micro_batches, wait / self.shards
