"""Compute the memory and traffic of data, tensor and pipeline parallelism and of their hybrids.

A GPT-2 model is trained with Adam in mixed precision on `P = data * tensor * pipeline` devices.
Each parameter takes 2 bytes for the weight, 2 for the gradient and 12 for the optimizer state (an
fp32 copy and two Adam moments; Rajbhandari et al., ZeRO, arXiv 1910.02054). Activations are counted
as in Korthikanti et al. (2205.05198): `34 * b * T * D` bytes per block with 2-byte elements and
dropout. Attention scores are not kept, as with flash attention or selective recomputation.

Collectives over n devices run as rings. Each device sends `(n - 1) / n` of the elements for a
reduce-scatter or an all-gather, and twice as many for an all-reduce. Byte counts are exact
fractions. The following are not modeled: framework buffers, fragmentation, vocabulary padding, the
loss values, and overlap with computation.
"""

import textwrap
from dataclasses import dataclass
from fractions import Fraction

import checkout  # noqa: F401
from pipedream.errors import UserError
from pipedream.schedules.closed_forms import (
    CLOSED_FORMS,
    ClosedForm,
    ClosedFormInputs,
    idle_fraction,
)
from pipedream.schedules.orders import SCHEDULES, build_schedule

ELEMENT_BYTES, OPTIMIZER_BYTES = 2, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """GPT-2 model whose output projection is tied to the token embedding."""

    name: str
    layers: int
    """Blocks, L."""
    hidden: int
    """D."""
    heads: int
    vocabulary: int = 50257
    """V."""
    sequence: int = 1024
    """Tokens per sequence, T. This is also the number of learned positions."""

    @property
    def block_parameters(self) -> int:
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def parameters(self) -> int:
        """Return N, the number of parameters. The tied embedding counts once."""
        return self.layers * self.block_parameters + self.embedding_parameters + 2 * self.hidden


