"""Seconds of GPU and network for the parts of a step. No torch import.

Matrix products take FLOPs / rate, element-wise work bytes / bandwidth, attention FLOPs at a rate
that grows with the sequence, every kernel a little to start; a collective its latency and what a
ring sends / bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import P2P_CHANNELS
from distributed_training.predict.rates import Rates, tiled
from distributed_training.predict.traffic import Formulas, sent_bytes

BACKWARD_ATTENTION = 2.5  # FLOPs of its backward pass by those of the forward one
# Values of the arithmetic's width that element-wise kernels read and write, a token and unit of
# hidden size of a compiled block: (between split layers, in them), forward and backward.
FORWARD_VALUES, BACKWARD_VALUES = (10, 10), (14, 25)
EAGER = 1.95  # times as many without torch.compile (pp4 1f1b m16 of gpt2-medium, both ways)
KERNELS = {"F": 9, "B": 22}  # of a compiled block
LOGIT_BYTES = {"compiled": 11, "eager": 50, "split": 30}  # read and written, a logit
IN_FORWARD = 0.55  # of that
GATHERED_COPIES = 2  # a gathered or scattered tensor is read and written once more along tokens
OVERLAPPED = 0.3  # share of exchanges along tp that async_tp hides (h200-x4)
CHANNEL_BYTES = 28e9  # bytes/s of one of NCCL's channels (h200-x4-links/four-channels.json: 30)
UPDATE_BYTES, ROUNDED_UPDATE_BYTES = 40, 60  # a parameter: AdamW, clipping; and copies
ACCUMULATED_BYTES, CAST_BYTES = 10, 6  # a parameter and micro-batch


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds on a GPU: arithmetic, memory traffic, network."""

    arithmetic: float = 0.0
    memory: float = 0.0
    network: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.arithmetic + other.arithmetic,
            self.memory + other.memory,
            self.network + other.network,
        )

    def times(self, factor: float) -> Cost:
        return Cost(self.arithmetic * factor, self.memory * factor, self.network * factor)

    @property
    def total(self) -> float:
        return self.arithmetic + self.memory + self.network


