"""What every schedule comes to on the same model and microbatches: the numbers of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from pipedream.errors import UserError
from pipedream.schedules import formulas
from pipedream.schedules.catalogue import SCHEDULES, build_schedule
from pipedream.schedules.closed_forms import CLOSED_FORMS
from pipedream.schedules.ops import Pair, Schedule, recomputed, repeat
from pipedream.schedules.policies import POLICIES, Policy, weight_use
from pipedream.simulate.measures import Idle, idle, peak_activations
from pipedream.simulate.search import search
from pipedream.simulate.simulator import Costs, Timeline, build_costs, load_order, simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The sizes and durations that all schedules are compared at."""

    num_stages: int
    num_microbatches: int
    num_batches: int
    chunks: int
    forward: Fraction
    input_gradient: Fraction
    """Of the half of the backward pass that gives the input's gradient."""
    weight_gradient: Fraction
    communication: Fraction
    overlap_saving: Fraction
    stage_scale: list[Fraction] | None
    """One factor for each equal share of the layers, in the model's order: `num_stages` of them, or
    a multiple, such as one for each chunk."""
    recompute: Fraction | None = None
    """R before every backward pass, and the share of activations kept meanwhile; None: keep all."""
    reorder: bool = True
    """Whether REORDERED are pulled together at both ends, as published."""


REORDERED = ("v-half", "v-min")
"""Schedules of a repeated block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """What the closed form says of one batch, with its text."""

    text: str
    range_text: str
    published: str
    """What the paper says, where it differs, and which paper."""
    makespan_idle: Fraction | None
    """Each rank's idle time until the last rank ends; None outside the range."""
    span_idle: Fraction | None
    """Rank 0's within its own span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One schedule: a batch on its own, and batches one after the other."""

    name: str
    title: str
    policy: Policy
    batch: Timeline
    """One batch from an empty pipeline to an empty pipeline."""
    stream: Timeline
    """`num_batches` batches. Without a pause where the policy needs no flush; otherwise each
    rank starts its next batch once its own work on the last one is done."""
    batch_idle: Idle
    stream_idle: Idle
    peak_activations: tuple[Fraction, ...]
    """By rank, in microbatches of a rank's share of the layers; over the stream."""
    peak_versions: tuple[int, ...]
    """By stage, in the model's order; of a second copy after the first."""
    staleness: tuple[int, ...]
    """By stage likewise: most updates between a microbatch's weights and its own update."""
    weight_copies: tuple[int | Fraction, ...]
    """By rank: parameters kept, in units of a rank's share of the model. Two copies of the model
    (Chimera, DualPipe) count as two."""
    mixed: bool
    """Whether a backward pass sees other weights than its forward pass saw."""
    formula: Formula | None
    """Of one batch; None where there is none, as with uneven stages or a time to send."""
    bound: Fraction | None = None
    """Of an order from search: no other one with as much memory is shorter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A schedule that these sizes do not allow."""

    name: str
    title: str
    reason: str


def compare(case: Case) -> list[Row | Refused]:
    """A row for each of SCHEDULES, in their order."""
    _check_scale(case, case.num_stages)
    simulated: Simulated = {}
    return [_row_or_reason(name, case, simulated) for name in SCHEDULES]


Simulated = dict[tuple[object, int, int], Timeline]
"""(how orders are built, batches, of these repeated): several schedules share 1F1B's."""


def _row_or_reason(name: str, case: Case, simulated: Simulated) -> Row | Refused:
    try:
        return measure(name, case, simulated)
    except UserError as error:
        return Refused(name=name, title=SCHEDULES[name].title, reason=str(error))


def measure(name: str, case: Case, simulated: Simulated | None = None) -> Row:
    """The row of one schedule; UserError where it does not allow these sizes.

    What is in `simulated` is taken from there, what is not is added.
    """
    entry, simulated = SCHEDULES[name], {} if simulated is None else simulated
    policy, flushes = POLICIES[entry.policy], entry.policy == "flush"

    def timeline(num_batches: int) -> Timeline:
        repeats = num_batches if flushes else 1
        key = (entry.build, num_batches, repeats)
        if key not in simulated:
            m = case.num_microbatches * num_batches // repeats
            if name in REORDERED and not case.reorder:
                batch = entry.build(case.num_stages, m, reorder=False)
            else:
                batch = build_schedule(name, case.num_stages, m, case.chunks)
            schedule = repeat(_recomputed(batch, case), repeats)
            simulated[key] = simulate(schedule, _costs(schedule, case))
        return simulated[key]

    return _row(name, entry.title, policy, timeline(1), timeline(case.num_batches), case)


