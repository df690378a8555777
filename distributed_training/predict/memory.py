"""Estimate the peak memory of one process by component. No torch import.

Model state is counted in bytes per parameter. Activations of a block are counted in values of the
compute dtype per token and hidden unit, tensor by tensor, as the model (models/*/model.py) and
torch.compile keep them."""

from collections.abc import Mapping
from dataclasses import dataclass

from distributed_training.plan.orders import find_orders
from distributed_training.plan.plan import Draft
from distributed_training.predict.costs.lora import base_bytes
from distributed_training.predict.costs.precision import MOMENT_BYTES
from distributed_training.predict.mechanism import Place, all_places
from distributed_training.predict.rates import FITTED
from distributed_training.settings.strategies import Strategy

STATE = ("parameters", "gradients", "optimizer")
OFFLOADED = {"cpu": "host", "nvme": "disk"}  # DeepSpeed's devices -> `estimate_state`'s
COMPONENTS = (*STATE, "copies", "buffers", "activations", "logits")
SPLIT_LOGIT_BYTES = 2  # per logit of a micro-batch whose W has not run
EAGER_CHUNK = 17  # bytes per logit of one chunk that loss_and_gradient allocates, uncompiled
STATISTICS_BYTES = 2 * 2 * 4  # fp32 mean and deviation of two norms, per token and block


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Peak bytes of the processes of each pipeline rank."""

    by_place: list[dict[str, int]]  # component -> bytes at the moment of the largest sum
    likely_bytes: list[int]  # least and most that a GPU is likely to need
    context_bytes: int  # outside of the allocator, on a GPU
    host_bytes: int  # RAM of one process
    disk_bytes: int  # files of one process

    @property
    def fullest(self) -> dict[str, int]:
        """The components of the fullest process."""
        return max(self.by_place, key=_total)

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors in the fullest process."""
        return sum(self.fullest.values())

    @property
    def needed_bytes(self) -> int:
        """Bytes that a GPU must have."""
        return self.peak_bytes + self.context_bytes


def estimate_memory(plan: Draft, *, tokenised: bool = False) -> MemoryEstimate:
    """Estimate the peak of a plan's processes by component. `tokenised`: the token cache has the
    samples."""
    by_place = [Held(plan, stage).peak() for stage in range(plan.mesh["pp"])]
    peak = max(map(_total, by_place))
    context = 0
    if plan.machine.num_gpus:
        context = FITTED.gpu_context_bytes.alone
        if plan.num_processes > 1:
            context += FITTED.gpu_context_bytes.nccl
    likely = FITTED.likely_bytes.compiled if plan.config.compile else FITTED.likely_bytes.eager
    state = estimate_state(plan)
    fitted = FITTED.process_bytes
    on_host = state["host"] + (fitted.cuda if plan.machine.num_gpus else fitted.cpu)
    on_host += 2 * plan.strategy.swap_buffer_values  # two bytes each, also in fp32 runs
    if plan.strategy.traits.package or plan.mesh["tp"] > 1:
        on_host += fitted.libraries
    if plan.num_processes == 1 and not tokenised:
        on_host += fitted.tokenising
    # DeepSpeed is given the whole model on the host. PyTorch's parallelism reads or makes this
    # process's part of two parameters at a time. Without a GPU, the peak of a step is also in RAM.
    model = 4.0 * plan.size.num_parameters
    if plan.strategy.traits.builds_on_device:
        parts = plan.mesh["tp"] * (plan.mesh["dp_shard"] if plan.uses_fsdp else 1)
        model = 8 * plan.size.padded_vocab_size * plan.size.hidden_size / parts
    on_host += model if plan.machine.num_gpus else max(peak, model)
    copy = estimate_copy(plan)
    if (on_host + copy) * plan.processes_here <= plan.machine.ram_bytes:
        on_host += copy  # else training waits while it saves
    return MemoryEstimate(
        by_place=by_place,
        likely_bytes=[round(share * peak) + context for share in likely],
        context_bytes=context,
        host_bytes=int(on_host),
        disk_bytes=state["disk"],
    )


def estimate_state(plan: Draft) -> dict[str, int]:
    """Return the bytes of model state of the process that holds most of the model: each of STATE on
    the device, and offloaded state on "host" and "disk"."""
    return _state_of(max(all_places(plan), key=lambda process: process.parameters))


def estimate_copy(plan: Draft) -> int:
    """Return the bytes that a process copies for a checkpoint: its share of fp32 weights and Adam
    moments, and its own state."""
    if plan.config.checkpoint_every in (0, "signal") or plan.strategy.swaps_to_disk:
        return 0
    held = max(process.learning for process in all_places(plan))
    per_parameter = 12 / plan.batch.num_replicas + plan.engine_bytes_per_parameter
    if plan.steps_between_exchanges is not None:  # replicas differ
        per_parameter += 12
    return round(held * per_parameter)


