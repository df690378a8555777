"""Communication volume of a step, by the formulas of strategies/*/README.md. No torch import.

Sizes are of the tensors given to an operation: the whole tensor for all-reduce, all-gather and
reduce-scatter. `sent_bytes` converts them to the bytes that a process sends."""

import itertools
from collections import Counter, defaultdict

from distributed_training.plan.plan import Draft
from distributed_training.settings.keys import Options
from distributed_training.settings.strategies import strategy_options

# Operation -> number of turns around a ring of all processes. A message goes to one process.
TURNS = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1,
    "send": 0,
}  # fmt: skip
Bytes = Counter[tuple[str, str]]  # (axis, kind of operation) -> bytes


def sent_bytes(kind: str, tensor_bytes: float, members: int) -> float:
    """Return the bytes that each of `members` processes sends if collectives run as rings."""
    if kind in ("send", "broadcast"):
        return tensor_bytes
    return TURNS[kind] * (members - 1) / members * tensor_bytes


def formulas_by_place(plan: Draft) -> list["Formulas"]:
    """Return the formulas of each pipeline rank."""
    return [Formulas(plan, rank) for rank in range(plan.mesh["pp"])]


def sent_by_axis(plan: Draft) -> dict[str, float]:
    """Map each axis to the bytes that a process sends in a step. Of the pipeline ranks, the one
    that sends most counts."""
    most = max((f.sent() for f in formulas_by_place(plan)), key=lambda sent: sum(sent.values()))
    by_axis: dict[str, float] = defaultdict(float)
    for name, size in most.items():
        by_axis[name.split()[0]] += size
    return dict(by_axis)


class Shapes:
    """Sizes of tensors that are equal on all pipeline ranks."""

    def __init__(self, plan: Draft) -> None:
        self.plan = plan
        self.config = plan.config
        self.size = plan.size
        self.strategy = plan.strategy
        self.mesh = plan.mesh
        self.tp = plan.mesh["tp"]
        self.pp = plan.mesh["pp"]
        self.shards = plan.mesh["dp_shard"]
        self.steps_between_exchanges = plan.steps_between_exchanges
        # True if DDP averages gradients in every step, in permanent buckets
        self.has_buckets = plan.uses_ddp and self.steps_between_exchanges is None
        self.micro_batches = plan.batch.num_microbatches
        self.frozen = plan.config.lora_rank > 0  # all but adapters
        self.width = 4 if plan.config.precision == "fp32" else 2
        self.tokens = plan.batch.micro_batch_size * plan.config.max_length
        # Bytes of one micro-batch between two blocks; share of it that a process along tp holds.
        self.hidden = self.tokens * self.size.hidden_size * self.width
        self.between = 1 / self.tp if plan.config.sequence_parallel else 1.0
        # What tp splits in a block, by hidden size.
        width = self.size.values_in + self.size.values_out + self.size.kept_values
        self.split_values = width / self.size.hidden_size

    def traced_bytes(self, what: str, way: str) -> float:
        """Return bytes of a block and micro-batch of a model that was traced, in bf16."""
        traced = self.size.traced
        assert traced is not None
        length = self.config.max_length
        return self.tokens * self.width / 2 * traced.bytes_per_token(what, way, length)


