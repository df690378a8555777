"""README.md's pictures of single steps, always at the sizes that it quotes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from pipedream.config import FOLDER
from pipedream.draw.grids import Panel, Picture, idle_text
from pipedream.draw.page import number, percent
from pipedream.plan.planner import Plan, plan_pipeline
from pipedream.plan.profile import load_profile
from pipedream.plan.replicated import simulate_plan
from pipedream.schedules.catalogue import SCHEDULES
from pipedream.simulate.comparison import Case, Row, measure
from pipedream.simulate.measures import idle


def row_of(name: str, *, m: int = 8, communication: Fraction | int = 0, batches: int = 1) -> Row:
    """A schedule on 4 ranks with F = I = W = 1."""
    one = Fraction(1)
    case = Case(
        num_stages=4,
        num_microbatches=m,
        num_batches=batches,
        chunks=2,
        forward=one,
        input_gradient=one,
        weight_gradient=one,
        communication=Fraction(communication),
        overlap_saving=Fraction(0),
        stage_scale=None,
    )
    return measure(name, case)


def _batches(names: Sequence[str], communication: Fraction | int = 0) -> list[Panel]:
    panels = []
    for name in names:
        row = row_of(name, communication=communication)
        shares = idle_text(row.batch_idle)
        text = f"{row.title}: ends at {number(row.batch.makespan)}, idle {shares}"
        panels.append(Panel(text, row.batch))
    return panels


def one_f_one_b() -> Picture:
    panels = []
    for name in ("gpipe", "1f1b"):
        row = row_of(name)
        held = ", ".join(map(number, row.peak_activations))
        text = f"{row.title}: ends at {number(row.batch.makespan)}; microbatches held at most"
        panels.append(Panel(f"{text} by rank {held}", row.batch))
    title = "GPipe and 1F1B: as much idle time, but different numbers of microbatches in memory"
    return Picture(title, panels)


def asynchronous() -> Picture:
    panels = []
    for name in ("1f1b", "pipedream"):
        row = row_of(name, m=4, batches=2)
        share = percent(row.stream_idle.makespan_fraction)
        text = f"{row.title}: ends at {number(row.stream.makespan)}, idle {share}"
        panels.append(Panel(text, row.stream))
    ends = [number(panel.timeline.makespan) for panel in panels]
    title = (
        f"Two batches of 4 microbatches: with a flush after each until time {ends[0]}, "
        f"without until {ends[1]}"
    )
    return Picture(title, panels)


def interleaving() -> Picture:
    panels = _batches(("1f1b", "interleaved"))
    idles = [number(max(idle(panel.timeline).makespan)) for panel in panels]
    title = f"Two stages a rank: a rank idles for {idles[1]} time units instead of {idles[0]}"
    return Picture(title, panels)


def zero_bubble() -> Picture:
    panels = _batches(("1f1b", "zb-h1", "zb-h2", "zb-v"))
    idles = [number(max(idle(panel.timeline).makespan)) for panel in panels]
    title = (
        "The backward pass cut in two: a rank idles for "
        f"{', '.join(idles[1:-1])} or {idles[-1]} time units instead of {idles[0]}"
    )
    return Picture(title, panels)


def two_directions() -> Picture:
    panels = _batches(("dualpipe-v", "chimera"))
    idles = [number(max(idle(panel.timeline).makespan)) for panel in panels]
    flushed = number(max(idle(row_of("1f1b").batch).makespan))
    title = (
        f"Filled from both sides: a rank idles for {idles[0]} time units under "
        f"{SCHEDULES['dualpipe-v'].title}, {idles[1]} under {SCHEDULES['chimera'].title}, "
        f"{flushed} under 1F1B"
    )
    return Picture(title, panels)


def communication() -> Picture:
    c = Fraction(1)
    panels = _batches(("gpipe", "1f1b", "zb-h2"), c)
    without = [row_of(name).batch.makespan for name in ("gpipe", "1f1b", "zb-h2")]
    costs = [number(p.timeline.makespan - t) for p, t in zip(panels, without, strict=True)]
    title = (
        f"A message takes {number(c)}, as long as a forward: it costs GPipe {costs[0]}, 1F1B "
        f"{costs[1]} and ZB-H2 {costs[2]} time units"
    )
    return Picture(title, panels, arrows=True)


def plan() -> Picture:
    found = _shipped_plan()
    run = simulate_plan(found, 24, busy_links=False)
    layers = load_profile(_profile()).layers
    names = [
        " to ".join(dict.fromkeys((layers[stage.first].name, layers[stage.last].name)))
        for stage in found.stages
    ]
    notes = tuple(
        f"{name[:1].upper()}{name[1:]}: F + B are drawn as long as its {stage.replicas} workers "
        f"synchronise, {float(stage.sync_s):.2f} s; they compute for {float(stage.compute_s):.2f} s"
        for name, stage in zip(names, found.stages, strict=True)
        if stage.sync_s > stage.compute_s
    )
    workers = [name for name, stage in zip(names, found.stages, strict=True)
               for _ in range(stage.replicas)]  # fmt: skip
    rows = tuple(f"{name}   {rank}" for rank, name in enumerate(workers))
    most = max(range(len(names)), key=lambda place: found.stages[place].replicas)
    text = f"1F1B of 24 microbatches; once it is full, one every {float(found.period_s):.3f} s"
    title = (
        f"A plan for GPT-2 on {len(workers)} workers at 1 Gbit/s: {names[most]} is on "
        f"{found.stages[most].replicas} of them"
    )
    return Picture(title, [Panel(text, run.timeline)], "time in seconds", notes, rows)


def _profile() -> Path:
    return FOLDER / "profiles/gpt2_cpu.json"


def _shipped_plan() -> Plan:
    layers = load_profile(_profile()).layers
    return plan_pipeline(layers, num_workers=8, bandwidth=Fraction("1.25e8"))


PICTURES = {
    "one_f_one_b": one_f_one_b,
    "asynchronous": asynchronous,
    "interleaving": interleaving,
    "zero_bubble": zero_bubble,
    "two_directions": two_directions,
    "communication": communication,
    "plan": plan,
}
