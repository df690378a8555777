"""Memory of one process by component: what a step holds at its fullest moment. No torch import.

State comes from predict/state.py; here come copies, buffers and activations. A block's activations
are counted in values of the arithmetic's width for each token and unit of hidden size, tensor by
tensor as the model (models/gpt2/model.py) and torch.compile keep them.
"""

from __future__ import annotations

from dataclasses import dataclass

from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import Topology
from distributed_training.predict.orders import Order
from distributed_training.predict.stages import find_orders
from distributed_training.predict.state import estimate_state, lost_bytes
from distributed_training.predict.traffic import Formulas

COMPONENTS = (
    "parameters", "gradients", "optimizer", "copies", "buffers", "activations", "logits",
)  # fmt: skip
# Gradients that exist at once while one block's backward pass runs: of the MLP's hidden units (4)
# and of the residual stream (1), in values a token and unit of hidden size.
BACKWARD_VALUES = 5
# Kept from a backward pass for inputs to the one for weights. Compiled, every matrix's input and
# the gradient of its output (parallel/zero_bubble.py), together as large as the activations that
# they replace. Eagerly, by records of when autograd cut the pass, so much more than those (pp4
# zb-h1 m16 of gpt2-medium).
SPLIT_VALUES = 12
STATISTICS_BYTES = 16  # mean and deviation of two norms, fp32, a token and block
# Bytes a logit: (kept from forward to backward, at the worst moment), for 16-bit arithmetic. The
# compiled loss keeps 16-bit logits and writes the gradient over them. Eagerly log_softmax keeps its
# fp32 result, and its backward pass holds two more of that size. Over tp the probabilities are kept
# in fp32, and the 16-bit gradient comes on top.
LOGIT_BYTES = {"compiled": (2, 2), "eager": (4, 12), "split": (4, 6)}
WIDE_LOGIT_BYTES = {"compiled": (4, 4), "eager": (4, 12), "split": (4, 8)}  # in fp32
SPLIT_LOGIT_BYTES = 2  # a logit, of a micro-batch whose W is still to come
# The CUDA context with the kernels of torch and cuBLAS, and NCCL's buffers: outside of torch's
# allocator. Both as nvidia-smi shows on an H200.
CONTEXT_BYTES, NCCL_BYTES = 600 * 2**20, 900 * 2**20
# RAM of a process before it has a model, as measured on 2 cores, and with CUDA; more with
# DeepSpeed, with layers split as DTensors, and where it has also tokenised the text.
HOST_BYTES, CUDA_HOST_BYTES = 380 * 2**20, 1330 * 2**20
DEEPSPEED_BYTES, TP_BYTES, TOKENISING_BYTES = 60 * 2**20, 100 * 2**20, 150 * 2**20
SWAP_BYTES = 2  # a value of infinity's buffers, in fp32, too
PINNED = 1.3  # offload's page-locked memory is rounded up to powers of two, buffer by buffer
SPARE = 0.02  # of the rest: what the allocator cannot use of the blocks that it has


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Peak bytes of the processes along pp, those of each place being alike."""

    by_place: tuple[dict[str, int], ...]  # component -> bytes when all of them together are most
    context_bytes: int  # outside of the allocator, on a GPU
    host_bytes: int  # RAM of one process
    # Of that, the copy from which a checkpoint is written; 0 where none is made, as where RAM has
    # no room for it: then training waits while it saves.
    copy_bytes: int
    disk_bytes: int  # files of one process

    @property
    def fullest(self) -> dict[str, int]:
        """The components of the fullest process."""
        return max(self.by_place, key=lambda parts: sum(parts.values()))

    @property
    def peak_bytes(self) -> int:
        """What the fullest process's tensors hold."""
        return sum(self.fullest.values())

    @property
    def needed_bytes(self) -> int:
        """What a GPU must have for it."""
        return round(self.peak_bytes * (1 + SPARE)) + self.context_bytes


