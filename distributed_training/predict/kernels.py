"""Seconds of GPU and network for the parts of a step. No torch import.

Matrix products take FLOPs / rate, attention at one that grows with the sequence, element-wise work
bytes / bandwidth, every kernel a little to start, a collective its latency and a ring's bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import P2P_CHANNELS
from distributed_training.predict.constants import FITTED
from distributed_training.predict.rates import Rates, tiled
from distributed_training.predict.traffic import Formulas, Shapes, sent_bytes

# Bytes a parameter that AdamW and clipping read and write: its weight, gradient and moments; with
# rounded weights these, too, and the gradient that is widened, scaled and added (DeepSpeed's ZeRO).
UPDATE_BYTES = {False: 28 + 12, True: 60}
BACKWARD_ATTENTION = 5 / 2  # matrix products of its backward pass by those of the forward one


# A cost is these in seconds, or zeros and sums of them.
ARITHMETIC, MEMORY, NETWORK = np.eye(3)
Cost = NDArray[np.float64]


class Work(Shapes):
    """What one process of a plan does in a step, in seconds."""

    def __init__(self, plan: Plan, rates: Rates) -> None:
        super().__init__(plan)
        self.rates = rates
        self.node_size = plan.processes_here
        self.eager = 1.0 if plan.config.compile else FITTED.elementwise.eager

    def operations(self) -> dict[tuple[str, int], Cost]:
        """Of each kind of operation of each stage, for one micro-batch."""
        forward, inputs, weights = self.block()
        blocks = self.plan.layout.blocks_per_stage
        found = {}
        for stage, number in enumerate(blocks):
            found["F", stage] = number * forward
            found["I", stage] = number * inputs
            found["W", stage] = number * weights  # of the blocks' matrices alone
            if stage == len(blocks) - 1:
                head = self.head()
                found["F", stage] += head[0]
                found["I", stage] += head[1] + head[2]
            found["B", stage] = found["I", stage] + found["W", stage]
        return found

    def block(self) -> tuple[Cost, Cost, Cost]:
        """(forward, backward for inputs, backward for weights) of one block and micro-batch."""
        tokens = self.tokens
        forward = np.zeros(3)
        inputs = np.zeros(3)
        weights = np.zeros(3)
        for place, (rows, columns) in enumerate(self.size.block_matrices):
            n, k = (rows, columns / self.tp) if place % 2 else (rows / self.tp, columns)
            forward += self._gemm(tokens, k, n)
            inputs += self._gemm(tokens, n, k)
            weights += self._gemm(k, tokens, n)
        attention = self._attention()
        exchange = self._tensor_parallel()
        if self.frozen:  # what is added reads and writes more than its narrow products compute
            outputs = sum(rows for rows, _ in self.size.block_matrices) / self.tp
            moved = tokens * self.width * outputs / self.rates.memory_bytes
            share = len(self.size.adapted(self.config.lora_targets)) / len(self.size.matrix_names)
            forward += 4 * moved * share * MEMORY
            inputs += 7 * moved * share * MEMORY
        elementwise = self._elementwise()
        forward += elementwise + attention + exchange
        inputs += 2 * elementwise + BACKWARD_ATTENTION * attention + exchange
        weights += self._gradient_bytes() / self.rates.memory_bytes * MEMORY
        if self.frozen:
            weights = np.zeros(3)
        if self.config.activation_checkpointing == "full":
            inputs += forward
        elif self.config.activation_checkpointing == "selective":  # norms, GELU and sums again
            inputs += elementwise + 0.5 * exchange
        return forward, inputs, weights

    def head(self) -> tuple[Cost, Cost, Cost]:
        """As `block`, of output layer and loss."""
        d = self.size.hidden_size
        vocabulary = self.size.padded_vocab_size / self.tp
        rate = self.rates.head_memory_bytes or self.rates.memory_bytes
        each = FITTED.logit_traffic.compiled if self.config.compile else FITTED.logit_traffic.eager
        if self.tp > 1:  # the split loss is kernels like any others, torch's own is one
            each = FITTED.logit_traffic.split
            rate = self.rates.memory_bytes
        moved = each * self.width / 2 * self.tokens * vocabulary
        traffic = 0.5 * (moved / rate) * MEMORY
        return (
            self._gemm(self.tokens, d, vocabulary) + traffic,
            self._gemm(self.tokens, vocabulary, d) + traffic,
            np.zeros(3) if self.frozen else self._gemm(d, self.tokens, vocabulary),
        )

    def update(self, process: Formulas) -> float:
        """Clipping and optimizer of a process."""
        if self.strategy.steps_on_host:
            return 0.0
        rounded = self.strategy.traits.rounded_weights
        shard = float(process.learning)
        if not rounded or self.strategy.zero_stage > 0:
            shard /= self.shards
        rate = self.rates.update_memory_bytes or self.rates.memory_bytes
        return UPDATE_BYTES[rounded] * shard / rate

    def message(self) -> float:
        """Seconds until what one stage made is on the next."""
        rate = self.rates.link_bytes
        latency = self.rates.link_latency_s
        if self.plan.num_processes // self.pp >= self.node_size:  # on another node
            rate = self.rates.network_bytes
            latency = 2 * latency
        rate = min(rate, P2P_CHANNELS * FITTED.channel_bytes_per_s)
        return latency + self.hidden * self.between / rate

    def collective(self, axis: str, kind: str, tensor_bytes: float, times: float) -> float:
        """Seconds of `times` collectives of so many bytes together over an axis."""
        members = self.mesh[axis]
        # tp varies fastest with the rank. Where a group spans nodes, each of its members in a node
        # has an adapter, and NCCL's rings use all of them.
        faster = ["tp", "dp_shard", "dp_replicate", "pp"]
        stride = math.prod(self.mesh[name] for name in faster[: faster.index(axis)])
        together = min(members, max(1, self.node_size // stride))
        rate = self.rates.link_bytes
        latency = self.rates.link_latency_s
        if together < members:
            rate = min(rate, self.rates.network_bytes * together)
            latency *= 2
        sent = sent_bytes(kind, tensor_bytes, members)
        return times * latency * math.sqrt(max(1, members - 1)) + sent / rate

    def _gemm(self, m: float, k: float, n: float) -> Cost:
        rates = self.rates
        flops = rates.fp32_gemm_flops if self.width == 4 else rates.gemm_flops
        return 2 * tiled(m, k, n, rates.num_sms) / flops * ARITHMETIC

    def _attention(self) -> Cost:
        """Causal attention of one block, forward."""
        length = self.config.max_length
        rate = self.rates.attention_flops * length / (length + FITTED.attention_half)
        if self.width == 4:  # the kernel for fp32 is bound by arithmetic at any length
            rate = self.rates.fp32_gemm_flops / 2
        return 2 * self.tokens * length * self.size.attention_width / self.tp / rate * ARITHMETIC

    def _elementwise(self) -> Cost:
        """Of a block, forward; a backward pass reads and writes twice as much."""
        fitted = FITTED.elementwise
        values = fitted.between * self.between + fitted.split * self.by_gpt2 / self.tp
        moved = values * self.eager * self.hidden
        starts = fitted.starts * self.eager * self.rates.kernel_s
        return (moved / self.rates.memory_bytes + starts) * MEMORY

    def _gradient_bytes(self) -> float:
        """Read and written of a block's gradients and rounded weights in one micro-batch."""
        whole = self.size.block_parameters
        split = self.size.block_parameters_split
        plan = self.plan
        each = 0.0
        if self.micro_batches > 1 or self.pp > 1:  # two read, their sum written
            each += 10
        # Where nobody keeps rounded weights, they are rounded and gradients widened every time.
        alone = plan.only_copies or plan.num_processes == self.tp
        if alone and self.width == 2 and not self.strategy.traits.rounded_weights:
            each += 12
        if plan.uses_ddp:  # copied into a bucket, scaled, once a step
            each += 8 / self.micro_batches
        elif plan.uses_fsdp and self.pp == 1:
            # Gathered weights are copied out of a buffer, twice; gradients, widened, into another.
            each += 4 * self.width + 4 + self.width
        return each * (whole - split + split / self.tp)

    def _tensor_parallel(self) -> Cost:
        """Of one block, one way: two gathers and two scatters, or two all-reduces."""
        if self.tp == 1:
            return np.zeros(3)
        if not self.config.sequence_parallel:
            return self.collective("tp", "all_reduce", 2 * self.hidden, 2) * NETWORK
        seconds = self.collective("tp", "all_gather", 4 * self.hidden, 4)
        if self.config.async_tp:
            seconds *= 1 - FITTED.async_tp_share
        return seconds * NETWORK
