"""Memory of one process by component: what a step holds at its fullest moment. No torch import.

State comes from predict/state.py; here come copies, buffers and activations. A block's activations
are counted in values of the arithmetic's width for each token and unit of hidden size, tensor by
tensor as the model (models/*/model.py) and torch.compile keep them.
"""

from __future__ import annotations

from dataclasses import dataclass

from distributed_training.plan.plan import Plan
from distributed_training.predict.constants import FITTED
from distributed_training.predict.stages import find_orders
from distributed_training.predict.state import estimate_copy, estimate_state, state_of
from distributed_training.predict.traffic import Formulas

COMPONENTS = (
    "parameters", "gradients", "optimizer", "copies", "buffers", "activations", "logits",
)  # fmt: skip
SPLIT_LOGIT_BYTES = 2  # a logit, of a micro-batch whose W is still to come
STATISTICS_BYTES = 2 * 2 * 4  # mean and deviation of two norms, fp32, a token and block
SWAP_BYTES = 2  # a value in the buffers of RAM between files and GPU, in fp32 runs, too


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Peak bytes of the processes along pp, those of each place being alike."""

    by_place: tuple[dict[str, int], ...]  # component -> bytes when all of them together are most
    likely: tuple[float, float]  # of what was measured by what was predicted, of runs of this kind
    context_bytes: int  # outside of the allocator, on a GPU
    host_bytes: int  # RAM of one process
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
        return self.peak_bytes + self.context_bytes

    @property
    def likely_bytes(self) -> tuple[int, int]:
        """From the least to the most that a GPU is likely to have to have."""
        least, most = (round(share * self.peak_bytes) for share in self.likely)
        return least + self.context_bytes, most + self.context_bytes


def estimate_memory(plan: Plan, *, tokenised: bool = False) -> MemoryEstimate:
    """Peaks by component of a plan's processes; `tokenised`: the samples are there already."""
    by_place = tuple(_Process(plan, place).peak() for place in range(plan.mesh["pp"]))
    held = _host_bytes(plan, max(sum(parts.values()) for parts in by_place), tokenised)
    copy = estimate_copy(plan)
    if (held + copy) * plan.processes_here <= plan.machine.ram_bytes:
        held += copy  # else training waits while it saves
    context = 0
    if plan.machine.num_gpus:
        context = FITTED.gpu_context_bytes.alone
        if plan.num_processes > 1:
            context += FITTED.gpu_context_bytes.nccl
    return MemoryEstimate(
        by_place=by_place,
        likely=tuple(
            FITTED.likely_bytes.compiled if plan.config.compile else FITTED.likely_bytes.eager
        ),
        context_bytes=context,
        host_bytes=held,
        disk_bytes=estimate_state(plan).disk,
    )


def _host_bytes(plan: Plan, peak: int, tokenised: bool) -> int:
    """RAM of a process, without the copy for a checkpoint."""
    fitted = FITTED.process_bytes
    held = fitted.cuda if plan.machine.num_gpus else fitted.cpu
    held += SWAP_BYTES * plan.strategy.swap_buffer_values
    if plan.strategy.traits.takes_deepspeed_json or plan.mesh["tp"] > 1:
        held += fitted.libraries
    if plan.num_processes == 1 and not tokenised:
        held += fitted.tokenising
    # The model is built on the host, whole; without a GPU the peak of a step lies there, too.
    model = 4 * plan.size.num_parameters
    held += model if plan.machine.num_gpus else max(peak, model)
    return int(held + estimate_state(plan).host)


def block_bytes(plan: Plan) -> float:
    """What one block keeps of one micro-batch for its backward pass, in the first process."""
    return _Process(plan, 0).block_bytes(plan.config.activation_checkpointing)