def estimate_memory(plan: Plan, *, tokenised: bool = False) -> MemoryEstimate:
    """Peaks by component of a plan's processes; `tokenised`: the samples are there already."""
    places = range(plan.mesh["pp"])
    state = estimate_state(plan)
    on_gpu, several = plan.machine.num_gpus > 0, plan.num_processes > 1
    by_place = tuple(_Process(plan, place).peak() for place in places)
    host = CUDA_HOST_BYTES if on_gpu else HOST_BYTES
    host += DEEPSPEED_BYTES * plan.strategy.traits.takes_deepspeed_json
    host += TP_BYTES * (plan.mesh["tp"] > 1) + SWAP_BYTES * plan.strategy.swap_buffer_values
    host += TOKENISING_BYTES * (not several and not tokenised)
    # The model is built on the host, whole; without a GPU the peak of a step lies there, too.
    held = max(sum(parts.values()) for parts in by_place) * (not on_gpu)
    held = round(host + max(held, 4 * plan.size.num_parameters) + PINNED * state.host)
    copy = estimate_copy(plan)
    copy *= (held + copy) * plan.processes_here <= plan.machine.ram_bytes
    return MemoryEstimate(
        by_place=by_place,
        context_bytes=(CONTEXT_BYTES + NCCL_BYTES * several) * on_gpu,
        host_bytes=held + copy,
        copy_bytes=copy,
        disk_bytes=state.disk,
    )


def estimate_copy(plan: Plan) -> int:
    """Bytes that a process copies for a checkpoint: weights and moments in fp32, which all that
    hold the same divide, and what each process has for itself."""
    if plan.config.checkpoint_every == 0 or plan.strategy.swaps_to_disk:
        return 0
    held = max(_Process(plan, place).parameters for place in range(plan.mesh["pp"]))
    copies = plan.mesh["dp_replicate"] * plan.mesh["dp_shard"]
    own = plan.options.bytes_a_parameter() + lost_bytes(plan)
    if plan.options.steps_between_exchanges() is not None:  # no two replicas hold the same
        own += 12
    return round(held * (12 / copies + own))


def block_bytes(plan: Plan) -> float:
    """What one block keeps of one micro-batch for its backward pass, in the first process."""
    return _Process(plan, 0).block_bytes()


