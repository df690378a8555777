"""Define the class Mechanism, and compute the tensor sizes and operation times that determine a
mechanism's costs. A mechanism is a technique that adds costs to a plan, such as tensor parallelism.
This module does not import torch.

The size of an all-reduce, all-gather or reduce-scatter is the size of the whole tensor.
`sent_bytes` converts this size to the number of bytes that a process sends."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from distributed_training.plan.plan import Draft
from distributed_training.predict.rates import Rates, tiled_multiplications

# Collective -> number of times that its data travels around the ring of ranks. "send" uses no ring.
RING_TURNS = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
    "all_to_all": 1,
    "send": 0,
}
Traffic = dict[tuple[str, str], float]  # (axis, kind of operation) -> bytes
# Points in a step at which memory may peak: the forward and backward passes, the backward pass of
# the first block (which runs last), and the optimizer step
StepPoint = Literal["passes", "first block", "update"]
ComponentBytes = Mapping[str, float]  # memory component (predict/memory.py) -> bytes
# Bytes per parameter that are read and written to add a 16-bit gradient to a sum in fp32
GRADIENT_SUM_BYTES = 10


def sent_bytes(operation: str, tensor_bytes: float, members: int) -> float:
    """Return the number of bytes that each of `members` processes sends in a ring collective. For
    "send" and "broadcast", return the number of bytes that the sender sends. A "copy" of all shards
    from the other processes' memory is as large as an all-gather."""
    if operation in ("send", "broadcast"):
        return tensor_bytes
    turns = RING_TURNS["all_gather" if operation == "copy" else operation]
    return turns * (members - 1) / members * tensor_bytes


def page_locked_bytes(num_bytes: float) -> int:
    """Return the size of a page-locked buffer on the host, which torch rounds up to a power of
    two."""
    return 2 ** math.ceil(math.log2(num_bytes))


@dataclass(slots=True)
class Cost:
    """Cost of an operation: seconds of arithmetic, memory traffic and network traffic."""

    arithmetic_s: float = 0.0
    memory_s: float = 0.0
    network_s: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.arithmetic_s + other.arithmetic_s,
            self.memory_s + other.memory_s,
            self.network_s + other.network_s,
        )

    def __sub__(self, other: "Cost") -> "Cost":
        return self + -1 * other

    def __rmul__(self, factor: float) -> "Cost":
        return Cost(factor * self.arithmetic_s, factor * self.memory_s, factor * self.network_s)

    @property
    def total_s(self) -> float:
        return self.arithmetic_s + self.memory_s + self.network_s


NO_COST = Cost()


class PassCosts(NamedTuple):
    """Costs of the forward pass, of the gradients of inputs and of the gradients of weights."""

    forward: Cost = NO_COST
    inputs: Cost = NO_COST
    weights: Cost = NO_COST


AnySizes = TypeVar("AnySizes", bound="Sizes")


class Sizes:
    """Tensor sizes that are equal in all processes of a plan. Sizes in a block are those of the
    blocks of one `kind`."""

    def __init__(self, plan: Draft) -> None:
        config = plan.config
        size = plan.size
        self.plan = plan
        self.config = config
        self.size = size
        self.kind = size.kinds[0]
        self.layers = frozenset(range(size.num_layers))  # indices of the blocks
        self.strategy = plan.strategy
        self.zero = plan.strategy.zero
        self.cp = plan.mesh["cp"]
        # DDP averages over dp_replicate and cp together, and FSDP shards over dp_shard and cp.
        axis = "dp_replicate" if plan.only_copies else "dp_shard"
        self.mesh = {**plan.mesh, axis: plan.mesh[axis] * self.cp}
        self.shards = self.mesh["dp_shard"]
        self.tp = plan.mesh["tp"]
        self.pp = plan.mesh["pp"]
        self.num_microbatches = plan.batch.num_microbatches
        # Number of times per step that FSDP and ZeRO gather and reduce a block (1 in a pipeline)
        self.exchanges_per_step = 1 if self.pp > 1 else self.num_microbatches
        # Trained share of the model's own weights; 0 if only adapters are trained
        self.trained_share = 0 if config.lora_rank else 1
        # True if DDP averages gradients in every step, in permanent buckets
        self.has_buckets = plan.uses_ddp and plan.steps_between_exchanges is None
        self.dtype_bytes = 4 if config.precision == "fp32" else 2
        # Bytes per trained weight, and per value of its gradient, in engines without a master copy
        self.weight_bytes = 2 if config.has_bf16_weights else 4
        # Number of tokens of a micro-batch on each rank along cp
        self.tokens = plan.batch.micro_batch_size * config.max_length // self.cp
        # Size in bytes of one value for each of these tokens, in the compute dtype
        self.value_bytes = self.tokens * self.dtype_bytes
        # Size in bytes of one micro-batch's hidden states between two blocks, before sharding, and
        # the share of it on each rank along tp
        self.hidden_bytes = self.tokens * size.hidden_size * self.dtype_bytes
        self.hidden_share = 1 / self.tp
        self.compile_mode = "compiled" if config.compile else "eager"
        self.embedding_parameters = size.padded_vocab_size * size.hidden_size // self.tp
        # Share of the blocks that recompute activations
        self.recomputed_share = 0.0
        if config.activation_checkpointing != "none":
            limit = config.checkpointed_blocks or size.num_layers
            self.recomputed_share = min(1.0, limit / size.num_layers)

    def by_kind(self: AnySizes) -> Iterator[tuple[float, AnySizes]]:
        """Yield (share of these blocks, the sizes in them) for each kind of block."""
        for kind in self.size.kinds:
            sizes = self if kind is self.kind else copy.copy(self)
            sizes.kind = kind
            if num_blocks := len(self.layers.intersection(kind.layers)):
                yield num_blocks / len(self.layers), sizes

    def split_values(self, mode: str) -> float:
        """Return the values that a block keeps and that tp splits, relative to the hidden size.
        `mode` is "eager", "compiled" or "selective"."""
        return self.kind.split_values(mode, self.config.max_length) / self.size.hidden_size


