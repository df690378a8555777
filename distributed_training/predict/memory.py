"""Estimate the peak memory of one process by component. The estimate adds up the memory of the
mechanisms in predict/costs at three points in a step. This module does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from distributed_training.plan.orders import find_orders
from distributed_training.plan.plan import Draft
from distributed_training.predict.costs import used_by
from distributed_training.predict.costs.loss import loss_bytes
from distributed_training.predict.costs.pp import pending_bytes
from distributed_training.predict.mechanism import Mechanism, Moment, Parts, Place, all_places
from distributed_training.predict.rates import FITTED

STATE = ("parameters", "gradients", "optimizer")
COMPONENTS = (*STATE, "copies", "buffers", "activations", "logits")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Estimated peak memory of the processes on each pipeline rank, in bytes."""

    by_place: list[dict[str, int]]  # component -> bytes when their sum is largest
    likely_bytes: list[int]  # lower and upper ends of the likely need for GPU memory
    context_bytes: int  # on a GPU, outside PyTorch's allocator
    host_bytes: int  # RAM per process
    disk_bytes: int  # size of the files per process

    @property
    def fullest(self) -> dict[str, int]:
        """Memory by component, in bytes, of the process that uses the most memory."""
        return max(self.by_place, key=_total)

    @property
    def peak_bytes(self) -> int:
        """Total size in bytes of the tensors in the process that uses the most memory."""
        return sum(self.fullest.values())

    @property
    def needed_bytes(self) -> int:
        """Amount of memory that a GPU must have, in bytes."""
        return self.peak_bytes + self.context_bytes


def estimate_memory(plan: Draft, *, tokenized: bool = False) -> MemoryEstimate:
    """Estimate the peak memory of a plan's processes by component. `tokenized`: whether the token
    cache already contains the samples."""
    mechanisms = used_by(plan)
    processes = all_places(plan)
    by_place = [_find_peak(process, mechanisms) for process in processes]
    peak = max(map(_total, by_place))
    context = 0
    if plan.machine.num_gpus:
        context = FITTED.gpu_context_bytes.alone
        if plan.num_processes > 1:
            context += FITTED.gpu_context_bytes.nccl
    likely = FITTED.likely_bytes.compiled if plan.config.compile else FITTED.likely_bytes.eager
    fullest = max(processes, key=lambda process: process.parameters)
    state = _state_of(fullest, mechanisms)
    fitted = FITTED.process_bytes
    on_host = state["host"] + (fitted.cuda if plan.machine.num_gpus else fitted.cpu)
    on_host += sum(mechanism.on_host(processes[0]) for mechanism in mechanisms)
    if plan.strategy.traits.package or plan.mesh["tp"] > 1:
        on_host += fitted.libraries
    if plan.num_processes == 1 and not tokenized:
        on_host += fitted.tokenizing
    # DeepSpeed receives the whole model on the host. Other strategies read or initialize this
    # process's shards of two parameters at a time. Without a GPU, the peak memory of a step is also
    # in RAM.
    model = 4.0 * plan.size.num_parameters
    if plan.strategy.traits.builds_on_device:
        parts = plan.mesh["tp"] * (plan.mesh["dp_shard"] if plan.uses_fsdp else 1)
        model = 8 * plan.size.padded_vocab_size * plan.size.hidden_size / parts
    on_host += model if plan.machine.num_gpus else max(peak, model)
    copy = estimate_copy(plan, processes)
    if (on_host + copy) * plan.processes_here <= plan.machine.ram_bytes:
        on_host += copy  # otherwise training waits during saves
    return MemoryEstimate(
        by_place=by_place,
        likely_bytes=[round(share * peak) + context for share in likely],
        context_bytes=context,
        host_bytes=int(on_host),
        disk_bytes=state["disk"],
    )


def estimate_state(plan: Draft) -> dict[str, int]:
    """Return the size in bytes of each component of the model state, for the process with the most
    parameters. The keys are the components in STATE for the device, and "host" and "disk" for
    offloaded state."""
    fullest = max(all_places(plan), key=lambda process: process.parameters)
    return _state_of(fullest, used_by(plan))