class Formulas(Shapes):
    """Formulas of the processes at one pipeline rank."""

    def __init__(self, plan: Draft, place: int) -> None:
        super().__init__(plan)
        self.place = place
        ranks = plan.layout.ranks
        size = self.size
        self.first = ranks[0] == place
        self.last = ranks[-1] == place
        # Between stages of this process and of another.
        self.edges = sum(place in pair for pair in itertools.pairwise(ranks) if len({*pair}) > 1)
        stages = zip(ranks, plan.layout.blocks_per_stage, strict=True)
        self.num_blocks = sum(count for rank, count in stages if rank == place)
        # Parameters before dp_shard divides them: in blocks, and in what lies around them.
        whole = size.block_parameters - size.block_parameters_split
        self.in_blocks = self.num_blocks * (size.block_parameters_split // self.tp + whole)
        self.embedding = size.padded_vocab_size * size.hidden_size // self.tp
        self.around = 0
        # Those that every process along tp has, and uses for its own tokens or terms.
        self.terms = self.num_blocks * size.block_norm_parameters
        if self.first:
            self.around += self.embedding + size.position_parameters
            self.terms += size.position_parameters
        if self.last:
            self.around += size.final_norm_parameters
            self.terms += size.final_norm_parameters
            if len(ranks) > 1 or not size.tied:
                self.around += self.embedding
        if not self.config.sequence_parallel:
            self.terms = 0
        self.parameters = self.in_blocks + self.around
        # Bytes of a block's parameters, and of all, in the compute dtype or quantized: NF4 has 4
        # bits for a value and an fp32 scale for 64.
        matrices = sum(rows * columns for rows, columns in size.block_matrices)
        saved = (16 * self.width - 9) * matrices // 16 if self.config.base_dtype == "nf4" else 0
        self.frozen_bytes = self.width * self.parameters - self.num_blocks * saved
        self.learning = self.parameters
        if self.frozen:
            config = self.config
            adapters = size.count_adapters(config.lora_rank, config.lora_targets, self.tp)
            self.learning, self.terms = (self.num_blocks * count for count in adapters)
            self.in_blocks += self.learning

    def sent(self) -> dict[str, float]:
        """Map "axis kind" to the bytes that the process sends."""
        return {
            f"{axis} {kind}": sent_bytes(kind, size, 2 if axis == "pp" else self.mesh[axis])
            for (axis, kind), size in sorted(self.total().items())
        }

    def total(self) -> Bytes:
        """Return all traffic but numbers of at most 8 bytes."""
        return self.pipeline() + self.tensor() + self.data()

    def data(self) -> Bytes:
        """Return the traffic of dp and fsdp, alone or inside tp and pp, or of DeepSpeed's
        stages."""
        if self.strategy.traits.takes_json:
            return self.zero()
        if self.plan.only_copies:  # once per step, or less often
            return self.averaged()
        traffic: Bytes = Counter()
        if self.shards > 1:
            # FSDP gathers a block in every micro-batch, before its forward and backward pass. In a
            # pipeline it does so once per step.
            times = self.micro_batches if self.pp == 1 else 1
            gathers = 2 if self.pp == 1 else 1
            around = self.width * self.around
            adapters = self.width * (self.in_blocks + self.around - self.parameters)
            gathered = gathers * (self.frozen_bytes - around + adapters) + around
            traffic["dp_shard", "all_gather"] = times * gathered
            traffic["dp_shard", "reduce_scatter"] = times * 4 * self.learning
        if self.mesh["dp_replicate"] > 1:  # between copies, once per step
            traffic["dp_replicate", "all_reduce"] = 4 * self.learning // self.shards
        return traffic

    def averaged(self) -> Bytes:
        """Return the traffic with which DDP, or a strategy's own engine, averages gradients."""
        kinds = {"all_reduce": 2 * self.learning}
        if self.config.gradient_compression == "none":
            matrices = [] if self.frozen else self.matrices()  # adapters are as small
            values = self.plan.engine_options
            options = strategy_options(self.strategy.name)(**values) if values else Options()
            kinds = options.sent_bytes(self.learning, matrices, self.mesh["dp_replicate"])
        steps = self.steps_between_exchanges or 1
        return Counter({("dp_replicate", kind): sent // steps for kind, sent in kinds.items()})

    def matrices(self) -> list[tuple[int, int]]:
        """Return the (rows, columns) of all matrices of the model."""
        size = self.size
        hidden = size.hidden_size
        tables = [(size.padded_vocab_size, hidden)] * (1 if size.tied else 2)
        positions = (size.position_parameters // hidden, hidden)
        return [*size.block_matrices] * self.num_blocks + [*tables, positions]

    def tensor(self) -> Bytes:
        """Return the traffic of tp. With sequence parallelism a block gathers and reduce-scatters
        twice in each direction; without it, it all-reduces as often. Embedding, output layer and
        loss follow. Gradients of norms and positions are exchanged once per step."""
        if self.tp == 1:
            return Counter()
        count = self.micro_batches
        exchanged = count * 4 * self.num_blocks * self.hidden
        reduced = 4 * self.terms // self.shards
        gathered = 0
        if self.last:
            exchanged += count * self.hidden
            if self.config.loss_chunk_tokens:  # two fp32 numbers per token of each process
                gathered += count * 8 * self.tokens * self.tp
            else:
                reduced += count * 12 * self.tokens
        if self.first and not self.frozen:  # parameters are fp32 where FSDP rounds none
            width = self.width if self.plan.num_processes > self.tp else 4
            exchanged += count * self.tokens * self.size.hidden_size * width
        # Recomputation stops before the last exchange of the forward pass, whose result is unused.
        again = 0
        if self.config.activation_checkpointing != "none":
            again = count * self.num_blocks * self.hidden
        if not self.config.sequence_parallel:
            sums = exchanged + again + reduced
            return Counter({("tp", "all_reduce"): sums, ("tp", "all_gather"): gathered})
        return Counter(
            {
                ("tp", "all_reduce"): reduced,
                ("tp", "all_gather"): exchanged + 2 * again + gathered,
                ("tp", "reduce_scatter"): exchanged + again,
            }
        )

    def pipeline(self) -> Bytes:
        """Return the traffic of pp: activations and their gradients, and once per step the gradient
        of a tied embedding."""
        split = self.tp if self.config.sequence_parallel else 1
        sent = self.edges * self.micro_batches * self.hidden // split
        traffic: Bytes = Counter({("pp", "send"): sent})
        if self.first != self.last and self.size.tied and not self.frozen:
            if self.strategy.traits.rounds_weights:
                traffic["pp", "all_reduce"] = self.width * self.embedding
            else:
                traffic["pp", "send"] += 4 * self.embedding // self.shards
        return traffic

    def zero(self) -> Bytes:
        """Return the traffic of ZeRO's stages, on the whole model or on a stage of a pipeline."""
        learning = self.width * self.learning
        zero = self.strategy.zero
        times = self.micro_batches if zero.stage > 1 else 1
        reduced = times * learning
        gathered = learning
        kind = "all_reduce"
        if zero.stage == 3:
            kind = "reduce_scatter"
            gathered = times * self.width * self.parameters
            if self.frozen:  # what was gathered stays until the update
                gathered = self.width * self.parameters + learning
            if not zero.stage3_max_reuse_distance:
                gathered *= 2
        return Counter({("dp_shard", "all_gather"): gathered, ("dp_shard", kind): reduced})
