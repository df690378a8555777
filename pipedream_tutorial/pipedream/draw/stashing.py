"""The moving picture of weight stashing: PipeDream's timeline, and the versions that are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from pipedream.draw.figures import panel_title
from pipedream.draw.grid import IDLE_HATCH, ROW, draw_grid, row_height
from pipedream.draw.moving import LAST_MS, Animation, Frame, as_image
from pipedream.draw.page import EDGE, LINE_COLOURS, SMALL, TEXT, Colour, ink, new_figure, paler
from pipedream.schedules.ops import BACKWARD, FORWARD, Op
from pipedream.schedules.orders import one_f_one_b
from pipedream.schedules.policies import POLICIES, WeightUse, weight_use
from pipedream.simulate.measures import times_of
from pipedream.simulate.simulator import Timeline, build_costs, simulate

UNIT_MS = 500


def weight_stashing() -> Animation:
    """PipeDream on 3 stages as time goes on, and below it the versions that each stage keeps."""
    schedule = one_f_one_b(3, 6)
    timeline, use = (
        simulate(schedule, build_costs(schedule)),
        weight_use(schedule, POLICIES["stash"], 6),
    )
    title = "Weight stashing: a version stays until its last microbatch has come back"
    texts = (title, *(str(versions_at(timeline, use, t)) for t in _moments(timeline)))
    return Animation(texts, (timeline,), partial(_stash_frames, title, timeline, use))


def _moments(timeline: Timeline) -> list[Fraction]:
    """The middle of every time unit, and the end."""
    return [*(Fraction(2 * t + 1, 2) for t in range(int(timeline.makespan))), timeline.makespan]


def versions_at(
    timeline: Timeline, use: dict[int, WeightUse], moment: Fraction
) -> list[dict[int, list[int]]]:
    """By stage: version -> microbatches in flight that ran forward with it; the newest one too."""
    times = times_of(timeline)
    found = []
    for stage, one in sorted(use.items()):
        updates = sum(times[Op(BACKWARD, stage, i)][1] <= moment for i in one.forward)
        kept: dict[int, list[int]] = {updates: []}
        for i, version in sorted(one.forward.items()):
            begun, done = times[Op(FORWARD, stage, i)][0], times[Op(BACKWARD, stage, i)][1]
            if begun <= moment < done:
                kept.setdefault(version, []).append(i)
        found.append(dict(sorted(kept.items())))
    return found


def _shade(version: int) -> Colour:
    return paler(LINE_COLOURS[1 + version], 0.25)


def _stash_frames(title: str, timeline: Timeline, use: dict[int, WeightUse]) -> Iterator[Frame]:
    moments = _moments(timeline)
    for moment in moments:
        last = moment == moments[-1]
        yield _stash_frame(title, timeline, use, moment), LAST_MS if last else UNIT_MS


def _stash_frame(
    title: str, timeline: Timeline, use: dict[int, WeightUse], moment: Fraction
) -> Image.Image:
    p = timeline.schedule.num_ranks
    legend = [Patch(**IDLE_HATCH, label="idle")]
    figure, (above, below) = new_figure(
        title, [1.6 * p * row_height(p), 1.9 * p * row_height(p)], legend=legend, gap=0.95, head=0.4
    )

    def version(op: Op) -> int:
        own = use[op.stage]
        return (own.forward if op.kind == FORWARD else own.backward)[op.microbatch]

    draw_grid(
        above,
        timeline,
        colour=lambda op: _shade(version(op)),
        labels=(lambda op: f"{op.kind}{op.microbatch}",),
    )
    panel_title(above, "F and B of each microbatch, coloured by the weight version they use")
    _hide_future(above, timeline, moment)
    newest = max(version for one in use.values() for version in one.forward.values()) + 2
    _draw_stash(below, versions_at(timeline, use, moment), newest)
    return as_image(figure)


def _hide_future(ax: Axes, timeline: Timeline, moment: Fraction) -> None:
    """Pale what has not begun, and mark the moment."""
    p, end = timeline.schedule.num_ranks, float(timeline.makespan)
    now = float(moment)
    ax.add_patch(
        Rectangle((now, -0.5), end - now, p, facecolor="white", alpha=0.85, zorder=4, linewidth=0)
    )
    ax.axvline(now, color="black", linewidth=2, zorder=5)


def _draw_stash(ax: Axes, kept: Sequence[dict[int, list[int]]], newest: int) -> None:
    """A box for each version that a stage keeps, with the microbatches that it is kept for."""
    ax.set_xlim(-0.6, newest + 0.1)
    ax.set_ylim(len(kept) - 0.5, -0.5)
    ax.set_yticks(range(len(kept)), map(str, range(len(kept))))
    ax.set_ylabel("stage", fontsize=TEXT)
    ax.set_xticks([])
    ax.tick_params(length=0)
    text = "Versions kept now (thick: the newest), and the microbatches in flight that need them"
    panel_title(ax, text)
    for stage, versions in enumerate(kept):
        for version, needed_by in versions.items():
            new = version == max(versions)
            shade = _shade(version)
            box = Rectangle(
                (version - 0.44, stage - ROW / 2), 0.88, ROW, facecolor=shade,
                edgecolor="black" if new else EDGE, linewidth=2.5 if new else 0.8,
            )  # fmt: skip
            ax.add_patch(box)
            text = f"v{version}" + f"\nfor {', '.join(map(str, needed_by))}" * bool(needed_by)
            ax.text(
                version, stage, text, ha="center", va="center", fontsize=SMALL, color=ink(shade)
            )
