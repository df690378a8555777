"""What every schedule comes to on the same model and microbatches: the numbers of the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from pipedream.errors import UserError
from pipedream.schedules import closed_forms
from pipedream.schedules.catalogue import SCHEDULES, build_schedule
from pipedream.schedules.closed_forms import CLOSED_FORMS, ClosedForm
from pipedream.schedules.ops import RECOMPUTE, Op, Schedule, recomputed, repeat
from pipedream.schedules.policies import POLICIES, Policy, weight_use
from pipedream.simulate.measures import Idle, idle, idle_in_a_row, peak_activations
from pipedream.simulate.search import search
from pipedream.simulate.simulator import (
    Costs,
    Timeline,
    build_costs,
    ends_in_a_row,
    load_order,
    simulate,
)


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


@dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule: a batch on its own, and batches one after the other (the stream)."""

    name: str
    title: str
    policy: Policy
    num_batches: int
    batch: Timeline
    """One batch from an empty pipeline to an empty pipeline."""
    stream_makespan: Fraction
    """Of `num_batches` batches. Without a pause where the policy needs no flush; otherwise each
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
    bound: Fraction | None = None
    """Of an order from search: no other one with as much memory is shorter."""

    @cached_property
    def stream(self) -> Timeline:
        """The stream, operation by operation."""
        if self.policy is POLICIES["flush"]:
            schedule = repeat(self.batch.schedule, self.num_batches)
        else:
            schedule = _without_flush(self.batch.schedule, self.name, self.num_batches)
        return simulate(schedule, self.batch.costs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A schedule that these sizes do not allow."""

    name: str
    title: str
    reason: str


def compare(case: Case) -> Iterator[Row | Refused]:
    """A row for each of SCHEDULES, in their order, as soon as it is there."""
    _check_scale(case, case.num_stages)
    return _rows(case)


def _rows(case: Case) -> Iterator[Row | Refused]:
    before: Row | None = None
    for name, entry in SCHEDULES.items():
        try:
            before = measure(name, case, before)
            yield before
        except UserError as error:
            yield Refused(name=name, title=entry.title, reason=str(error))


def measure(name: str, case: Case, before: Row | None = None) -> Row:
    """The row of one schedule; UserError where it does not allow these sizes.

    Timelines of the row `before` are taken over where it has the same orders.
    """
    entry = SCHEDULES[name]
    if before is not None and SCHEDULES[before.name].build is entry.build:
        batch = before.batch
    else:
        if name in REORDERED and not case.reorder:
            schedule = entry.build(case.num_stages, case.num_microbatches, reorder=False)
        else:
            schedule = build_schedule(name, case.num_stages, case.num_microbatches, case.chunks)
        if case.recompute is not None:
            schedule = recomputed(schedule, case.recompute)
        batch = simulate(schedule, _costs(schedule, case))
    stream = None
    if entry.policy != "flush" and before is not None and before.batch is batch:
        stream = before.__dict__.get("stream")
    return _row(name, entry.title, POLICIES[entry.policy], batch, case, stream)


def measure_csv(path: Path, case: Case) -> Row:
    """The row of an order from a file, updated once a batch. The file gives ranks and microbatches.

    Raises UserError for orders that are incomplete or that wait for each other.
    """
    schedule = load_order(path)
    if case.recompute is not None:
        schedule = recomputed(schedule, case.recompute)
    batch = simulate(schedule, _costs(schedule, case))
    return _row(path.name, path.name, POLICIES["flush"], batch, case)


def measure_search(memory: int, prove: float, case: Case) -> Row:
    """The row of the best order found that holds `memory` microbatches on a rank at most."""
    _check_scale(case, case.num_stages)
    if case.recompute is not None:
        raise UserError("search has no recomputation", "set recompute=none")
    costs = _costs(build_schedule("1f1b", case.num_stages, case.num_microbatches), case)
    found = search(costs, case.num_microbatches, memory, prove=prove)
    batch = simulate(found.schedule, costs)
    row = _row("search", f"Search, {memory} in memory", POLICIES["flush"], batch, case)
    return replace(row, bound=found.lower_bound)