def bytes_a_parameter(
    strategy: Strategy, precision: str, mesh: Mapping[str, int], optimizer: str = "adamw"
) -> dict[str, float]:
    """Return the bytes of `estimate_state` per parameter of a process's part under tp and pp.

    With rounded weights (ZeRO paper, section 3.1): parameters 2, gradients 2, fp32 master copy and
    both Adam moments 12 bytes per parameter. Otherwise fp32 parameters (4), gradients (4) and
    optimizer state (8, or fewer). Stages of a pipeline also count the parameters that they
    gather, or round, for all micro-batches of a step."""
    width = 4 if precision == "fp32" else 2
    shards = mesh["dp_shard"]
    stage = strategy.zero.stage
    per_parameter = {"parameters": 4 / shards, "gradients": 4 / shards}
    per_parameter["optimizer"] = MOMENT_BYTES[optimizer] / shards
    if strategy.traits.rounds_weights:
        per_parameter["parameters"] = width / (shards if stage >= 3 else 1)
        per_parameter["gradients"] = width / (shards if stage >= 2 else 1)
        per_parameter["optimizer"] = 12 / (shards if stage >= 1 else 1)
    elif mesh["pp"] > 1:
        if mesh["dp_replicate"] * shards > 1 or precision != "fp32":
            per_parameter["parameters"] += width
        per_parameter["gradients"] = 4
    per_parameter |= {"host": 0, "disk": 0}
    for what, part in (("optimizer", "optimizer"), ("param", "parameters")):
        if device := OFFLOADED.get(strategy.offload[what]):
            per_parameter[device] += per_parameter[part]
            per_parameter[part] = 0
    if strategy.steps_on_host:  # gradients wait in RAM, in fp32, for the optimizer step
        per_parameter["host"] += 4 / shards
        per_parameter["gradients"] = 0
    return per_parameter


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def _state_of(process: Place) -> dict[str, int]:
    plan = process.plan
    per_parameter = bytes_a_parameter(
        plan.strategy, plan.config.precision, plan.mesh, plan.config.optimizer
    )
    per_parameter["optimizer"] += plan.engine_bytes_per_parameter
    parts = {part: size * process.learning for part, size in per_parameter.items()}
    if process.frozen:
        divided = plan.uses_fsdp or plan.strategy.zero.stage == 3
        copies = 1 / process.shards if divided else 1
        if plan.uses_fsdp and process.pp > 1:  # gathered whole for all micro-batches
            copies += 1
        where = OFFLOADED.get(plan.strategy.offload["param"], "parameters")
        parts[where] += copies * base_bytes(process)
    return {part: round(size) for part, size in parts.items()}