class PipelineRank(Sizes):
    """Tensor sizes in the processes of one pipeline rank."""

    def __init__(self, plan: Draft, index: int = 0) -> None:
        super().__init__(plan)
        config = plan.config
        size = plan.size
        self.index = index
        ranks = plan.stages.ranks
        self.has_first_stage = ranks[0] == index
        self.has_last_stage = ranks[-1] == index
        # Number of boundaries between a stage of this process and a stage of another process
        self.num_boundaries = sum(
            index in pair for pair in itertools.pairwise(ranks) if len({*pair}) > 1
        )
        stages = zip(ranks, plan.stages.block_ranges, strict=True)
        self.layers = frozenset().union(*(blocks for rank, blocks in stages if rank == index))
        self.num_blocks = len(self.layers)
        # Numbers of parameters before sharding over dp_shard, inside and outside the blocks
        self.parameters_in_blocks = 0
        self.parameters_outside_blocks = 0
        # Number of parameters that are replicated over tp and whose gradients are summed over tp
        tp_partial_parameters = 0
        adapter_parameters = 0
        tp_partial_adapters = 0
        # Numbers of these parameters in experts that stay on their ranks
        self.resting_parameters = 0
        self.resting_adapters = 0
        for kind in size.kinds:
            num_blocks = len(self.layers.intersection(kind.layers))
            replicated_parameters = kind.parameters - kind.split_parameters
            self.parameters_in_blocks += num_blocks * (
                kind.split_parameters // self.tp + replicated_parameters
            )
            tp_partial_parameters += num_blocks * kind.norm_parameters
            if not self.trained_share:
                per_block, partial = kind.count_adapters(
                    config.lora_rank, config.lora_targets, self.tp
                )
                adapter_parameters += num_blocks * per_block
                tp_partial_adapters += num_blocks * partial
            if config.expert_parallel:
                self.resting_parameters += num_blocks * kind.stack_values
                shapes = kind.adapter_shapes(config.lora_rank, config.lora_targets)
                self.resting_adapters += num_blocks * sum(
                    math.prod(a_shape) + math.prod(b_shape)
                    for a_shape, b_shape in shapes.values()
                    if len(a_shape) == 3
                )
        if self.has_first_stage:
            self.parameters_outside_blocks += self.embedding_parameters + size.position_parameters
            tp_partial_parameters += size.position_parameters
        if self.has_last_stage:
            self.parameters_outside_blocks += size.final_norm_parameters
            tp_partial_parameters += size.final_norm_parameters
            if len(ranks) > 1 or not size.tied:
                self.parameters_outside_blocks += self.embedding_parameters
        self.parameters = self.parameters_in_blocks + self.parameters_outside_blocks
        self.tp_partial_parameters = tp_partial_parameters
        self.adapter_parameters = adapter_parameters
        self.trained_parameters = self.parameters
        if not self.trained_share:
            self.tp_partial_parameters = tp_partial_adapters
            self.trained_parameters = adapter_parameters