class _Process:
    """The process at one place along pp."""

    def __init__(self, plan: Plan, place: int) -> None:
        self.plan, self.config, self.size = plan, plan.config, plan.size
        mesh = plan.mesh
        per_stage = plan.num_processes // mesh["pp"]
        device = "cuda" if plan.machine.num_gpus else "cpu"
        topology = Topology(
            world_size=plan.num_processes, rank=place * per_stage, local_rank=0,
            device_type=device, **mesh,
        )  # fmt: skip
        self.formulas = Formulas(plan, topology)
        self.parameters = self.formulas.in_blocks + self.formulas.around
        self.width = self.formulas.width
        self.tokens, self.tp, self.shards = self.formulas.tokens, mesh["tp"], mesh["dp_shard"]
        self.order: Order = find_orders(plan)[place]

    def peak(self) -> dict[str, int]:
        """The fuller of two moments: inside forward and backward, and in the optimizer step."""
        moments = [self._while_computing(), self._at_the_update()]
        fullest = max(moments, key=lambda parts: sum(parts.values()))
        return {name: round(fullest.get(name, 0)) for name in COMPONENTS}

    def _while_computing(self) -> dict[str, float]:
        blocks, logits = self._activations()
        state = self._state()
        if not self._gradients_stay():
            state["gradients"] = 0.0
        # Buckets fill when the loss has gone backward, and its logits are gone.
        state["buffers"] += max(0.0, self._bucket_bytes() - logits)
        return {**state, "activations": blocks + self._end_bytes(), "logits": logits}

    def _at_the_update(self) -> dict[str, float]:
        """All gradients and what the update itself needs; the tied embedding's gradient comes in
        two parts, of which the second is added to the first."""
        state = self._state()
        strategy, embedding = self.plan.strategy, self.formulas.embedding
        if not strategy.traits.rounded_weights:
            state["buffers"] += 4 * embedding * self.size.tied
            # What autograd kept is gone.
            return state if self.plan.mesh["pp"] > 1 or self._fsdp else {**state, "copies": 0.0}
        if strategy.steps_on_host:
            return state
        shard = self.parameters / self.shards
        # DeepSpeed makes fp32 gradients of its part for Adam, and has a flat copy of the rounded.
        state["buffers"] += 4 * shard + self.width * shard
        return state

    def _state(self) -> dict[str, float]:
        """Parameters, gradients, optimizer state, their copies and the buffers that stay."""
        plan, traits, held = self.plan, self.plan.strategy.traits, self.parameters
        scale = held / plan.layout.num_parameters  # of the fullest place, without padding
        state = estimate_state(plan)
        parts = {
            "parameters": state.parameters * scale,
            "gradients": state.gradients * scale,
            "optimizer": state.optimizer * scale,
            "copies": 0.0,
            "buffers": 0.0,
        }
        if traits.rounded_weights:
            parts["copies"] = self._gathered_by_deepspeed()
        elif plan.mesh["pp"] > 1:
            # What predict/state.py counts as parameters: shards, and what is gathered or rounded.
            copies = parts["parameters"] - 4 * held / self.shards
            parts |= {"parameters": 4 * held / self.shards, "copies": copies}
        elif plan.mesh["dp_replicate"] * self.shards > 1 and self._fsdp:
            block = self.formulas.in_blocks / max(1, self.formulas.num_blocks)
            # The root's parameters stay gathered, of the blocks the one in use and those ahead.
            blocks = (1 + plan.config.fsdp_prefetch) * block
            parts["copies"] = self.width * (self.formulas.around + blocks)
            parts["buffers"] = 4 * block  # whole gradients on their way to a reduce-scatter
        elif self.width == 2:
            parts["copies"] = 2.0 * held  # rounded weights, kept for the backward pass
        if self._in_ddps_buckets and plan.batch.num_microbatches > 1:
            parts["buffers"] += parts["gradients"]  # summed beside the buckets until the last one
        return parts

    @property
    def _in_ddps_buckets(self) -> bool:
        """Whether DDP averages gradients in every step."""
        plan, native = self.plan, not self.plan.strategy.traits.rounded_weights
        copies = plan.num_processes == plan.mesh["dp_replicate"] > 1
        return native and copies and plan.options.steps_between_exchanges() is None

    @property
    def _fsdp(self) -> bool:
        """Whether shards are gathered rather than copies kept whole (engines/native.py)."""
        return self.plan.num_processes != self.plan.mesh["dp_replicate"]

    def _gathered_by_deepspeed(self) -> float:
        """ZeRO-3 keeps what it gathered until `stage3_max_live_parameters` are there; what lies on
        the host or a disk comes to the GPU as well."""
        if self.plan.strategy.zero_stage < 3:
            return 0.0
        section = self.plan.strategy.document["zero_optimization"]
        gathered = min(section.get("stage3_max_live_parameters", 1e9), self.parameters)
        away = self.plan.strategy.offload_device("param") != "none"
        return self.width * gathered * (1.0 if away else 1 - 1 / self.shards)

    def _bucket_bytes(self) -> float:
        """DeepSpeed's two buckets of gradients: one fills while the other is reduced."""
        strategy = self.plan.strategy
        if strategy.zero_stage not in (1, 2) or self.plan.mesh["pp"] > 1:
            return 0.0
        bucket = strategy.document["zero_optimization"].get("reduce_bucket_size", 5e8)
        return 2 * self.width * float(min(bucket, self.parameters))

    def _gradients_stay(self) -> bool:
        """Whether gradients lie in memory while activations do: in DDP's buckets, in ZeRO-3's flat
        buffer, and from the second micro-batch on."""
        in_buckets = self._in_ddps_buckets or self.plan.strategy.zero_stage == 3
        return in_buckets or self.plan.batch.num_microbatches > 1

    def _end_bytes(self) -> float:
        """Around the blocks: on the last stage input and output of the last norm, the gradient of
        one, and of the output layer's weight; messages of a pipeline; on the first the embedding's
        gradient."""
        hidden = self.tokens * self.size.hidden_size * self.width
        found = 0.0
        if self.formulas.last:
            whole = 1 if self.config.sequence_parallel and self.tp > 1 else 1 / self._between
            found += hidden * (self._between + 2 * whole) + self.width * self.formulas.embedding
        if self.plan.mesh["pp"] > 1:
            pairs = zip(self.plan.layout.ranks, self.plan.layout.ranks[1:], strict=False)
            place = self.formulas.topology.pp_rank
            edges = sum(pair.count(place) for pair in pairs if pair[0] != pair[1])
            # torch has a buffer for each message of a step that this process receives.
            found += edges * self.plan.batch.num_microbatches * hidden * self._between
            found += 4 * self.formulas.embedding * self.formulas.first
        return found

    @property
    def _between(self) -> float:
        """Share of the tokens that a process holds between split layers."""
        return 1 / self.tp if self.config.sequence_parallel else 1.0

    def block_bytes(self) -> float:
        """What one block keeps of one micro-batch for its backward pass."""
        split, between = 1 / self.tp, self._between
        gathered = 1.0  # of the tokens: what both column-split layers multiply
        ratio = (self.size.block_matrix_parameters / self.size.hidden_size**2 - 4) / 2
        mode = self.config.activation_checkpointing
        values = 2 * between + 2 * gathered + (4 + 2 * ratio) * split
        if mode == "full":
            values = between
        elif mode == "selective":  # inputs, and what matrix products and attention return
            values = 3 * between + (4 + ratio) * split
        statistics = 4 * self.size.num_heads * split + STATISTICS_BYTES * between
        return self.tokens * (
            values * self.size.hidden_size * self.width + statistics * (mode != "full")
        )

    def _logits(self) -> tuple[float, float, float]:
        """Bytes (kept from forward to backward pass, at the worst moment, until a W to come)."""
        rows, chunk = self.size.padded_vocab_size, self.config.loss_chunk_tokens
        kind = "split" if self.tp > 1 else "compiled" if self.config.compile else "eager"
        kept, worst = (LOGIT_BYTES if self.width == 2 else WIDE_LOGIT_BYTES)[kind]
        count = self.tokens * rows / self.tp
        if not chunk:
            return kept * count, worst * count, SPLIT_LOGIT_BYTES * count
        # Gradients of hidden states and output rows; these also in fp32, and of one chunk more.
        hidden, beside = self.size.hidden_size, min(chunk, self.tokens) * (worst + self.width)
        gradients = (self.tokens + rows) * hidden * self.width
        return gradients, gradients + rows * (hidden * (4 + self.width) + beside), 0.0

    def _activations(self) -> tuple[float, float]:
        """(of blocks, of logits) at the fullest moment, following the process's own order."""
        blocks = self.plan.layout.blocks_per_stage
        each, hidden = self.block_bytes(), self.tokens * self.size.hidden_size * self.width
        kept, worst, waits = self._logits()
        tapped = bool(self.config.compile)
        # Over tp the gradients of both sums are whole where what lies between layers is not.
        whole = 2 * (1 - self._between) * hidden
        pending, waiting = (whole, 0.0) if tapped else (SPLIT_VALUES * hidden, waits)
        backward = BACKWARD_VALUES * hidden / self.tp
        if self.config.activation_checkpointing != "none":
            backward += self.tokens * 34 * self.size.hidden_size * self.width / 2 / self.tp
        held, held_logits, most = 0.0, 0.0, (0.0, 0.0)
        for action, stage, _ in self.order:
            last = stage == len(blocks) - 1
            if action == "F":
                held += blocks[stage] * each
                held_logits += kept * last
            during = (held + backward * (action in "BI"), held_logits)
            if last and action in "FBI":
                during = (held, held_logits + worst - kept)
            most = max(most, during, key=sum)
            if stage == 0 and action in "IW" and not tapped:  # without inputs W does all
                held -= blocks[stage] * each * (action == "W")
            elif action == "I":
                held += blocks[stage] * pending
                held_logits += (waiting - kept) * last
            elif action == "B":
                held -= blocks[stage] * each
                held_logits -= kept * last
            elif action == "W":
                held -= blocks[stage] * (each + pending)
                held_logits -= waiting * last
        return most
