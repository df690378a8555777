"""Seconds of one optimizer step, by what they go to. No torch import.

A pipeline is simulated in its schedule's own order. Launching from the host runs beside the GPU:
the slower of both counts, unless a CUDA graph launches all.
"""

from __future__ import annotations

from dataclasses import dataclass

from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology
from distributed_training.predict.kernels import Cost, Work
from distributed_training.predict.orders import simulate
from distributed_training.predict.rates import Rates
from distributed_training.predict.stages import find_orders
from distributed_training.predict.traffic import Formulas

INTERFERENCE = 0.5  # share of a collective's time that computing beside it loses
DISK_BYTES = 40  # a parameter and step: what infinity reads and writes (h200-x1-to-host-and-disk)
HOST_SHARES = {"F": 0.35, "B": 0.65, "I": 0.35, "W": 0.3}  # of launching a block
BOUNDS = {
    "arithmetic": "arithmetic", "memory": "memory", "network": "network",
    "bubble": "bubble", "host": "host", "offload": "host RAM", "disk": "disk",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step, and what they are spent on by the slowest process."""

    seconds: float
    parts: dict[str, float]  # keys of BOUNDS

    @property
    def bound_by(self) -> str:
        """What takes most of it."""
        return BOUNDS[max(self.parts, key=lambda name: self.parts[name])]


def estimate_step(plan: Plan, rates: Rates, *, node_size: int | None = None) -> StepTime:
    """The time of one step; `node_size`: processes of a node, where there are several."""
    return _Step(plan, rates, node_size or plan.processes_here).estimate()


class _Step:
    def __init__(self, plan: Plan, rates: Rates, node_size: int) -> None:
        self.plan, self.rates, self.work = plan, rates, Work(plan, rates, node_size)
        self.traits, self.pp, self.count = plan.strategy.traits, self.work.pp, self.work.count
        self.processes = [self._formulas(place) for place in range(self.pp)]
        self.graph = plan.config.cuda_graphs is True  # one launch a step

    def _formulas(self, place: int) -> Formulas:
        count = self.plan.num_processes
        rank = place * (count // self.pp)
        topology = Topology(
            world_size=count, rank=rank, local_rank=0, device_type="cuda", **self.plan.mesh
        )
        return Formulas(self.plan, topology)

    def estimate(self) -> StepTime:
        costs = self.work.operations()
        host = {
            (kind, stage): self._host_block() * number * share
            + self.rates.host.operation * (self.pp > 1)
            for stage, number in enumerate(self.plan.layout.blocks_per_stage)
            for kind, share in HOST_SHARES.items()
        }
        orders = find_orders(self.plan)
        ranks = self.plan.layout.ranks
        seconds = {key: cost.total for key, cost in costs.items()}
        message = self.work.message() if self.pp > 1 else 0.0
        waiting = {} if self.graph or self.rates.on_host else host
        phase, busy = simulate(orders, seconds, ranks, message, waiting)
        on_gpu, _ = simulate(orders, seconds, ranks, message) if waiting else (phase, busy)
        if self.rates.on_host:  # while a stage waits, others have its share of a core
            phase = on_gpu = max(sum(busy) / len(busy), phase * self.rates.core_share)
        slowest = max(range(self.pp), key=lambda place: busy[place])
        total = Cost()
        for kind, stage, _ in orders[slowest]:
            total += costs[kind, stage]
        return self._add_up(total, slowest, on_gpu, phase)

    def _add_up(self, total: Cost, place: int, on_gpu: float, phase: float) -> StepTime:
        data, update = (
            self._data_parallel(place, total.total),
            self.work.update(self.processes[place]),
        )
        step_host, waits = self._host_step(place)
        blocks = max(process.num_blocks for process in self.processes)
        launching = self._host_block() * blocks * self.count + step_host
        if self.pp == 1:  # the host runs ahead over the whole step
            phase = on_gpu
        gpu, launching = phase + data + update, launching * (not self.graph)
        if self.rates.on_host:
            launching += 2 * self.count * self.rates.host.operation * (self.pp > 1)
            seconds = gpu + launching + waits
        else:
            seconds = max(gpu, launching) + waits
        offload, disk = self._away()
        seconds += offload + disk
        bubble = max(0.0, on_gpu - total.total) if self.pp > 1 else 0.0
        parts = {
            "arithmetic": total.arithmetic,
            "memory": total.memory + update,
            "network": total.network + data,
            "bubble": bubble,
            "offload": offload,
            "disk": disk,
        }
        parts["host"] = max(0.0, seconds - sum(parts.values()))
        starved = max(gpu, launching) > 1.15 * (on_gpu + data + update)
        if starved and not self.rates.on_host:  # the GPU waits for launches
            parts["host"] = max(gpu, launching)
        elif (listed := sum(parts.values())) > seconds:  # the slowest stage's, which others' beat
            parts = {name: part * seconds / listed for name, part in parts.items()}
        return StepTime(seconds=seconds, parts=parts)

    def _data_parallel(self, place: int, computing: float) -> float:
        """What exchanges of gradients and gathers of parameters add to computing beside them."""
        process = self.processes[place]
        deepspeed = self.traits.takes_deepspeed_json
        found = process.zero() if deepspeed else process.data()
        times: float = (process.num_blocks + 1) * max(1, self.count * (self.pp == 1))
        if process.every:  # all at once, when nothing else runs
            times = 1 / process.every
        seconds = sum(
            self.work.collective(axis, kind, size, times)
            for (axis, kind), size in found.items()
            if self.plan.mesh[axis] > 1
        )
        if self.pp > 1 or process.every:  # after the pipeline's phase, or the update
            return seconds
        beside = min(seconds, computing * 0.9)
        return INTERFERENCE * beside + seconds - beside

    def _away(self) -> tuple[float, float]:
        """Seconds of an optimizer on the host, and of files."""
        strategy, share = self.plan.strategy, self.plan.layout.num_parameters / self.work.shards
        if strategy.swaps_to_disk:
            together = share * min(self.work.node_size, self.plan.num_processes)  # one disk a node
            return 0.0, DISK_BYTES * together / self.rates.disk_bytes
        if strategy.steps_on_host:
            return self.rates.host_adam_s * share * min(self.work.node_size, self.work.shards), 0.0
        return 0.0, 0.0

    def _host_block(self) -> float:
        """Seconds to launch one block, forward and backward."""
        host, split = self.rates.host, self.plan.schedule.splits_backward and self.pp > 1
        cost = host.block if self.plan.config.compile else host.eager_block
        cost = host.split_block if split and not self.plan.config.compile else cost
        cost += host.tensor_parallel * (self.work.tp > 1)
        if self.plan.strategy.zero_stage == 3:
            cost += host.zero3_block + host.zero3_gather * (self.work.shards > 1)
        elif self.plan.num_processes != self.work.copies and not self.traits.rounded_weights:
            cost += host.fsdp_unit * (self.work.shards * self.work.copies > 1)
        return cost

    def _host_step(self, place: int) -> tuple[float, float]:
        """(seconds of launching besides blocks, seconds that the GPU waits for it)."""
        host, blocks = self.rates.host, self.processes[place].num_blocks
        tensors = 12 * blocks  # parameter tensors
        if not self.traits.takes_deepspeed_json:
            count, copies = self.plan.num_processes, self.work.copies
            alone = copies == count > 1
            sharded = self.work.shards * copies > 1 and not alone
            each = host.ddp_tensor * alone + host.dtensor * (sharded or self.work.tp > 1)
            each += host.stage_tensor * (self.pp > 1 and not sharded)
            return host.step + each * tensors, 0.0
        if self.plan.strategy.zero_stage == 3:
            wait = host.zero3_shared_wait if self.work.shards > 1 else host.zero3_wait
            wait += host.swapped_block * self.plan.strategy.swaps_to_disk
            return host.step, wait * blocks
        wait = host.zero_wait * blocks + host.zero_update * tensors / self.work.shards
        return host.step + host.zero_tensor * tensors, wait