class Timing(Sizes):
    """Tensor sizes of a plan, and durations of elementary operations on the plan's machine."""

    def __init__(self, plan: Draft, rates: Rates) -> None:
        super().__init__(plan)
        gbit = plan.config.network_gbit
        self.rates = rates if gbit is None else replace(rates, network_bytes_per_s=gbit * 1e9 / 8)

    def gemm_cost(self, m: float, k: float, n: float) -> Cost:
        """Return the cost of multiplying an `m x k` matrix by a `k x n` matrix."""
        rates = self.rates
        flops = rates.fp32_gemm_flops if self.dtype_bytes == 4 else rates.gemm_flops
        return Cost(
            arithmetic_s=2 * tiled_multiplications(m, k, n, rates.num_sms) / flops,
            memory_s=rates.weight_bytes * m * k * n / self.tokens / rates.memory_bytes_per_s,
        )

    def memory_cost(self, num_bytes: float) -> Cost:
        """Return the cost of element-wise kernels that read and write `num_bytes` bytes in
        total."""
        return Cost(memory_s=num_bytes / self.rates.memory_bytes_per_s)

    def collective_s(
        self, axis: str, operation: str, tensor_bytes: float, num_collectives: float
    ) -> float:
        """Return the time in seconds for `num_collectives` collectives over an axis. Together, the
        collectives exchange `tensor_bytes` bytes."""
        members = self.mesh[axis]
        # tp is the fastest-varying axis. The axis dp_shard includes cp and begins with it. If a
        # group spans nodes, each member has its own network adapter, and NCCL's rings use all
        # adapters of a node.
        axes = ["tp", "dp_shard", "dp_replicate", "pp"]
        inner_axes = axes[: axes.index("dp_shard" if axis == "cp" else axis)]
        stride = math.prod(self.mesh[name] for name in inner_axes)
        members_per_node = min(members, max(1, self.plan.processes_here // stride))
        rate = self.rates.link_bytes_per_s
        latency = self.rates.link_latency_s
        if members_per_node < members:
            rate = min(rate, self.rates.network_bytes_per_s * members_per_node)
            latency *= 2
        num_bytes = sent_bytes(operation, tensor_bytes, members)
        return num_collectives * latency * math.sqrt(max(1, members - 1)) + num_bytes / rate


def pipeline_ranks(plan: Draft) -> list[PipelineRank]:
    """Return the tensor sizes for each pipeline rank."""
    return [PipelineRank(plan, rank) for rank in range(plan.mesh["pp"])]


PlanValue = Callable[[Sizes], float]
BlockValue = Callable[[PipelineRank, float], float]


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Costs that one mechanism, such as tensor parallelism, adds to each plan that uses it. Omitted
    fields add nothing."""

    is_used: Callable[[Draft], bool]
    # Bytes of model state per trained parameter. The keys are "parameters", "gradients" and
    # "optimizer" on the device, and "host" and "disk" for offloading.
    state: Callable[[PipelineRank], ComponentBytes] = lambda _: {}
    # Bytes needed in addition to the state at a point, and the share of all gradients that exists
    # at this point
    additional_bytes: Callable[[PipelineRank, StepPoint], ComponentBytes] = lambda _, point: {}
    gradient_share: Callable[[PipelineRank, StepPoint], float] = lambda _, point: 0
    # Bytes that a block keeps per micro-batch, and additional bytes that its backward pass needs.
    # The second argument is the share of the blocks that recompute activations.
    activation_bytes: BlockValue = lambda _, recomputed: 0
    backward_bytes: BlockValue = lambda _, recomputed: 0
    # Sizes in bytes of the tensors that are communicated per step: inside blocks and between
    # stages, and for data parallelism
    layer_traffic: Callable[[PipelineRank], Traffic] = lambda _: {}
    data_parallel_traffic: Callable[[PipelineRank], Traffic] = lambda _: {}
    # Costs of a block for one micro-batch, and costs of its forward pass that the backward pass
    # repeats
    block_costs: Callable[[Timing], PassCosts] = lambda _: PassCosts()
    recomputed_costs: Callable[[Timing, Cost], Sequence[Cost]] = lambda _, forward: ()
    # Bytes per block parameter that are moved per micro-batch for gradients and rounded weights
    moved_bytes: PlanValue = lambda _: 0
    # Bytes that clipping and the optimizer step read and write in a process
    update_bytes: Callable[[PipelineRank], float] = lambda _: 0
    # Number of collectives per block that the host launches
    num_launches: PlanValue = lambda _: 0
    # (number of times per step that Python code runs for each tensor, seconds that the GPU waits
    # for this code)
    hook_costs: Callable[[PipelineRank, Rates], tuple[float, float]] = lambda _, rates: (0, 0.0)