def _without_flush(batch: Schedule, name: str, num_batches: int) -> Schedule:
    stream = build_schedule(name, batch.num_ranks, batch.num_microbatches * num_batches)
    again = any(op.kind == RECOMPUTE for op in batch.orders[0] if isinstance(op, Op))
    return recomputed(stream, batch.kept) if again else stream


def _row(
    name: str,
    title: str,
    policy: Policy,
    batch: Timeline,
    case: Case,
    stream: Timeline | None = None,
) -> Row:
    num_batches, schedule = case.num_batches, batch.schedule
    batch_idle = stream_idle = idle(batch)
    if policy is POLICIES["flush"]:
        # A batch begins and ends with one version, and with no activations.
        ends = ends_in_a_row(batch, num_batches)
        stream_idle = idle_in_a_row(batch, ends, num_batches)
        makespan = max(ends) * batch.tick
    else:
        if stream is None:
            whole = _without_flush(schedule, name, num_batches)
            stream = simulate(whole, batch.costs)
        schedule, stream_idle, makespan = stream.schedule, idle(stream), stream.makespan
    stages = [stage for chain in schedule.chains for stage in chain]
    versions, staleness, mixed = dict.fromkeys(stages, 1), dict.fromkeys(stages, 0), False
    if policy is not POLICIES["flush"]:
        use = weight_use(schedule, policy, batch.schedule.num_microbatches)
        versions = {stage: use[stage].peak_versions for stage in stages}
        staleness = {stage: max(use[stage].staleness.values()) for stage in stages}
        mixed = any(u.backward != u.forward for u in use.values())
    copies = [Fraction(0)] * schedule.num_ranks
    for rank, order in enumerate(schedule.orders):
        for stage in {op.stage for item in order for op in item.parts}:
            copies[rank] += Fraction(versions[stage], schedule.stages_per_rank)
    row = Row(
        name=name,
        title=title,
        policy=policy,
        num_batches=num_batches,
        batch=batch,
        stream_makespan=makespan,
        batch_idle=batch_idle,
        stream_idle=stream_idle,
        peak_activations=peak_activations(schedule),
        peak_versions=tuple(versions.values()),
        staleness=tuple(staleness.values()),
        weight_copies=tuple(copies),
        mixed=mixed,
    )
    if stream is not None:
        row.__dict__["stream"] = stream
    return row


def closed_form(name: str, case: Case) -> tuple[ClosedForm, closed_forms.Case] | None:
    """What is known of one batch without simulating it, and the sizes to put in; None for what has
    no form: a file, uneven stages, a time to send, overlap, R, a block that is only repeated."""
    form, scale = CLOSED_FORMS.get(name), case.stage_scale or [Fraction(1)]
    overlap = case.overlap_saving and name.startswith("dualpipe")
    only_repeated = name in REORDERED and not case.reorder
    if form is None or len(set(scale)) > 1 or case.communication or overlap:
        return None
    if case.recompute is not None or only_repeated:
        return None
    return form, closed_forms.Case(
        p=case.num_stages,
        m=case.num_microbatches,
        v=case.chunks,
        f=scale[0] * case.forward,
        i=scale[0] * case.input_gradient,
        w=scale[0] * case.weight_gradient,
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


def _check_scale(case: Case, num_ranks: int) -> None:
    if case.stage_scale is not None and len(case.stage_scale) % num_ranks:
        raise UserError(
            f"stage_scale has length {len(case.stage_scale)} for {num_ranks} stages",
            f"give {num_ranks}, such as stage_scale={','.join(['1'] * num_ranks)}, or a multiple "
            f"of {num_ranks}, one a chunk",
        )
