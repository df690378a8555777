"""Estimate the seconds of one optimizer step and its main bottleneck. No torch import.

Matrix multiplications take FLOPs / rate, and attention has a rate that grows with the sequence.
Element-wise operations take bytes / bandwidth, and each kernel a time to start. A collective
takes its latency and the bytes of a ring / bandwidth. A pipeline is simulated in its schedule's
order. The host launches while the GPU computes: the slower one counts, unless a CUDA graph
launches all."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distributed_training.plan.orders import Step, find_orders
from distributed_training.plan.plan import Draft
from distributed_training.plan.schedules import P2P_CHANNELS
from distributed_training.predict.memory import MOMENT_BYTES
from distributed_training.predict.rates import FITTED, Rates, tiled
from distributed_training.predict.simulate import flow, length_of, simulate
from distributed_training.predict.traffic import Formulas, Shapes, formulas_by_place, sent_bytes

# Bytes per parameter that AdamW and clipping read and write, without the optimizer state: weight
# and gradient. With rounded weights (DeepSpeed's ZeRO), also the rounded weight, and the gradient,
# which is widened, scaled and added.
UPDATE_BYTES = {False: 12 + 12, True: 44}
# Bytes per parameter that a step on a disk reads and writes: fp32 weights and Adam moments 12 + 12,
# gradients 4 + 4, rounded weights 2 per pass and 2 after the update.
SWAPPED_BYTES = 38
BACKWARD_ATTENTION = (
    5 / 2
)  # matrix multiplications of the backward pass relative to the forward pass

# A cost is a vector of seconds along these axes.
ARITHMETIC, MEMORY, NETWORK = np.eye(3)
Cost = NDArray[np.float64]


class StepTime(NamedTuple):
    """Seconds of a step, and the main bottleneck of the slowest process."""

    seconds: float
    bound_by: str  # arithmetic, memory, network, bubble, host RAM, disk or host


def estimate_step(plan: Draft, rates: Rates) -> StepTime:
    """Estimate the time of one step."""
    work = Work(plan, rates)
    graph = work.config.cuda_graphs is True  # one launch per step
    processes = formulas_by_place(work.plan)
    costs = work.operations()
    orders = find_orders(work.plan)
    seconds = {key: float(cost.sum()) for key, cost in costs.items()}
    gives = flow(work.plan.layout.ranks, work.message())
    on_gpu = length_of(simulate(orders, seconds, gives))
    busy = [sum(seconds[kind, stage] for kind, stage, _ in order) for order in orders]
    here = plan.processes_here
    if rates.on_host:  # other stages use the core of a stage that waits
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
    offload = disk = 0.0  # seconds of an optimizer on the host, and of files
    share = max(other.learning for other in processes) / work.shards
    if work.strategy.swaps_to_disk:  # one per node
        disk = SWAPPED_BYTES * (share * here) / FITTED.disk_bytes_per_s
    elif work.strategy.steps_on_host:
        offload = FITTED.host_adam_s * (share * min(here, work.shards))
    total = gpu + launching if rates.on_host else max(gpu, launching)
    total += waits
    total += offload + disk
    parts = dict(zip(("arithmetic", "memory", "network"), spent, strict=True))
    parts["memory"] += update
    parts["network"] += data
    parts["bubble"] = max(0.0, on_gpu - computing) if work.pp > 1 else 0.0
    parts["host RAM"] = offload
    parts["disk"] = disk
    parts["host"] = max(0.0, total - sum(parts.values()))
    return StepTime(total, max(parts, key=lambda name: parts[name]))


class Work(Shapes):
    """Seconds of the parts of a step of a plan."""

    def __init__(self, plan: Draft, rates: Rates) -> None:
        super().__init__(plan)
        gbit = plan.config.network_gbit
        self.rates = rates if gbit is None else replace(rates, network_bytes=gbit * 1e9 / 8)

    def operations(self) -> dict[Step, Cost]:
        """Return the cost of each kind of operation of each stage, for one micro-batch."""
        forward, inputs, weights = self.block()
        blocks = self.plan.layout.blocks_per_stage
        costs = {}
        for stage, number in enumerate(blocks):
            costs["F", stage] = number * forward
            costs["I", stage] = number * inputs
            costs["W", stage] = number * weights  # only of the blocks' matrices
            if stage == len(blocks) - 1:
                head = self.head()
                costs["F", stage] += head[0]
                costs["I", stage] += head[1] + head[2]
            costs["B", stage] = costs["I", stage] + costs["W", stage]
        return costs

    def update(self, process: Formulas) -> float:
        """Return the seconds of clipping and the optimizer step of a process."""
        if self.strategy.steps_on_host:
            return 0.0
        rounded = self.strategy.traits.rounds_weights
        shard = float(process.learning)
        if not rounded or self.strategy.zero.stage > 0:
            shard /= self.shards
        rate = self.rates.update_memory_bytes or self.rates.memory_bytes
        moments = 2 * MOMENT_BYTES[self.config.optimizer]
        return (UPDATE_BYTES[rounded] + moments) * shard / rate

    def message(self) -> float:
        """Return the seconds until a result of one stage has reached the next."""
        rate = self.rates.link_bytes
        latency = self.rates.link_latency_s
        if self.plan.num_processes // self.pp >= self.plan.processes_here:  # on another node
            rate = self.rates.network_bytes
            latency *= 2
        rate = min(rate, P2P_CHANNELS * FITTED.channel_bytes_per_s)
        return latency + self.hidden * self.between / rate

    def _collective(self, axis: str, kind: str, tensor_bytes: float, times: float) -> float:
        """Return the seconds of `times` collectives over an axis, of `tensor_bytes` in total."""
        members = self.mesh[axis]
        # tp varies fastest with the rank. If a group spans nodes, each of its members in a node has
        # an adapter, and NCCL's rings use all of them.
        faster = ["tp", "dp_shard", "dp_replicate", "pp"]
        stride = math.prod(self.mesh[name] for name in faster[: faster.index(axis)])
        together = min(members, max(1, self.plan.processes_here // stride))
        rate = self.rates.link_bytes
        latency = self.rates.link_latency_s
        if together < members:
            rate = min(rate, self.rates.network_bytes * together)
            latency *= 2
        sent = sent_bytes(kind, tensor_bytes, members)
        return times * latency * math.sqrt(max(1, members - 1)) + sent / rate

    def block(self) -> tuple[Cost, Cost, Cost]:
        """Return the costs of one block and micro-batch: forward, input gradients, weight
        gradients."""
        config = self.config
        tokens = self.tokens
        matrices = self.size.block_matrices
        forward, inputs, weights = np.zeros((3, 3))
        for index, (rows, columns) in enumerate(matrices):
            n, k = (rows, columns / self.tp) if index % 2 else (rows / self.tp, columns)
            last = self._gemm(tokens, k, n)
            forward += last
            inputs += self._gemm(tokens, n, k)
            weights += self._gemm(k, tokens, n)
        attention = self._attention()
        exchange = self._tensor_parallel()
        added = np.zeros(3)
        if self.frozen:  # adapters are bound by memory traffic
            outputs = sum(rows for rows, _ in matrices) / self.tp
            moved = tokens * self.width * outputs / self.rates.memory_bytes
            share = len(self.size.adapted(config.lora_targets)) / len(self.size.matrix_names)
            added = 4 * moved * share * MEMORY
            forward += added
            inputs += 7 * moved * share * MEMORY
        if config.base_dtype == "nf4":  # codes and scales are read, the matrix written and read
            values = sum(rows * columns for rows, columns in matrices)
            dequantize = (9 / 16 + self.width) * values / self.rates.memory_bytes * MEMORY
            forward += dequantize
            inputs += dequantize
        elementwise, backward = self._elementwise()
        forward += elementwise + attention + exchange
        inputs += backward + BACKWARD_ATTENTION * attention + exchange
        weights += self._gradient_bytes() / self.rates.memory_bytes * MEMORY
        if self.frozen:
            weights = np.zeros(3)
        if config.activation_checkpointing == "full":
            # Nothing needs the last product again. In compiled blocks, which read an adapter's
            # output where they read the product it is added to, nothing needs the sum.
            inputs += forward
            if config.compile:
                inputs -= last + added / 2
            elif not self.frozen:
                inputs -= last
        elif config.activation_checkpointing == "selective":  # norms, GELU and sums again
            inputs += elementwise + 0.5 * exchange
        return forward, inputs, weights

    def head(self) -> tuple[Cost, Cost, Cost]:
        """Return the costs of output layer and loss, as `block` does."""
        d = self.size.hidden_size
        vocabulary = self.size.padded_vocab_size / self.tp
        rate = self.rates.head_memory_bytes or self.rates.memory_bytes
        fitted = FITTED.logit_traffic
        per_logit = fitted.compiled if self.config.compile else fitted.eager
        if self.tp > 1:  # the split loss consists of several kernels, torch's loss is one
            per_logit = fitted.split
            rate = self.rates.memory_bytes
        moved = per_logit * self.width / 2 * self.tokens * vocabulary
        traffic = 0.5 * (moved / rate) * MEMORY
        weights = self._gemm(d, self.tokens, vocabulary)
        if chunk := self.config.loss_chunk_tokens:  # read and written for each chunk but the first
            times = 2 * math.ceil(self.tokens / int(chunk))
            moved = times * self.width * vocabulary * d
            weights += moved / self.rates.memory_bytes * MEMORY
        return (
            self._gemm(self.tokens, d, vocabulary) + traffic,
            self._gemm(self.tokens, vocabulary, d) + traffic,
            np.zeros(3) if self.frozen else weights,
        )

    def _gemm(self, m: float, k: float, n: float) -> Cost:
        rates = self.rates
        flops = rates.fp32_gemm_flops if self.width == 4 else rates.gemm_flops
        return 2 * tiled(m, k, n, rates.num_sms) / flops * ARITHMETIC

    def _attention(self) -> Cost:
        """Return the cost of causal attention of one block, forward. For packed records, a kernel
        skips the other records of a block. A mask hides them and costs more than whole blocks."""
        packing = self.plan.packing
        masked = packing is not None and not self._has_kernel()
        length = self.config.max_length if masked else self.plan.attended
        rate = self.rates.attention_flops * length / (length + FITTED.attention_half)
        fitted = FITTED.packed_attention
        if self.width == 4:  # the kernel for fp32 is bound by arithmetic at any length
            rate = self.rates.fp32_gemm_flops / 2
        elif masked:
            rate /= fitted.mask
        elif packing is not None:
            rate /= fitted.kernel
        traced = self.size.traced
        seen = 1 if traced is None or traced.fused else 2  # share of the square
        seconds = 2 * seen * self.tokens * length * self.size.attention_width / self.tp / rate
        if packing is not None and not masked:
            tiles = math.ceil(self.config.max_length / fitted.tile) * packing.max_documents
            heads = self.tokens / self.config.max_length * self.size.num_heads / self.tp
            seconds += tiles * heads * fitted.tile_s / (1 + BACKWARD_ATTENTION)
        return seconds * ARITHMETIC

    def _has_kernel(self) -> bool:
        """Return whether packed records have their own kernel, as in models/attention.py."""
        head_size = self.size.attention_width // self.size.num_heads
        on_gpu = self.config.precision == "bf16" and not self.rates.on_host
        return on_gpu and not self.config.dropout and head_size % 8 == 0 and head_size <= 256

    def _elementwise(self) -> tuple[Cost, Cost]:
        """Return the cost of a block's element-wise operations: (forward, backward). Unless they
        were traced, the backward pass reads and writes twice as much."""
        fitted = FITTED.elementwise
        eager = 1.0 if self.config.compile else fitted.eager
        starts = fitted.starts * eager * self.rates.kernel_s
        if self.size.traced is not None:
            way = "compiled" if self.config.compile else "eager"
            share = FITTED.traced_traffic
            moved = share.forward * self.traced_bytes("forward", way)
            forward = (moved / self.rates.memory_bytes + starts) * MEMORY
            moved = share.backward * self.traced_bytes("backward", way)
            return forward, (moved / self.rates.memory_bytes + 2 * starts) * MEMORY
        by_gpt2 = self.split_values / 12  # whose blocks were measured
        values = fitted.between * self.between + fitted.split * by_gpt2 / self.tp
        moved = values * eager * self.hidden
        forward = (moved / self.rates.memory_bytes + starts) * MEMORY
        return forward, 2 * forward

    def _gradient_bytes(self) -> float:
        """Return the bytes of a block's gradients and rounded weights that one micro-batch
        moves."""
        whole = self.size.block_parameters
        split = self.size.block_parameters_split
        plan = self.plan
        per_parameter = 0.0
        if self.micro_batches > 1 or self.pp > 1:  # two are read, their sum is written
            per_parameter += 10
        # If rounded weights are not kept, they are rounded and gradients are widened every time.
        alone = plan.only_copies or plan.num_processes == self.tp
        if alone and self.width == 2 and not self.strategy.traits.rounds_weights:
            per_parameter += 12
        if self.has_buckets:  # scaled gradients are copied into them once per step
            per_parameter += 8 / self.micro_batches
        elif plan.uses_fsdp and self.pp == 1:
            # Gathered weights are copied out of a buffer twice, widened gradients into another one.
            per_parameter += 4 * self.width + 4 + self.width
        return per_parameter * (whole - split + split / self.tp)

    def _tensor_parallel(self) -> Cost:
        """Return the cost of a block's exchanges over tp in one direction: two gathers and two
        scatters, or two all-reduces."""
        if self.tp == 1:
            return np.zeros(3)
        if not self.config.sequence_parallel:
            return self._collective("tp", "all_reduce", 2 * self.hidden, 2) * NETWORK
        seconds = self._collective("tp", "all_gather", 4 * self.hidden, 4)
        if self.config.async_tp:
            seconds *= 1 - FITTED.async_tp_share
        return seconds * NETWORK

    def data_parallel(self, process: Formulas, computing: float) -> float:
        """Return the seconds that exchanges over the data-parallel axes add to computation."""
        every = process.steps_between_exchanges
        times = float(process.num_blocks + 1)
        if every:  # all at once
            times = 1 / every
        elif self.pp == 1:
            times *= self.micro_batches
        seconds = sum(
            self._collective(axis, kind, size, times)
            for (axis, kind), size in process.data().items()
            if self.mesh[axis] > 1
        )
        if self.pp > 1 or every:  # after the pipeline's phase, or the update
            return seconds
        overlapped = min(seconds, computing)
        return FITTED.interference * overlapped + seconds - overlapped

    def launching(self) -> dict[Step, float]:
        """Return the seconds that the host takes to launch each kind of operation of each stage."""
        shares = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
        return {
            (kind, stage): self.host_block() * number * share + self.rates.host.exchange
            for stage, number in enumerate(self.plan.layout.blocks_per_stage)
            for kind, share in shares.items()
        }

    def host_block(self) -> float:
        """Return the seconds to launch one block, forward and backward, with its exchanges."""
        exchanges = 0
        if self.tp > 1:
            exchanges += 1
        if self.strategy.zero.stage == 3:  # parameters per pass, and sharded gradients
            exchanges += 2 if self.shards == 1 else 3
        elif self.plan.uses_fsdp:
            exchanges += 1
        return float(self.rates.host.block + exchanges * self.rates.host.exchange)

    def host_step(self, process: Formulas) -> tuple[float, float]:
        """Return the seconds of launches outside blocks, and the seconds that the GPU waits."""
        host = self.rates.host
        strategy = self.strategy
        blocks = process.num_blocks
        tensors = host.tensor * self.size.block_tensors * blocks
        if not strategy.traits.hooks_between_blocks:
            return host.step + (tensors if self.plan.num_processes > 1 else 0.0), 0.0
        wait = host.wait * blocks
        if strategy.zero.stage == 3:
            return host.step, wait if self.shards == 1 else 2 * wait
        # A hook for each tensor runs in every micro-batch, whether or not it exchanges anything.
        return host.step + tensors * self.micro_batches, wait / self.shards
