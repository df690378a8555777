"""Bytes that a step hands to other processes, by the formulas of strategies/*/README.md.

No torch import. Sizes are those of the tensors given to an operation: of the whole one for
all-reduce, all-gather and reduce-scatter. `sent_bytes` is what follows for a process's network.
"""

from __future__ import annotations

from collections import Counter

from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology

Bytes = Counter[tuple[str, str]]  # (axis, kind of operation) -> bytes


def sent_bytes(kind: str, tensor_bytes: int, members: int) -> float:
    """What each of `members` processes sends where collectives run as rings."""
    turns = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    return turns[kind] * (members - 1) / members * tensor_bytes if kind in turns else tensor_bytes


def num_exact(num_values: int, share: float) -> int:
    """Values that top-k compression sends as they are."""
    return max(1, round(share * num_values))


def fullest_sent_bytes(plan: Plan) -> float:
    """What the process that sends most sends in a step, on average."""
    apart = plan.num_processes // plan.mesh["pp"]
    places = (
        Topology(world_size=plan.num_processes, rank=rank, local_rank=0, device_type="cpu",
                 **plan.mesh)
        for rank in range(0, plan.num_processes, apart)
    )  # fmt: skip
    return max(sum(Formulas(plan, place).sent().values()) for place in places)


class Formulas:
    """Those of the process at `topology` under `plan`."""

    def __init__(self, plan: Plan, topology: Topology) -> None:
        self.config, self.size, self.strategy = plan.config, plan.size, plan.strategy
        self.topology, self.ranks = topology, plan.layout.ranks
        self.every = plan.options.steps_between_exchanges()
        place, tp, size, batch = topology.pp_rank, topology.tp, plan.size, plan.batch
        self.first, self.last = self.ranks[0] == place, self.ranks[-1] == place
        held = zip(self.ranks, plan.layout.blocks_per_stage, strict=True)
        self.num_blocks = sum(count for rank, count in held if rank == place)
        self.micro_batches = batch.num_microbatches
        self.width = 4 if plan.config.precision == "fp32" else 2
        self.tokens = batch.micro_batch_size * plan.config.max_length
        # Of one micro-batch, between two blocks.
        self.activation = self.tokens * size.hidden_size * self.width
        self.embedding = size.padded_vocab_size * size.hidden_size // tp
        # Parameters before dp_shard divides them: in blocks, and in what lies around them.
        whole = size.block_parameters - size.block_parameters_split
        self.in_blocks = self.num_blocks * (size.block_parameters_split // tp + whole)
        own_rows = len(self.ranks) > 1 or not size.tied
        self.around = self.first * (self.embedding + size.position_parameters)
        self.around += self.last * (size.final_norm_parameters + self.embedding * own_rows)

    def sent(self) -> dict[str, float]:
        """ "axis kind" -> what the process sends, of what it sends at all."""
        found = {}
        for (axis, kind), size in sorted(self.total().items()):
            members = 2 if axis == "pp" else self.topology.axes[axis]
            if size:
                found[f"{axis} {kind}"] = sent_bytes(kind, size, members)
        return found

    def total(self) -> Bytes:
        """Everything but numbers of at most 8 bytes."""
        if self.strategy.traits.takes_deepspeed_json:
            return self.pipeline() + self.zero()
        return self.pipeline() + self.tensor() + self.data()

    def data(self) -> Bytes:
        """dp and fsdp, alone or inside tp and pp."""
        axes, held = self.topology, self.in_blocks + self.around
        if axes.dp_replicate == axes.world_size:  # DDP: once a step; or less often
            if self.config.gradient_compression != "none":
                return self.compressed(held)
            return Counter({("dp_replicate", "all_reduce"): 4 * held // (self.every or 1)})
        # FSDP: shards every micro-batch, within a pipeline once a step, where a block is gathered
        # once, too; between copies once a step.
        times, gathers = (1, 1) if axes.pp > 1 else (self.micro_batches, 2)
        found: Bytes = Counter()
        if axes.dp_shard > 1:
            gathered = self.width * (gathers * self.in_blocks + self.around)
            found["dp_shard", "all_gather"] = times * gathered
            found["dp_shard", "reduce_scatter"] = times * 4 * held
        if axes.dp_replicate > 1:
            found["dp_replicate", "all_reduce"] = 4 * held // axes.dp_shard
        return found

    def compressed(self, held: int) -> Bytes:
        """Gradients as DDP's hooks send them (parallel/compression.py), of one bucket; each more
        rounds once more."""
        kind, config, size = self.config.gradient_compression, self.config, self.size
        axis, members = "dp_replicate", self.topology.dp_replicate
        if kind == "topk-int8" and config.compression_k < 1:
            part = -(-held // members)
            message = members * (8 * num_exact(part, config.compression_k) + 4 + part)
            return Counter({(axis, "all_to_all"): message, (axis, "all_gather"): message})
        values = held
        if kind == "powersgd":
            vocabulary = (size.padded_vocab_size, size.hidden_size)
            matrices = [*size.block_matrices] * self.num_blocks + [vocabulary] * (2 - size.tied)
            matrices += [(size.position_parameters // size.hidden_size, size.hidden_size)]
            for rows, columns in matrices:
                factors = (rows + columns) * min(rows, columns, config.compression_rank)
                if 2 * factors < rows * columns:  # else torch sends the matrix
                    values -= rows * columns - factors
        return Counter({(axis, "all_reduce"): (2 if kind == "bf16" else 4) * values})

    def tensor(self) -> Bytes:
        """tp: with sequence parallelism a block gathers and reduce-scatters twice forward and twice
        backward, without it all-reduces as often; embedding, output layer, loss; gradients of norms
        and positions once a step, each process those of its shard.
        """
        if self.topology.tp == 1:
            return Counter()
        k, d = self.micro_batches, self.size.hidden_size
        rounded = self.topology.dp_size > 1 or self.topology.pp > 1
        outer = self.width if rounded else 4  # parameters are fp32 where FSDP rounds none
        embedded = self.tokens * d * outer
        exchanged = k * (4 * self.num_blocks + self.last) * self.activation
        exchanged += k * self.first * embedded
        # Recomputation stops before the last exchange of the forward pass: nobody needs its result.
        again = k * self.num_blocks * self.activation
        again *= self.config.activation_checkpointing != "none"
        loss = k * 12 * self.tokens * self.last
        if not self.config.sequence_parallel:
            return Counter({("tp", "all_reduce"): exchanged + again + loss})
        terms = self.num_blocks * self.size.block_norm_parameters
        terms += self.last * self.size.final_norm_parameters
        terms += self.first * self.size.position_parameters
        found: Bytes = Counter({("tp", "all_reduce"): loss + 4 * terms // self.topology.dp_shard})
        found["tp", "all_gather"] = exchanged + 2 * again
        found["tp", "reduce_scatter"] = exchanged + again
        return found

    def pipeline(self) -> Bytes:
        """pp: activations on, their gradients back; the tied embedding's gradient once a step."""
        axes = self.topology
        if axes.pp == 1:
            return Counter()
        split = axes.tp if self.config.sequence_parallel else 1
        pairs = list(zip(self.ranks, self.ranks[1:], strict=False))
        ends = sum(pair.count(axes.pp_rank) for pair in pairs if pair[0] != pair[1])
        sent = ends * self.micro_batches * self.activation // split
        found: Bytes = Counter({("pp", "send"): sent})
        if self.first != self.last and self.size.tied:
            if self.strategy.traits.rounded_weights:
                found["pp", "all_reduce"] = self.width * self.embedding
            else:
                found["pp", "send"] += 4 * self.embedding // axes.dp_shard
        return found

    def zero(self) -> Bytes:
        """DeepSpeed's stages, on the whole model or on a stage of its pipeline."""
        held = self.width * (self.in_blocks + self.around)
        section, k = self.strategy.document["zero_optimization"], self.micro_batches
        if section["stage"] == 3:
            gathers = 1 if section["stage3_max_reuse_distance"] else 2
            gathered, reduced = gathers * k * held, ("dp_shard", "reduce_scatter")
        else:
            gathered, reduced = held, ("dp_shard", "all_reduce")
        times = k if section["stage"] > 1 else 1
        return Counter({("dp_shard", "all_gather"): gathered, reduced: times * held})