def estimate_copy(plan: Draft, processes: Sequence[Place]) -> int:
    """Return the number of bytes that a process copies for a checkpoint: its share of the fp32
    weights and Adam moments, and its engine's private state."""
    if plan.config.checkpoint_every in (0, "signal") or plan.strategy.swaps_to_disk:
        return 0
    held = max(process.learning for process in processes)
    per_parameter = 12 / plan.batch.num_replicas + plan.engine_bytes_per_parameter
    if plan.steps_between_exchanges is not None:  # replicas differ
        per_parameter += 12
    return round(held * per_parameter)


def _total(parts: Parts) -> float:
    return sum(parts.values())


def _state_of(at: Place, mechanisms: Sequence[Mechanism]) -> dict[str, int]:
    state = dict.fromkeys((*STATE, "host", "disk"), 0.0)
    for mechanism in mechanisms:
        for part, size in mechanism.state(at).items():
            state[part] += size
    state["optimizer"] += at.plan.engine_bytes_per_parameter
    state = {part: size * at.learning for part, size in state.items()}
    for mechanism in mechanisms:
        for part, size in mechanism.frozen(at).items():
            state[part] += size
    return {part: round(size) for part, size in state.items()}


def _find_peak(at: Place, mechanisms: Sequence[Mechanism]) -> dict[str, int]:
    """Return a process's memory by component, in bytes, at the point in a step where the process
    uses the most memory."""
    kept = sum(mechanism.kept(at) for mechanism in mechanisms)
    backward = sum(mechanism.backward(at) for mechanism in mechanisms)
    held = partial(_held, at, mechanisms, _state_of(at, mechanisms))
    passes = held("passes")
    blocks, logits = _activations(at, kept, backward)
    passes["activations"] += blocks
    passes["logits"] = logits
    buckets = sum(mechanism.buckets(at) for mechanism in mechanisms)
    passes["buffers"] += max(0, buckets - logits)
    moments = [passes, held("update")]
    if at.pp == 1:
        first_block = held("first block")
        first_block["activations"] = kept + backward
        moments.append(first_block)
    fullest = max(moments, key=_total)
    return {name: round(size) for name, size in fullest.items()}


def _held(
    at: Place, mechanisms: Sequence[Mechanism], state: Mapping[str, int], moment: Moment
) -> dict[str, float]:
    """Return the sizes in bytes of state, gradients, copies and buffers at a moment."""
    parts: dict[str, float] = {part: state.get(part, 0) for part in COMPONENTS}
    for mechanism in mechanisms:
        for part, size in mechanism.held(at, moment, state).items():
            parts[part] += size
    parts["gradients"] *= max(mechanism.gradients(at, moment) for mechanism in mechanisms)
    return parts


def _activations(at: Place, per_block: float, backward: float) -> tuple[float, float]:
    """Return (bytes of block activations, bytes of logits) at the memory peak of the process's
    sequence of operations. A block keeps `per_block` bytes, and its backward pass needs `backward`
    additional bytes."""
    blocks = at.plan.layout.blocks_per_stage
    loss = loss_bytes(at)
    pending = pending_bytes(at)
    around_loss = loss.around if at.last else 0
    of_logits = {
        "F": loss.kept, "B": -loss.kept, "I": loss.waiting - loss.kept, "W": -loss.waiting
    }  # fmt: skip
    held = held_logits = 0.0
    most = (0.0, 0.0)
    for operation, stage, _ in find_orders(at.plan)[at.place]:
        last = stage == len(blocks) - 1
        action = "B" if at.frozen and operation == "I" else operation
        if at.frozen and action == "W":  # frozen blocks have no weight gradients
            continue
        during = (held, held_logits)
        # The first stage needs no input gradients. If this stage is not compiled, its W runs the
        # whole backward pass.
        later = pending if stage or at.config.compile else 0.0
        of_block = {"F": per_block, "B": -per_block, "I": later, "W": -per_block - later}
        held += blocks[stage] * of_block[action]
        if last:
            held_logits += of_logits[action]
        if action == "F":
            during = (held, held_logits)
        moments = [during]
        if last and action != "W":
            moments.append((during[0], during[1] + loss.peak - loss.kept))
        if action in "BI":
            logits = during[1] - loss.kept + loss.after if last else during[1]
            freed = around_loss if at.pp == 1 else 0
            moments.append((during[0] + backward - freed, logits))
        most = max(most, *moments, key=sum)
    return most[0] + around_loss, most[1]