class Work:
    """What one process of a plan does in a step, in seconds."""

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

    def operations(self) -> dict[tuple[str, int], Cost]:
        """Of each kind of operation of each stage, for one micro-batch."""
        forward, backward, weights = self.block()
        head, blocks = self.head(), self.plan.layout.blocks_per_stage
        found = {}
        for stage, number in enumerate(blocks):
            last = stage == len(blocks) - 1
            found["F", stage] = forward.times(number) + head[0].times(last)
            found["I", stage] = backward.times(number) + (head[1] + head[2]).times(last)
            found["W", stage] = weights.times(number)  # of the blocks' matrices alone
            found["B", stage] = found["I", stage] + found["W", stage]
        return found

    def block(self) -> tuple[Cost, Cost, Cost]:
        """(forward, backward for inputs, backward for weights) of one block and micro-batch."""
        d, tp, tokens = self.size.hidden_size, self.tp, self.tokens
        hidden = (self.size.block_matrix_parameters / d**2 - 4) / 2 * d
        products = [(d, 3 * d / tp), (d / tp, d), (d, hidden / tp), (hidden / tp, d)]
        forward, inputs, weights = Cost(), Cost(), Cost()
        for k, n in products:
            forward += self._gemm(tokens, k, n)
            inputs += self._gemm(tokens, n, k)
            weights += self._gemm(k, tokens, n)
        length, rates = self.config.max_length, self.rates
        rate = rates.attention_flops * length / (length + rates.attention_half)
        if self.width == 4:  # the kernel for fp32 is bound by arithmetic at any length
            rate = rates.fp32_gemm_flops / 2
        attention = 2 * tokens * length * d / tp / rate
        whole, split = self.size.block_parameters, self.size.block_parameters_split
        held = whole - split + split / tp
        per_batch = ACCUMULATED_BYTES * (self.count > 1 or self.pp > 1) + self._casts()
        forward += self._traffic(FORWARD_VALUES, KERNELS["F"]) + Cost(attention)
        inputs += self._traffic(BACKWARD_VALUES, KERNELS["B"])
        inputs += Cost(BACKWARD_ATTENTION * attention)
        weights += Cost(0, per_batch * held / rates.memory_bytes)
        exchange = self._tensor_parallel()
        forward, inputs = forward + exchange, inputs + exchange
        mode = self.config.activation_checkpointing
        if mode == "full":
            inputs += forward
        elif mode == "selective":  # norms, GELU and sums again
            inputs += self._traffic(FORWARD_VALUES, KERNELS["F"]) + exchange.times(0.5)
        return forward, inputs, weights

    def head(self) -> tuple[Cost, Cost, Cost]:
        """As `block`, of output layer and loss."""
        d, vocabulary = self.size.hidden_size, self.size.padded_vocab_size / self.tp
        kind = "split" if self.tp > 1 else "compiled" if self.config.compile else "eager"
        moved = LOGIT_BYTES[kind] * self.width / 2 * self.tokens * vocabulary
        # The split loss is kernels like any others, torch's own is one.
        rate = self.rates.memory_bytes if self.tp > 1 else self.rates.head_memory_bytes
        traffic = Cost(0, moved / (rate or self.rates.memory_bytes))
        products = (
            self._gemm(self.tokens, d, vocabulary),
            self._gemm(self.tokens, vocabulary, d),
            self._gemm(d, self.tokens, vocabulary),
        )
        return (
            products[0] + traffic.times(IN_FORWARD),
            products[1] + traffic.times(1 - IN_FORWARD),
            products[2],
        )

    def update(self, process: Formulas) -> float:
        """Clipping and optimizer of a process."""
        held = process.in_blocks + process.around
        if self.plan.strategy.steps_on_host:
            return 0.0
        rounded = self.traits.rounded_weights
        sharded = not rounded or self.plan.strategy.zero_stage > 0
        shard = held / (self.shards if sharded else 1)
        moved = ROUNDED_UPDATE_BYTES if rounded else UPDATE_BYTES
        return moved * shard / (self.rates.update_memory_bytes or self.rates.memory_bytes)

    def message(self) -> float:
        """Seconds until what one stage made is on the next."""
        moved = self.tokens * self.size.hidden_size * self.width * self.between
        apart = self.plan.num_processes // self.pp
        inside = apart < self.node_size
        rate = self.rates.link_bytes if inside else self.rates.network_bytes
        rate = min(rate, P2P_CHANNELS * CHANNEL_BYTES)
        return self.rates.link_latency_s * (1 if inside else 2) + moved / rate

    def collective(self, axis: str, kind: str, tensor_bytes: float, times: float) -> float:
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
        return times * latency * math.sqrt(max(1, members - 1)) + sent / rate

    def _gemm(self, m: float, k: float, n: float) -> Cost:
        rates = self.rates
        flops = rates.fp32_gemm_flops if self.width == 4 else rates.gemm_flops
        return Cost(2 * tiled(m, k, n, rates.num_sms) / flops)

    def _traffic(self, values: tuple[int, int], kernels: int) -> Cost:
        """Element-wise work of a block; its kernels."""
        count = values[0] * self.between + values[1] / self.tp
        moved = count * self.eager * self.width * self.tokens * self.size.hidden_size
        return Cost(0, moved / self.rates.memory_bytes + kernels * self.eager * self.rates.kernel_s)

    def _casts(self) -> int:
        """Bytes a parameter for rounding weights and widening gradients in every micro-batch,
        where nobody keeps rounded weights."""
        native = not self.traits.rounded_weights
        alone = self.copies == self.plan.num_processes or self.plan.num_processes == self.tp
        return 2 * CAST_BYTES * (native and alone and self.width == 2)

    def _tensor_parallel(self) -> Cost:
        """Of one block, one way: two gathers and two scatters, or two all-reduces."""
        if self.tp == 1:
            return Cost()
        hidden = self.tokens * self.size.hidden_size * self.width
        if self.config.sequence_parallel:
            seconds = self.collective("tp", "all_gather", 4 * hidden, 4)
            seconds *= 1 - OVERLAPPED * bool(self.config.async_tp)
            # Samples that are gathered lie one behind the other, tokens are copied into place.
            copied = 4 * GATHERED_COPIES * hidden * (self.plan.tp_parts[1] > 1)
            return Cost(0, copied / self.rates.memory_bytes, seconds)
        return Cost(0, 0, self.collective("tp", "all_reduce", 2 * hidden, 2))
