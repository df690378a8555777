"""Seconds of one optimizer step, by what they go to. No torch import.

Matrix products take FLOPs / rate, element-wise work bytes / bandwidth, attention FLOPs at a rate
that grows with the sequence, every kernel a little to start. A pipeline is simulated in its
schedule's own order. Launching from the host runs beside the GPU: the slower of both counts, unless
a CUDA graph launches all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distributed_training.plan.orders import build_orders, simulate
from distributed_training.plan.plan import Plan
from distributed_training.plan.rates import Rates
from distributed_training.plan.topology import Topology
from distributed_training.plan.traffic import Formulas, sent_bytes

BACKWARD_ATTENTION = 2.5  # FLOPs of its backward pass by those of the forward one
# Values of the arithmetic's width that element-wise kernels read and write, a token and unit of
# hidden size of a compiled block: (between split layers, in them), forward and backward.
FORWARD_VALUES, BACKWARD_VALUES = (10, 10), (14, 25)
EAGER = 1.95  # times as many without torch.compile (pp4 1f1b m16 of gpt2-medium, both ways)
KERNELS = {"F": 9, "B": 22}  # of a compiled block
LOGIT_BYTES = {"compiled": 16, "eager": 50, "split": 30}  # read and written, a logit
GATHERED_COPIES = 2  # a gathered or scattered tensor is read and written once more along tokens
TILE = (128, 256)  # of a matrix product's result
UPDATE_BYTES, ROUNDED_UPDATE_BYTES = 40, 60  # a parameter: AdamW, clipping; and copies
ACCUMULATED_BYTES, CAST_BYTES = 10, 6  # a parameter and micro-batch
INTERFERENCE = 0.5  # share of a collective's time that computing beside it loses
DISK_BYTES = 40  # a parameter and step: what infinity reads and writes (h200-x1-to-host-and-disk)
BOUNDS = {
    "arithmetic": "arithmetic", "memory": "memory traffic", "network": "network",
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


@dataclass(frozen=True, slots=True)
class _Cost:
    """Seconds on a GPU: arithmetic, memory traffic, network."""

    arithmetic: float = 0.0
    memory: float = 0.0
    network: float = 0.0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(
            self.arithmetic + other.arithmetic,
            self.memory + other.memory,
            self.network + other.network,
        )

    def times(self, factor: float) -> _Cost:
        return _Cost(self.arithmetic * factor, self.memory * factor, self.network * factor)

    @property
    def total(self) -> float:
        return self.arithmetic + self.memory + self.network


def estimate_step(plan: Plan, rates: Rates, *, node_size: int | None = None) -> StepTime:
    """The time of one step; `node_size`: processes of a node, where there are several."""
    return _Step(plan, rates, node_size or plan.processes_here).estimate()


class _Step:
    def __init__(self, plan: Plan, rates: Rates, node_size: int) -> None:
        self.plan, self.config, self.size, self.rates = plan, plan.config, plan.size, rates
        self.node_size, self.traits = node_size, plan.strategy.traits
        self.width = 4 if plan.config.precision == "fp32" else 2
        self.tp, self.pp = plan.mesh["tp"], plan.mesh["pp"]
        self.shards, self.copies = plan.mesh["dp_shard"], plan.mesh["dp_replicate"]
        self.count = plan.batch.num_microbatches
        self.tokens = plan.batch.micro_batch_size * plan.config.max_length
        self.between = 1 / self.tp if plan.config.sequence_parallel else 1.0
        self.eager = 1.0 if plan.config.compile else EAGER
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
        forward, backward, weights = self._block()
        head = self._head()
        costs, host = {}, {}
        blocks = self.plan.layout.blocks_per_stage
        for stage, number in enumerate(blocks):
            last = stage == len(blocks) - 1
            inputs, rest = backward.times(number), weights.times(number)
            costs["F", stage] = forward.times(number) + head[0].times(last)
            costs["I", stage] = inputs + head[1].times(last)
            costs["W", stage] = rest + head[2].times(last)
            if stage == 0:  # it has no inputs' gradients: W does all
                costs["W", 0] += costs["I", 0]
                costs["I", 0] = _Cost()
            costs["B", stage] = costs["I", stage] + costs["W", stage]
            each = self._host_block() * number
            shares = {"F": 0.35, "B": 0.65, "I": 0.35, "W": 0.3}
            for kind, share in shares.items():
                host[kind, stage] = each * share
        orders = build_orders(self.config.pipeline_schedule, self.pp, self.count)
        ranks = self.plan.layout.ranks
        seconds = {key: cost.total for key, cost in costs.items()}
        message = self._message() if self.pp > 1 else 0.0
        waiting = {} if self.graph else host
        phase, busy = simulate(orders, seconds, ranks, message, waiting)
        on_gpu, _ = simulate(orders, seconds, ranks, message) if waiting else (phase, busy)
        slowest = max(range(self.pp), key=lambda place: busy[place])
        total = _Cost()
        for kind, stage, _ in orders[slowest]:
            total += costs[kind, stage]
        return self._add_up(total, slowest, on_gpu, phase)

    def _add_up(self, total: _Cost, place: int, on_gpu: float, phase: float) -> StepTime:
        data, update = self._data_parallel(place, total.total), self._update(place)
        step_host, waits = self._host_step(place)
        gpu = phase + data + update
        launching = 0.0 if self.graph else step_host
        if self.pp == 1:  # the host runs ahead over the whole step
            gpu = on_gpu + data + update
            blocks = self._host_block() * self.size.num_layers * self.count
            launching = 0.0 if self.graph else blocks + step_host
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
        if seconds > 1.15 * (on_gpu + data + update) + offload + disk:
            parts["host"] = max(parts["host"], seconds)  # the GPU waits for launches
        return StepTime(seconds=seconds, parts=parts)

    def _gemm(self, m: float, k: float, n: float) -> _Cost:
        rates = self.rates
        flops = rates.fp32_gemm_flops if self.width == 4 else rates.gemm_flops
        # Tensor cores work on whole tiles of the result.
        short, long = TILE
        tiles = min(_up(m, short) * _up(n, long), _up(m, long) * _up(n, short))
        return _Cost(2 * k * tiles / flops)

    def _traffic(self, values: tuple[int, int], kernels: int) -> _Cost:
        """Element-wise work of a block; its kernels."""
        count = values[0] * self.between + values[1] / self.tp
        moved = count * self.eager * self.width * self.tokens * self.size.hidden_size
        return _Cost(
            0, moved / self.rates.memory_bytes + kernels * self.eager * self.rates.kernel_s
        )

    def _block(self) -> tuple[_Cost, _Cost, _Cost]:
        """(forward, backward for inputs, backward for weights) of one block and micro-batch."""
        d, tp, tokens = self.size.hidden_size, self.tp, self.tokens
        hidden = (self.size.block_matrix_parameters / d**2 - 4) / 2 * d
        products = [(d, 3 * d / tp), (d / tp, d), (d, hidden / tp), (hidden / tp, d)]
        forward, inputs, weights = _Cost(), _Cost(), _Cost()
        for k, n in products:
            forward += self._gemm(tokens, k, n)
            inputs += self._gemm(tokens, n, k)
            weights += self._gemm(k, tokens, n)
        length, rates = self.config.max_length, self.rates
        best = rates.attention_flops if self.width == 2 else rates.fp32_gemm_flops / 2
        rate = best * length / (length + rates.attention_half)
        attention = 2 * tokens * length * d / tp / rate
        whole, split = self.size.block_parameters, self.size.block_parameters_split
        held = whole - split + split / tp
        per_batch = ACCUMULATED_BYTES * (self.count > 1 or self.pp > 1) + self._casts()
        forward += self._traffic(FORWARD_VALUES, KERNELS["F"]) + _Cost(attention)
        inputs += self._traffic(BACKWARD_VALUES, KERNELS["B"])
        inputs += _Cost(BACKWARD_ATTENTION * attention)
        weights += _Cost(0, per_batch * held / rates.memory_bytes)
        exchange = self._tensor_parallel()
        forward, inputs = forward + exchange, inputs + exchange
        mode = self.config.activation_checkpointing
        if mode == "full":
            inputs += forward
        elif mode == "selective":  # norms, GELU and sums again
            inputs += self._traffic(FORWARD_VALUES, KERNELS["F"]) + exchange.times(0.5)
        return forward, inputs, weights

    def _casts(self) -> int:
        """Bytes a parameter for rounding weights and widening gradients in every micro-batch,
        where nobody keeps rounded weights."""
        native = not self.traits.rounded_weights
        alone = self.copies == self.plan.num_processes or self.plan.num_processes == self.tp
        return 2 * CAST_BYTES * (native and alone and self.width == 2)

    def _head(self) -> tuple[_Cost, _Cost, _Cost]:
        """As `_block`, of output layer and loss."""
        d, vocabulary = self.size.hidden_size, self.size.padded_vocab_size / self.tp
        kind = "split" if self.tp > 1 else "compiled" if self.config.compile else "eager"
        moved = LOGIT_BYTES[kind] * self.width / 2 * self.tokens * vocabulary
        traffic = _Cost(0, moved / self.rates.memory_bytes)
        products = (
            self._gemm(self.tokens, d, vocabulary),
            self._gemm(self.tokens, vocabulary, d),
            self._gemm(d, self.tokens, vocabulary),
        )
        return products[0] + traffic.times(0.4), products[1] + traffic.times(0.6), products[2]

    def _collective(self, axis: str, kind: str, tensor_bytes: float, times: float) -> float:
        """Seconds of `times` collectives of so many bytes together over an axis."""
        members = self.plan.mesh[axis]
        sent = sent_bytes(kind, 1, members) * tensor_bytes
        # tp varies fastest with the rank. Where a group spans nodes, each of its members in a node
        # has an adapter, and NCCL's rings use all of them.
        faster = ["tp", "dp_shard", "dp_replicate", "pp"]
        stride = math.prod(self.plan.mesh[name] for name in faster[: faster.index(axis)])
        together = min(members, max(1, self.node_size // stride))
        rate, latency = self.rates.link_bytes, self.rates.link_latency_s
        if together < members:
            rate = min(rate, self.rates.network_bytes * together)
            latency *= 2
        return times * latency * max(1, members - 1) ** 0.5 + sent / rate

    def _tensor_parallel(self) -> _Cost:
        """Of one block, one way: two gathers and two scatters, or two all-reduces."""
        if self.tp == 1:
            return _Cost()
        hidden = self.tokens * self.size.hidden_size * self.width
        if self.config.sequence_parallel:
            seconds = self._collective("tp", "all_gather", 4 * hidden, 4)
            copied = 4 * GATHERED_COPIES * hidden / self.rates.memory_bytes
            return _Cost(0, copied, seconds)
        return _Cost(0, 0, self._collective("tp", "all_reduce", 2 * hidden, 2))

    def _message(self) -> float:
        """Seconds until what one stage made is on the next."""
        moved = self.tokens * self.size.hidden_size * self.width * self.between
        apart = self.plan.num_processes // self.pp
        inside = apart < self.node_size
        rate = self.rates.link_bytes if inside else self.rates.network_bytes
        return self.rates.link_latency_s * (1 if inside else 2) + moved / rate

    def _data_parallel(self, place: int, computing: float) -> float:
        """What exchanges of gradients and gathers of parameters add to computing beside them."""
        process = self.processes[place]
        deepspeed = self.traits.takes_deepspeed_json
        found = process.zero() if deepspeed else process.data()
        units = process.num_blocks + 1
        seconds = sum(
            self._collective(axis, kind, size, units * max(1, self.count * (self.pp == 1)))
            for (axis, kind), size in found.items()
            if self.plan.mesh[axis] > 1
        )
        if self.pp > 1:  # once a step, after the pipeline's phase
            return seconds
        beside = min(seconds, computing * 0.9)
        return INTERFERENCE * beside + seconds - beside

    def _update(self, place: int) -> float:
        """Clipping and optimizer."""
        process = self.processes[place]
        held = process.in_blocks + process.around
        if self.plan.strategy.steps_on_host:
            return 0.0
        rounded = self.traits.rounded_weights
        sharded = not rounded or self.plan.strategy.zero_stage > 0
        shard = held / (self.shards if sharded else 1)
        moved = ROUNDED_UPDATE_BYTES if rounded else UPDATE_BYTES
        return moved * shard / self.rates.memory_bytes

    def _away(self) -> tuple[float, float]:
        """Seconds of an optimizer on the host, and of files."""
        strategy, share = self.plan.strategy, self.plan.layout.num_parameters / self.shards
        if strategy.swaps_to_disk:
            together = share * min(self.node_size, self.plan.num_processes)  # one disk a node
            return 0.0, DISK_BYTES * together / self.rates.disk_bytes
        if strategy.steps_on_host:
            return self.rates.host_adam_s * share * min(self.node_size, self.shards), 0.0
        return 0.0, 0.0

    def _host_block(self) -> float:
        """Seconds to launch one block, forward and backward."""
        host, split = self.rates.host, self.plan.schedule.splits_backward and self.pp > 1
        cost = host.block if self.config.compile else host.eager_block
        cost = host.split_block if split else cost
        cost += host.tensor_parallel * (self.tp > 1)
        if self.plan.strategy.zero_stage == 3:
            cost += host.zero3_block + host.zero3_gather * (self.shards > 1)
        elif self.plan.num_processes != self.copies and not self.traits.rounded_weights:
            cost += host.fsdp_unit * (self.shards * self.copies > 1 and self.pp == 1)
        return cost

    def _host_step(self, place: int) -> tuple[float, float]:
        """(seconds of launching besides blocks, seconds that the GPU waits for it)."""
        host, blocks = self.rates.host, self.processes[place].num_blocks
        tensors = 12 * blocks  # parameter tensors
        if not self.traits.takes_deepspeed_json:
            alone = self.copies == self.plan.num_processes > 1
            return host.step + host.ddp_tensor * tensors * alone, 0.0
        if self.plan.strategy.zero_stage == 3:
            return host.step, host.zero3_wait * blocks
        return host.step + host.zero_tensor * tensors, host.zero_update * tensors / self.shards


def _up(number: float, multiple: int) -> float:
    return -(-number // multiple) * multiple