class _Process(Formulas):
    """What the process at one place along pp holds."""

    def __init__(self, plan: Plan, place: int) -> None:
        super().__init__(plan, place)
        # Where DDP averages gradients in every step, in buckets that stay.
        self.has_buckets = plan.uses_ddp and self.steps_between_exchanges is None

    def peak(self) -> dict[str, int]:
        """The fuller of two moments: inside forward and backward, and in the optimizer step."""
        moments = [self._while_computing(), self._at_the_update()]
        fullest = max(moments, key=lambda parts: sum(parts.values()))
        return {name: round(fullest.get(name, 0)) for name in COMPONENTS}

    def _while_computing(self) -> dict[str, float]:
        blocks, logits = self._activations()
        state = self._state()
        # Those that stay are in DDP's buckets, in ZeRO-3's flat buffer, or of micro-batches before.
        in_buffer = self.has_buckets or self.strategy.zero_stage == 3
        if not in_buffer and self.micro_batches == 1:
            state["gradients"] = 0.0
        # Buckets fill when the loss has gone backward, and its logits are gone.
        state["buffers"] += max(0.0, self._zero_buckets() - logits)
        return {**state, "activations": blocks + self._end_bytes(), "logits": logits}

    def _at_the_update(self) -> dict[str, float]:
        """All gradients and what the update itself needs."""
        state = self._state()
        if not self.strategy.traits.rounded_weights:
            if self.size.tied and not self.frozen:  # a second gradient is added to the first
                state["buffers"] += 4 * self.embedding
            if self.pp == 1 and self.plan.only_copies:
                state["copies"] = 0.0  # what autograd kept is gone
        elif not self.strategy.steps_on_host:
            # DeepSpeed makes fp32 gradients of its part for Adam, and has a flat copy of the
            # rounded.
            state["buffers"] += (4 + self.width) * self.learning / self.shards
        return state

    def _state(self) -> dict[str, float]:
        """Parameters, gradients, optimizer state, their copies and the buffers that stay."""
        plan = self.plan
        held = self.parameters
        state = state_of(self)
        parts: dict[str, float] = {
            "parameters": state.parameters,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "copies": 0,
            "buffers": 0,
        }
        if self.strategy.traits.rounded_weights:
            parts["copies"] = self._gathered_by_zero3()
        elif self.pp > 1:
            # What predict/state.py counts as parameters: shards, and what is gathered or rounded.
            shard = (self.width if self.frozen else 4) * held / self.shards
            parts["copies"] = parts["parameters"] - shard
            parts["parameters"] = shard
        elif plan.uses_fsdp:
            block = self.in_blocks / max(1, self.num_blocks)
            # The root's parameters stay gathered, of the blocks the one in use and those ahead.
            blocks = (1 + plan.config.fsdp_prefetch) * block
            parts["copies"] = self.width * (self.around + blocks)
            each = self.learning / max(1, self.num_blocks) if self.frozen else block
            parts["buffers"] = 4 * each  # whole gradients on their way to a reduce-scatter
        elif self.width == 2:
            # Rounded weights, kept for the backward pass where it does not round them again.
            recomputes = plan.config.activation_checkpointing != "none"
            rounded = self.around if recomputes else held
            parts["copies"] = 2.0 * (self.learning if self.frozen else rounded)
        if self.has_buckets and self.micro_batches > 1:
            parts["buffers"] += parts["gradients"]  # summed beside the buckets until the last one
        return parts

    def _gathered_by_zero3(self) -> float:
        """What ZeRO-3 has of other processes' parameters, or of those on the host or a disk."""
        strategy = self.strategy
        if strategy.zero_stage < 3:
            return 0.0
        most = strategy.document["zero_optimization"].get("stage3_max_live_parameters", 1e9)
        share = 1.0 if strategy.fetches_parameters else 1 - 1 / self.shards
        return self.width * min(most, self.parameters) * share

    def _zero_buckets(self) -> float:
        """DeepSpeed's two buckets of gradients: one fills while the other is reduced."""
        strategy = self.strategy
        if strategy.zero_stage not in (1, 2) or self.pp > 1:
            return 0.0
        bucket = strategy.document["zero_optimization"].get("reduce_bucket_size", 5e8)
        return 2 * self.width * float(min(bucket, self.learning))

    def _end_bytes(self) -> float:
        """Around the blocks: on the last stage input and output of the last norm, the gradient of
        one, and of the output layer's weight; messages of a pipeline; on the first the embedding's
        gradient."""
        found = 0.0
        embedding = 0 if self.frozen else self.embedding
        if self.last:
            found += self.hidden * (self.between + 2) + self.width * embedding
        if self.pp > 1:
            # torch has a buffer for each message of a step that this process receives.
            found += self.edges * self.micro_batches * self.hidden * self.between
            if self.first:
                found += 4 * embedding
        return found

    def block_bytes(self, checkpointing: str) -> float:
        """What one block keeps of one micro-batch for its backward pass."""
        split = 1 / self.tp
        between = self.between
        if checkpointing == "full":
            return self.hidden * between
        values = 2 * between + self.split_values * split
        values += 2  # whole: what both column-split layers multiply
        if checkpointing == "selective":
            # Inputs, and what attention and matrix products return; the last of them only eagerly,
            # as nobody's gradient needs it.
            returned = (self.size.values_in + self.size.attention_width) / self.size.hidden_size
            values = (2 if self.config.compile else 3) * between + returned * split
        elif self.config.dropout:  # a byte for each value that two masks are for
            values += 2 * between / self.width
        statistics = 4 * self.size.num_heads * split + STATISTICS_BYTES * between
        return self.hidden * values + self.tokens * statistics

    def _logits(self) -> tuple[float, float, float]:
        """Bytes (kept from forward to backward pass, at the worst moment, until a W to come).

        The compiled loss keeps logits and writes their gradient over them. Eagerly log_softmax
        keeps its fp32 result, and its backward pass holds two more of that size. Over tp the
        probabilities are kept in fp32, and the gradient comes on top.
        """
        rows = self.size.padded_vocab_size
        chunk = self.config.loss_chunk_tokens
        kept = self.width
        worst = self.width
        if not self.config.compile:
            kept = 4
            worst = 12
        if self.tp > 1:
            kept = 4
            worst = 4 + self.width
        count = self.tokens * rows / self.tp
        if not chunk:
            return kept * count, worst * count, SPLIT_LOGIT_BYTES * count
        # Gradients of hidden states and output rows; these also in fp32, and of one chunk more.
        hidden = self.size.hidden_size
        learning = 0 if self.frozen else rows
        gradients = (self.tokens + learning) * hidden * self.width
        beside = rows * min(chunk, self.tokens) * (worst + self.width)
        return gradients, gradients + learning * hidden * (4 + self.width) + beside, 0.0

    def _activations(self) -> tuple[float, float]:
        """(of blocks, of logits) at the fullest moment, following the process's own order."""
        blocks = self.plan.layout.blocks_per_stage
        mode = self.config.activation_checkpointing
        each = self.block_bytes(mode)
        kept, worst, waiting = self._logits()
        # From I to W. Compiled: every matrix's input and the gradient of its output
        # (parallel/zero_bubble.py), together as large as the activations that they replace; over tp
        # the gradients of both sums are whole where what lies between layers is not. Eagerly these
        # gradients come on top of the activations, but for the first stage: without inputs to
        # find gradients for, its W does all.
        pending = 2 * (1 - self.between) * self.hidden
        pending_first = pending
        if self.config.compile:
            waiting = 0.0
        else:
            pending = self.tokens * self.width * sum(rows for rows, _ in self.size.block_matrices)
            pending_first = 0.0
        # Inside a block the gradients of what attention and MLP give to their last matrices.
        backward = self.tokens * self.width * self.size.values_out / self.tp
        if mode != "none":
            backward += self.block_bytes("none")
        of_block = {"F": each, "B": -each, "I": pending, "W": -each - pending}
        of_first_block = {"F": each, "B": -each, "I": pending_first, "W": -each - pending_first}
        of_logits = {"F": kept, "B": -kept, "I": waiting - kept, "W": -waiting}
        held = held_logits = 0.0
        most = (0.0, 0.0)
        for operation, stage, _ in find_orders(self.plan)[self.place]:
            last = stage == len(blocks) - 1
            action = "B" if self.frozen and operation == "I" else operation
            if self.frozen and action == "W":  # nothing is left for it
                continue
            during = (held, held_logits)
            held += blocks[stage] * (of_block if stage else of_first_block)[action]
            if last:
                held_logits += of_logits[action]
            if action == "F":
                during = (held, held_logits)
            if last and action != "W":
                during = (during[0], during[1] + worst - kept)
            elif action in "BI":
                during = (during[0] + backward, during[1])
            most = max(most, during, key=sum)
        return most