def measure_csv(path: Path, case: Case) -> Row:
    """The row of an order from a file, updated once a batch. The file gives ranks and microbatches.

    Raises UserError for orders that are incomplete or that wait for each other.
    """
    batch = _recomputed(load_order(path), case)
    stream = repeat(batch, case.num_batches)
    once, again = (simulate(s, _costs(s, case)) for s in (batch, stream))
    return _row(path.name, path.name, POLICIES["flush"], once, again, case)


def measure_search(memory: int, prove: float, case: Case) -> Row:
    """The row of the shortest order found that holds `memory` microbatches on a rank at most."""
    _check_scale(case, case.num_stages)
    if case.recompute is not None:
        raise UserError("search has no recomputation", "set recompute=none")
    costs = _costs(build_schedule("1f1b", case.num_stages, case.num_microbatches), case)
    found = search(costs, case.num_microbatches, memory, prove=prove)
    stream = repeat(found.schedule, case.num_batches)
    once, again = simulate(found.schedule, costs), simulate(stream, costs)
    title = f"Search, {memory} in memory"
    return replace(
        _row("search", title, POLICIES["flush"], once, again, case), bound=found.lower_bound
    )


def _row(name: str, title: str, policy: Policy, once: Timeline, again: Timeline, case: Case) -> Row:
    batch, stream = once.schedule, again.schedule
    use = weight_use(stream, policy, batch.num_microbatches)
    ranks = {op.stage: rank for op, rank in stream.ranks().items()}
    copies = [Fraction(0)] * stream.num_ranks
    for stage, rank in ranks.items():
        copies[rank] += Fraction(use[stage].peak_versions, stream.stages_per_rank)
    in_order = [use[stage] for chain in stream.chains for stage in chain]
    return Row(
        name=name,
        title=title,
        policy=policy,
        batch=once,
        stream=again,
        batch_idle=idle(once),
        stream_idle=idle(again),
        peak_activations=peak_activations(stream),
        peak_versions=tuple(u.peak_versions for u in in_order),
        staleness=tuple(max(u.staleness.values()) for u in in_order),
        weight_copies=tuple(copies),
        mixed=any(u.backward != u.forward for u in in_order),
        formula=_formula(name, batch, case),
    )


def _formula(name: str, batch: Schedule, case: Case) -> Formula | None:
    form = CLOSED_FORMS.get(name)
    pairs = any(isinstance(item, Pair) for order in batch.orders for item in order)
    uneven = case.stage_scale is not None and set(case.stage_scale) != {1}
    if form is None or uneven or case.communication or (pairs and case.overlap_saving):
        return None
    if case.recompute is not None or (name in REORDERED and not case.reorder):
        return None
    sizes = formulas.Case(
        p=case.num_stages,
        m=case.num_microbatches,
        v=case.chunks,
        f=case.forward,
        i=case.input_gradient,
        w=case.weight_gradient,
    )
    holds = form.idle_holds(sizes)
    return Formula(
        text=form.idle_text,
        range_text=form.range_text,
        published=f"{form.published} (arXiv {form.source})",
        makespan_idle=form.makespan_idle(sizes) if holds else None,
        span_idle=form.span_idle(sizes, 0) if holds else None,
    )


def _costs(schedule: Schedule, case: Case) -> Costs:
    """The same model for all: a share of the layers keeps its factor however it is cut."""
    _check_scale(case, schedule.num_ranks)
    scale = case.stage_scale
    if scale is not None:
        scale = stage_factors(scale, len(schedule.chains[0]))
    return build_costs(
        schedule,
        forward=case.forward,
        input_gradient=case.input_gradient,
        weight_gradient=case.weight_gradient,
        communication=case.communication,
        scale=scale,
        overlap_saving=case.overlap_saving,
    )


def stage_factors(scale: Sequence[Fraction], num_stages: int) -> list[Fraction]:
    """The factors of equal shares of the layers, by stage: the mean of what a stage has of each."""
    parts = len(scale)  # of a stage; a share has num_stages of them
    return [
        sum((scale[k // num_stages] for k in range(s * parts, (s + 1) * parts)), Fraction(0))
        / parts
        for s in range(num_stages)
    ]


def _recomputed(schedule: Schedule, case: Case) -> Schedule:
    return schedule if case.recompute is None else recomputed(schedule, case.recompute)


def _check_scale(case: Case, num_ranks: int) -> None:
    if case.stage_scale is not None and len(case.stage_scale) % num_ranks:
        raise UserError(
            f"stage_scale has length {len(case.stage_scale)} for {num_ranks} stages",
            f"give {num_ranks}, such as stage_scale={','.join(['1'] * num_ranks)}, or a multiple "
            f"of {num_ranks}, one a chunk",
        )