class Held(Place):
    """Memory of the process at one pipeline rank."""

    def peak(self) -> dict[str, int]:
        """Return the largest of three peaks: in forward and backward, in the backward pass of the
        first block, and in the optimizer step."""
        moments = [self._while_computing(), self._at_the_update()]
        if self.pp == 1:
            moments.append(self._at_the_first_block())
        fullest = max(moments, key=_total)
        return {name: round(size) for name, size in fullest.items()}

    def _while_computing(self) -> dict[str, float]:
        parts = self._state()
        blocks, logits = self._activations()
        zero = self.strategy.zero
        # Gradients stay in DDP's buckets, in ZeRO-3's flat buffer, or from earlier micro-batches.
        if not self.has_buckets and zero.stage != 3 and self.micro_batches == 1:
            parts["gradients"] = 0
        if zero.stage in (1, 2) and self.pp == 1:
            # DeepSpeed has two buckets of gradients. One fills while the other is reduced, after
            # the backward pass of the loss has freed the logits.
            bucket = min(zero.reduce_bucket_size, self.learning)
            parts["buffers"] += max(0, 2 * self.width * bucket - logits)
        if self.pp > 1:
            # torch has a buffer for each message of a step that this process receives.
            blocks += self.edges * self.micro_batches * self.hidden * self.between
            if self.first and not self.frozen:
                blocks += 4 * self.embedding
        return parts | {"activations": blocks, "logits": logits}

    def _at_the_first_block(self) -> dict[str, float]:
        """Return the state, the gradients of all other blocks, and what the backward pass of the
        first block needs. It is the last of the step."""
        parts = self._state()
        block = self.learning / max(1, self.num_blocks)
        if not self.frozen:
            block = self.in_blocks / max(1, self.num_blocks)
            block += 0 if self.size.tied else self.embedding
        if not self.has_buckets and self.micro_batches == 1:
            parts["gradients"] *= 1 - block / self.learning
        if not (self.frozen or self.plan.uses_fsdp or self.strategy.traits.rounds_weights):
            parts["copies"] /= max(1, self.num_blocks)  # those of other blocks are gone
        kept = self.block_bytes(self.config.activation_checkpointing)
        parts["activations"] = kept + self._block_backward()
        return parts

    def _at_the_update(self) -> dict[str, float]:
        """Return the state, all gradients and the buffers of the update."""
        parts = self._state()
        if not self.strategy.traits.rounds_weights:
            if self.size.tied and not self.frozen:  # a second gradient is added to the first
                parts["buffers"] += 4 * self.embedding
            if self.pp == 1 and (self.plan.only_copies or not self.frozen):
                parts["copies"] = 0  # what autograd kept is gone
            if self.pp == 1 and not self.frozen and self.plan.uses_fsdp:
                # The root's gradients, whole in fp32 on their way to a reduce-scatter, and the
                # output rows' in the compute dtype. The parameters are no longer gathered.
                parts["buffers"] = 4 * self.around + self.width * self.embedding
            elif self.pp == 1 and self.tp > 1 and not self.frozen and not self.size.tied:
                # The embedding's gradient, summed over tp and copied to the parameter's layout
                parts["buffers"] += 2 * 4 * self.embedding
        elif not self.strategy.steps_on_host:
            # DeepSpeed makes fp32 gradients of its part for Adam, and has a flat copy of the
            # rounded.
            parts["buffers"] += (4 + self.width) * self.learning / self.shards
        return parts

    def _state(self) -> dict[str, float]:
        """Return parameters, gradients, optimizer state, their copies and permanent buffers."""
        config = self.config
        state = _state_of(self)
        parts: dict[str, float] = {part: state.get(part, 0) for part in COMPONENTS}
        if self.strategy.zero.stage == 3:
            # What it has of other processes' parameters, or of those on the host or a disk.
            most = min(self.strategy.zero.stage3_max_live_parameters, self.parameters)
            share = 1 if self.strategy.fetches_parameters else 1 - 1 / self.shards
            parts["copies"] = self.width * most * share
        elif self.pp > 1 and not self.strategy.traits.rounds_weights:
            # What counts as parameters above: shards, and what is gathered or rounded.
            shard = (self.width if self.frozen else 4) * self.parameters / self.shards
            parts["copies"] = parts["parameters"] - shard
            parts["parameters"] = shard
        elif self.plan.uses_fsdp:
            num_blocks = max(1, self.num_blocks)
            block = self.in_blocks / num_blocks
            # The root's parameters stay gathered, of the blocks the one in use and those ahead.
            frozen = (base_bytes(self) - self.width * self.around) / num_blocks
            adapters = self.width * self.adapters / num_blocks
            blocks = (1 + config.fsdp_prefetch) * (frozen + adapters)
            parts["copies"] = self.width * self.around + blocks
            per_block = self.learning / num_blocks if self.frozen else block
            parts["buffers"] = 4 * per_block  # whole gradients on their way to a reduce-scatter
        elif self.width == 2 and not self.strategy.traits.rounds_weights:
            # Rounded weights, kept for the backward pass where it does not round them again.
            rounded = self.parameters
            if self.frozen:
                rounded = self.learning
            elif config.activation_checkpointing != "none":
                rounded = self.around
            parts["copies"] = 2 * rounded
        if self.has_buckets and self.micro_batches > 1:
            parts["buffers"] += parts["gradients"]  # summed beside the buckets until the last one
        return parts

    def block_bytes(self, checkpointing: str) -> float:
        """Return the bytes that one block keeps of one micro-batch for its backward pass."""
        between = self.between
        if checkpointing == "full":
            return self.hidden * between
        if self.size.traced is not None:
            way = "compiled" if self.config.compile else "eager"
            way = "selective" if checkpointing == "selective" else way
            return self.traced_bytes("kept", way)
        split = 1 / self.tp
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
        """Return the bytes of logits: kept from forward to backward, at the peak, and until W.

        The compiled loss keeps logits and writes their gradient over them. Eagerly log_softmax
        keeps its fp32 result, and its backward pass holds two more of that size. Over tp the
        probabilities are kept in fp32, and the gradient comes on top."""
        rows = self.size.padded_vocab_size
        chunk = self.config.loss_chunk_tokens
        kept: float = self.width
        worst = self.width
        if self.tp > 1:
            kept = 4
            worst = 4 + self.width
        elif not self.config.compile:
            kept = 4
            worst = 12
        count = self.tokens * rows / self.tp
        if not chunk:
            return kept * count, worst * count, SPLIT_LOGIT_BYTES * count
        # Gradients of hidden states and output rows; then one chunk, and after it, where weights
        # are fp32, the rows' gradient in fp32.
        output_rows = 0 if self.frozen else rows * self.size.hidden_size / self.tp
        kept = self.hidden + self.width * output_rows
        share = min(int(chunk), self.tokens) / self.tokens
        beside = share * count * (self.width if self.config.compile else self.width + EAGER_CHUNK)
        if self.width < 4 and not (self.strategy.traits.rounds_weights or self.plan.uses_fsdp):
            beside = max(beside, 4 * output_rows)
        return kept, kept + beside, 0

    def _block_backward(self) -> float:
        """Return the bytes that the backward pass of a block needs beside what blocks keep.

        The peak is in the MLP: the gradient of its first matrix's output has been made, and that of
        the second matrix's input has taken the place of the input. With checkpointing, the block
        has been recomputed. Adapters: the gradients of the second matrix's input by the base and by
        the adapter, and recomputed outputs of both, exist side by side."""
        mode = self.config.activation_checkpointing
        if self.size.traced is not None:
            inner = self.size.values_out
            outer = inner
        else:
            outer, inner = self.size.block_matrices[2][0], self.size.block_matrices[3][1]
        values = outer
        if self.frozen:
            values += inner + (outer if mode != "none" else 0)
        backward = self.tokens * self.width * values / self.tp
        if self.config.base_dtype == "nf4":  # or a matrix in use, when outputs are gone
            largest = max(rows * columns for rows, columns in self.size.block_matrices)
            backward = max(backward, self.width * largest)
        if mode == "none":
            return backward + self.hidden * self.between  # the gradient that arrives
        return backward + self.block_bytes("none")  # its input makes room for that gradient

    def _activations(self) -> tuple[float, float]:
        """Return the bytes (of blocks, of logits) at the peak of the process's order."""
        blocks = self.plan.layout.blocks_per_stage
        mode = self.config.activation_checkpointing
        per_block = self.block_bytes(mode)
        kept, worst, waiting = self._logits()
        # From I to W. Compiled: every matrix's input and the gradient of its output
        # (parallel/zero_bubble.py), together as large as the activations that they replace; over tp
        # the gradients of both sums are whole where what lies between layers is not. Eagerly these
        # gradients come on top of the activations.
        compiled = self.config.compile
        pending = 2 * (1 - self.between) * self.hidden
        if compiled:
            waiting = 0
        else:
            pending = self.tokens * self.width * sum(rows for rows, _ in self.size.block_matrices)
        backward = self._block_backward()
        # Around the blocks of the last stage: input and output of the last norm, the gradient of
        # one, and of the output layer's weight.
        beside_loss = 0.0
        if self.last:
            beside_loss = self.hidden * (self.between + 2)
            if not (self.frozen or self.config.loss_chunk_tokens):  # else `_logits` counts it
                beside_loss += self.width * self.embedding
        # After the loss, the gradient of the output rows is kept in the parameter's dtype, where
        # gradients are not counted otherwise.
        after_loss = 0.0
        if not (self.frozen or self.has_buckets or self.micro_batches > 1):
            sharded = self.strategy.traits.rounds_weights or self.plan.uses_fsdp
            after_loss = (self.width if sharded else 4) * self.embedding
        of_logits = {"F": kept, "B": -kept, "I": waiting - kept, "W": -waiting}
        held = held_logits = 0.0
        most = (0.0, 0.0)
        for operation, stage, _ in find_orders(self.plan)[self.place]:
            last = stage == len(blocks) - 1
            action = "B" if self.frozen and operation == "I" else operation
            if self.frozen and action == "W":  # nothing is left for it
                continue
            during = (held, held_logits)
            # Without inputs to find gradients for, the first stage's W does all, if not compiled.
            later = pending if stage or compiled else 0.0
            of_block = {"F": per_block, "B": -per_block, "I": later, "W": -per_block - later}
            held += blocks[stage] * of_block[action]
            if last:
                held_logits += of_logits[action]
            if action == "F":
                during = (held, held_logits)
            moments = [during]
            if last and action != "W":
                moments.append((during[0], during[1] + worst - kept))
            if action in "BI":
                logits = during[1] - kept + after_loss if last else during[1]
                freed = beside_loss if self.pp == 1 else 0
                moments.append((during[0] + backward - freed, logits))
            most = max(most, *moments, key=sum)
        return most[0] + beside_loss, most[1]