MODELS = {
    "gpt2-medium": Model(name="GPT-2 medium", layers=24, hidden=1024, heads=16),
    "gpt2-xl": Model(name="GPT-2 XL", layers=48, hidden=1600, heads=25),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Distribution of the work over `data * tensor * pipeline` devices."""

    title: str
    data: int = 1
    """Copies of the model, each with a share of the batch."""
    tensor: int = 1
    """Devices that share every block, t."""
    pipeline: int = 1
    """Stages, p."""
    zero: int = 0
    """ZeRO stage over the data-parallel devices, from 0 to 3."""
    sequence_parallel: bool = False
    """If True, activations between tensor-parallel layers are sharded along the sequence."""
    schedule: str = "1f1b"
    """Pipeline schedule: one with a single stage per rank, or zb-v."""
    logit_bytes: int = 4
    """Bytes per logit that is kept for the backward pass."""

    @property
    def is_v_shaped(self) -> bool:
        """Return whether device r holds stages r and 2p - 1 - r. The first device then holds both
        the first and the last stage."""
        return self.schedule == "zb-v"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Bytes on the fullest device, and bytes that the busiest device sends per training step."""

    weights: Fraction
    gradients: Fraction
    optimizer: Fraction
    activations: Fraction
    sent: Fraction
    idle: Fraction
    """Share of a step in which a device waits for its pipeline, with F = I = W and instant
    messages."""

    @property
    def memory(self) -> Fraction:
        return self.weights + self.gradients + self.optimizer + self.activations


def ring_share(devices: int) -> Fraction:
    """Return r, the share of the elements that a device sends in a reduce-scatter or all-gather."""
    return Fraction(devices - 1, devices)


def cost(model: Model, layout: Layout, *, sequences: int, microbatch: int) -> Cost:
    """Return the cost of a step over `sequences` sequences, in microbatches of `microbatch`
    sequences.

    Raises UserError for sizes that cannot be divided evenly, and for ZeRO stages 2 and 3 inside a
    pipeline."""
    k = _microbatches(model, layout, sequences, microbatch)
    form, case = _pipeline(layout, k)
    stages = range(layout.pipeline)
    memories = [_memory(model, layout, form, case, microbatch, s) for s in stages]
    weights, gradients, optimizer, activations = max(memories, key=sum)
    flushes = SCHEDULES[layout.schedule].policy == "flush"
    return Cost(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        sent=max(
            sum(sent_per_step(model, layout, k, microbatch, s).values(), Fraction(0))
            for s in stages
        ),
        idle=idle_fraction(form.makespan_idle(case), case) if flushes else Fraction(0),
    )


def _microbatches(model: Model, layout: Layout, sequences: int, microbatch: int) -> int:
    """Return k, the number of microbatches that each copy of the model runs per step."""
    for what, number, divisor in (
        ("heads", model.heads, layout.tensor),
        ("blocks", model.layers, layout.pipeline * (2 if layout.is_v_shaped else 1)),
        ("sequences", sequences, layout.data * microbatch),
    ):
        if number % divisor:
            raise UserError(
                f"{number} {what} cannot be split into {divisor} equal parts",
                f"use a divisor of {number}",
            )
    if layout.zero >= 2 and layout.pipeline > 1:
        raise UserError(
            f"ZeRO-{layout.zero} communicates at every microbatch, and a pipeline sums gradients "
            "over all of them first",
            "use ZeRO-1",
        )
    return sequences // (layout.data * microbatch)


def _pipeline(layout: Layout, k: int) -> tuple[ClosedForm, ClosedFormInputs]:
    unit = Fraction(1)
    return CLOSED_FORMS[layout.schedule], ClosedFormInputs(layout.pipeline, k, 1, unit, unit, unit)


def stage_parameters(model: Model, layout: Layout, stage: int) -> Fraction:
    """Return the number of parameters on one device of a stage. Tensor parallelism replicates
    norms, positions and the biases of row-parallel layers, and shards the rest. With several
    stages, the first and the last both hold the tied embedding. In a V-shaped schedule, device 0
    holds both of these stages and needs the embedding only once."""
    d, blocks = model.hidden, model.layers // layout.pipeline
    sharded, replicated = blocks * (12 * d**2 + 7 * d), blocks * 6 * d
    if stage == 0:
        sharded, replicated = sharded + model.vocabulary * d, replicated + model.sequence * d
    if layout.is_v_shaped:
        replicated += 2 * d * (stage == 0)
    elif stage == layout.pipeline - 1:
        sharded, replicated = (
            sharded + (model.vocabulary * d if stage > 0 else 0),
            replicated + 2 * d,
        )
    return Fraction(sharded, layout.tensor) + replicated


def _memory(
    model: Model,
    layout: Layout,
    form: ClosedForm,
    case: ClosedFormInputs,
    microbatch: int,
    stage: int,
) -> tuple[Fraction, Fraction, Fraction, Fraction]:
    """Return the sizes in bytes of the weights, gradients, optimizer state and activations on one
    device of a stage."""
    n = stage_parameters(model, layout, stage)
    share = [Fraction(1, layout.data if layout.zero >= level else 1) for level in (3, 2, 1)]
    weights = ELEMENT_BYTES * n * share[0] * form.peak_versions(case, stage)
    if layout.zero == 3 and layout.data > 1:  # the whole current layer is gathered
        largest = max(model.block_parameters, model.embedding_parameters)
        weights += ELEMENT_BYTES * Fraction(largest, layout.tensor)
    return (
        weights,
        ELEMENT_BYTES * n * share[1],
        OPTIMIZER_BYTES * n * share[2],
        _v_activations(model, layout, case.m, microbatch, stage)
        if layout.is_v_shaped
        else _activations(model, layout, form.peak_activations(case, stage), microbatch, stage),
    )


def block_activations(model: Model, layout: Layout, microbatch: int) -> Fraction:
    """Return the size in bytes of the activations that a block keeps per microbatch and device."""
    t = layout.tensor
    factor = Fraction(34, t) if layout.sequence_parallel else 10 + Fraction(24, t)
    return factor * microbatch * model.sequence * model.hidden


def _activations(
    model: Model, layout: Layout, in_flight: Fraction | int, microbatch: int, stage: int
) -> Fraction:
    tokens, t = microbatch * model.sequence, layout.tensor
    boundary_bytes = Fraction(tokens * model.hidden, t if layout.sequence_parallel else 1)
    microbatch_bytes = (
        model.layers // layout.pipeline * block_activations(model, layout, microbatch)
    )
    if stage == 0:  # the dropout mask after the embedding
        microbatch_bytes += boundary_bytes
    if stage == layout.pipeline - 1:  # inputs of the last norm and of the projection; logits
        microbatch_bytes += 4 * boundary_bytes + Fraction(
            layout.logit_bytes * tokens * model.vocabulary, t
        )
    return in_flight * microbatch_bytes


def _v_activations(model: Model, layout: Layout, k: int, microbatch: int, rank: int) -> Fraction:
    """Return the peak size in bytes of a rank's activations under ZB-V. The peak depends on the
    order of the rank's operations, because the rank's two stages keep different amounts."""
    tokens, last = microbatch * model.sequence, 2 * layout.pipeline - 1
    boundary_bytes = Fraction(tokens * model.hidden)
    blocks = model.layers // (last + 1) * block_activations(model, layout, microbatch)
    end_bytes = {
        0: boundary_bytes,
        last: 4 * boundary_bytes + layout.logit_bytes * tokens * model.vocabulary,
    }
    held = peak = Fraction(0)
    for op in (
        op for item in build_schedule("zb-v", layout.pipeline, k).orders[rank] for op in item.parts
    ):
        if op.kind in ("F", "W"):
            held += (blocks + end_bytes.get(op.stage, 0)) * (1 if op.kind == "F" else -1)
            peak = max(peak, held)
    return peak


def sent_per_step(
    model: Model, layout: Layout, k: int, microbatch: int, stage: int
) -> dict[str, Fraction]:
    """Return the number of bytes that a stage's device sends per step of k microbatches, by
    purpose."""
    last = layout.pipeline - 1
    boundary_elements = microbatch * model.sequence * model.hidden  # elements between two layers
    hop = Fraction(boundary_elements, layout.tensor if layout.sequence_parallel else 1)
    pipeline = k * hop * ((stage < last) + (stage > 0)) * (2 if layout.is_v_shaped else 1)
    if (
        last and stage in (0, last) and not layout.is_v_shaped
    ):  # the tied embedding's two gradients are added
        pipeline += Fraction(model.vocabulary * model.hidden, layout.tensor)
    n = stage_parameters(model, layout, stage)
    num_transfers = {0: 2, 1: 2, 2: k + 1, 3: 3 * k}[layout.zero]
    elements = {
        "data": num_transfers * ring_share(layout.data) * n,
        "tensor": k
        * _num_half_all_reduces(model, layout, stage)
        * ring_share(layout.tensor)
        * boundary_elements,
        "pipeline": pipeline,
    }
    return {what: ELEMENT_BYTES * count for what, count in elements.items()}


def _num_half_all_reduces(model: Model, layout: Layout, stage: int) -> int:
    """Return the number of reduce-scatters and all-gathers of [b, T, D] per microbatch. An
    all-reduce counts as one of each. A block has two all-reduces in its forward pass and two in its
    backward pass. With sequence parallelism, each all-reduce is split into its two halves. There
    are two more all-gathers, because sharded inputs are gathered again for the weight gradients.
    The embedding and the projection are sharded by vocabulary."""
    blocks = model.layers // layout.pipeline
    first, last = stage == 0, stage == layout.pipeline - 1
    if layout.sequence_parallel:
        return 10 * blocks + 2 * first + 3 * last
    return 8 * blocks + 2 * first + 2 * last


def layouts(devices: int) -> list[Layout]:
    """Return the layouts that COMPARISON.md compares on `devices` devices. `devices` must be
    even."""
    half = devices // 2
    layouts = [
        Layout(title="data parallel", data=devices),
        *(Layout(title=f"ZeRO-{z}", data=devices, zero=z) for z in (1, 2, 3)),
        Layout(title="tensor", tensor=devices),
        Layout(title="tensor, sequence parallel", tensor=devices, sequence_parallel=True),
        Layout(title="pipeline, GPipe", pipeline=devices, schedule="gpipe"),
        Layout(title="pipeline, 1F1B", pipeline=devices),
        Layout(title="pipeline, ZB-H1", pipeline=devices, schedule="zb-h1"),
        Layout(
            title="pipeline, ZB-H1, logits in bf16",
            pipeline=devices,
            schedule="zb-h1",
            logit_bytes=2,
        ),
        Layout(title="pipeline, ZB-V", pipeline=devices, schedule="zb-v"),
        Layout(title="pipeline, PipeDream", pipeline=devices, schedule="pipedream"),
        Layout(title="pipeline, PipeDream-2BW", pipeline=devices, schedule="pipedream-2bw"),
        Layout(title=f"pipeline {half} x ZeRO-1 2", pipeline=half, data=2, zero=1),
        Layout(title=f"pipeline 2 x ZeRO-1 {half}", pipeline=2, data=half, zero=1),
        Layout(title=f"tensor 2 x ZeRO-1 {half}", tensor=2, data=half, zero=1),
        Layout(title=f"tensor 2 x pipeline {half}", tensor=2, pipeline=half),
    ]
    if devices % 8 == 0:
        title = f"tensor 2 x pipeline 2 x ZeRO-1 {devices // 4}"
        layouts.append(Layout(title=title, tensor=2, pipeline=2, data=devices // 4, zero=1))
    return list(dict.fromkeys(layouts))


SEQUENCES, MICROBATCH = 64, 4
GIB = 2**30


def comparison_table(name: str, devices: int) -> str:
    """Return COMPARISON.md's table for a model in MODELS: memory, traffic and idle time of every
    layout.

    Impossible layouts are listed in a sentence below the table, with the reason."""
    lines = [
        "| layout | state | activations | memory | sent | idle |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    layouts_by_reason: dict[str, list[str]] = {}
    for layout in layouts(devices):
        try:
            costs = cost(MODELS[name], layout, sequences=SEQUENCES, microbatch=MICROBATCH)
        except UserError as error:
            layouts_by_reason.setdefault(str(error).partition(";")[0], []).append(layout.title)
            continue
        state = costs.weights + costs.gradients + costs.optimizer
        parts = (state, costs.activations, costs.memory, costs.sent)
        cells = [f"{float(part / GIB):.2f}" for part in parts]
        cells.append(f"{float(100 * costs.idle):.1f}%")
        lines.append(f"| {layout.title} | " + " | ".join(cells) + " |")
    for reason, titles in layouts_by_reason.items():
        text = f"{reason[:1].upper()}{reason[1:]}, which rules out {'; '.join(titles)}."
        lines += ["", textwrap.fill(text, 100, break_on_hyphens=False)]
    return "\n".join(lines)
