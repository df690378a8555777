"""Draw charts of utilization, idle time and memory."""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter
from pipedream_simple import number, percent

from pipedream.draw import page
from pipedream.draw.page import LINE_COLORS, SMALL, TEXT, new_figure, panel_title
from pipedream.errors import UserError
from pipedream.schedules.closed_forms import idle_fraction
from pipedream.schedules.orders import SCHEDULES
from pipedream.simulate.comparison import Config, Row, closed_form, compare, measure

BUBBLE_SCHEDULES = (
    "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v",
)  # fmt: skip
STEADY_NOTE = "Consecutive batches: each rank starts its next batch as soon as it is free"
MARKERS = "osD^vPX*<>hpd8H"
DASHES = ("-", "--", "-.", ":")
HOLLOW_MARKER: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 1.8}
DOMINATED_STYLE: dict[str, Any] = {
    "marker": "o", "linestyle": "", "color": LINE_COLORS[6], "markersize": 9.0,
    "markeredgecolor": page.EDGE, "markeredgewidth": 0.6,
}  # fmt: skip
PARETO_STYLE: dict[str, Any] = DOMINATED_STYLE | {"marker": "D", "color": LINE_COLORS[4]}


def utilization_comparison(config: Config) -> Figure:
    """Draw the busy share of the ranks' time under each schedule, for one batch and for batches in
    a row. The schedule with the lowest share in one batch is on top."""
    rows = [row for row in compare(config) if isinstance(row, Row)]
    rows.sort(key=lambda row: row.batch_idle.makespan_fraction, reverse=True)
    low, high = (percent(1 - row.batch_idle.makespan_fraction) for row in (rows[0], rows[-1]))
    steady: dict[str, Any] = {"marker": "D", "color": "black", "linestyle": "", "clip_on": False}
    legend: list[Artist] = [
        Patch(color=LINE_COLORS[6], label="one batch"),
        Line2D([], [], label="many batches in a row", **steady),
    ]
    figure, (ax,) = new_figure(
        f"{config['num_stages']} ranks, {config['num_microbatches']} microbatches: ranks are busy "
        f"for {low} ({rows[0].title}) to {high} ({rows[-1].title}) of the time of one batch",
        [0.36 * len(rows)],
        legend=legend,
        notes=[STEADY_NOTE],
        left=2.6,
    )
    for place, row in enumerate(rows):
        busy = 1 - row.batch_idle.makespan_fraction
        ax.barh(place, float(busy), 0.7, color=LINE_COLORS[6])
        ax.text(0.01, place, percent(busy), va="center", fontsize=SMALL)
        ax.plot([float(1 - row.steady_idle)], [place], **steady)
    ax.set_yticks(range(len(rows)), [row.title for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.set_xlabel("busy share of all ranks' time", fontsize=TEXT)
    return figure


class IdleCurve(NamedTuple):
    """Idle shares of one batch, as fractions from 0 to 1, for each number of microbatches. Each
    entry contains the idle share of the makespan and the idle share of the ranks' spans. A curve
    stands for one schedule, or for several schedules with equal values."""

    titles: list[str]
    simulated: dict[int, tuple[Fraction, Fraction]]  # for each m that the schedule allows
    closed: dict[int, tuple[Fraction, Fraction]]  # for each m for which the closed form holds


def idle_curves(config: Config, counts: Sequence[int]) -> list[IdleCurve]:
    """Return the idle curves of the schedules in BUBBLE_SCHEDULES for the numbers of microbatches
    in `counts`. Schedules with equal values share a curve."""
    curves: list[IdleCurve] = []
    for name in BUBBLE_SCHEDULES:
        curve = IdleCurve([SCHEDULES[name].title], {}, {})
        for m in counts:
            sized = {**config, "num_microbatches": m}
            try:
                idle = measure(name, sized).batch_idle
            except UserError:
                continue
            curve.simulated[m] = idle.makespan_fraction, idle.span_fraction
            form_and_sizes = closed_form(name, sized)
            if form_and_sizes is not None and form_and_sizes[0].idle_holds(form_and_sizes[1]):
                form, sizes = form_and_sizes
                span = sum(form.span_idle(sizes, rank) for rank in range(sizes.p))
                shares = form.makespan_idle(sizes), Fraction(span) / sizes.p
                curve.closed[m] = idle_fraction(shares[0], sizes), idle_fraction(shares[1], sizes)
        equal_curves = [other for other in curves if other[1:] == curve[1:]]
        if equal_curves:
            equal_curves[0].titles.append(*curve.titles)
        elif curve.simulated:
            curves.append(curve)
    return curves


def bubble_vs_microbatches(config: Config) -> Figure:
    """Plot idle shares against the number of microbatches, with closed forms as lines and
    simulations as points."""
    p = config["num_stages"]
    counts = sorted({2**k for k in range(p.bit_length())} | {p * 2**k for k in range(5)})
    curves = idle_curves(config, counts)
    gpipe_shares = next((c for c in curves if "GPipe" in c.titles), curves[0]).simulated
    min_m, *_, max_m = gpipe_shares
    title = (
        f"More microbatches shrink the bubble: on {p} ranks, GPipe idles for "
        f"{percent(gpipe_shares[min_m][0])} of its makespan at m = {min_m} and "
        f"{percent(gpipe_shares[max_m][0])} at m = {max_m}"
    )
    notes = ["Lines: closed forms, for the m for which they hold; points: simulation"]
    legend = [
        Line2D([], [], label=", ".join(curve.titles), **_curve_style(index))
        for index, curve in enumerate(curves)
    ]
    figure, axes = new_figure(title, [4.8], legend=legend, legend_columns=4, columns=2, notes=notes)
    shares = [float(share) for c in curves for pair in c.simulated.values() for share in pair]
    smallest = min((share for share in shares if share > 0), default=0.1) / 1.2
    steps = [k * 10.0**-e for e in range(6) for k in (1, 2, 5)]
    ticks = [y for y in steps if smallest < y <= max(shares)]
    for measure_index, (ax, text) in enumerate(
        zip(axes, ("makespan", "ranks' own spans"), strict=True)
    ):
        for index, curve in enumerate(curves):
            for points, style_changes in (
                (curve.closed, {"marker": "", "linewidth": 2}),
                (curve.simulated, {"linestyle": ""}),
            ):
                ys = [float(pair[measure_index]) for pair in points.values()]
                ax.plot([*points], ys, **_curve_style(index) | style_changes)
        ax.set_xscale("log", base=2)
        ax.set_xlim(counts[0] / 1.15, counts[-1] * 1.15)
        ax.set_xticks(counts)
        ax.minorticks_off()
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_xlabel("microbatches in a batch, m", fontsize=TEXT)
        panel_title(ax, f"Idle share of the {text}")
        log_axis(ax, smallest, 0.3, [0.0] * (0 in shares) + ticks, "0%")
        ax.set_ylim(-0.2 * smallest if 0 in shares else smallest, 1.1 * max(shares, default=1))
    return figure


def log_axis(
    ax: Axes, smallest: float, below: float, ticks: Sequence[float], zero_label: str
) -> None:
    """Give the y axis a logarithmic scale for shares, and place 0 on a separate line below this
    scale."""
    ax.set_yscale("symlog", linthresh=smallest, linscale=below)
    ax.set_yticks(ticks)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%" if y else zero_label)
    ax.grid(axis="y", color="#E0E0E0")


def _curve_style(index: int) -> dict[str, Any]:
    """Return the color, marker and dashes of curve number `index`. Each property cycles through its
    own list of values."""
    kinds = {"color": LINE_COLORS, "marker": MARKERS, "linestyle": DASHES}
    style = {key: values[index % len(values)] for key, values in kinds.items()}
    return HOLLOW_MARKER | {"markersize": 8} | style


def memory_vs_bubble(config: Config) -> Figure:
    """Plot each schedule's peak memory (activations and weight versions) against its idle share
    with consecutive batches. The peak memory is the highest value of all ranks."""
    weights = config["weight_size"]
    rows = [row for row in compare(config) if isinstance(row, Row)]
    titles_by_point: dict[tuple[Fraction, Fraction], list[str]] = defaultdict(list)
    for row in rows:
        if row.policy.stashed:
            activations_and_copies = zip(row.peak_activations, row.weight_copies, strict=True)
            activations, copies = max(
                activations_and_copies, key=lambda pair: pair[0] + weights * pair[1]
            )
            text = f"{row.title} ({number(activations)} + {number(copies)})"
            titles_by_point[row.steady_idle, activations + weights * copies].append(text)
    # Points that no other point beats or equals in both values
    front: list[tuple[Fraction, Fraction]] = []
    for x, y in sorted(titles_by_point):
        if not front or y < front[-1][1]:
            front.append((x, y))
    best = [text.partition(" (")[0] for point in front for text in titles_by_point[point]]
    verb = "are" if len(best) > 1 else "is"
    title = f"Idle time against memory: only {', '.join(best)} {verb} Pareto-optimal"
    legend = [
        Line2D(
            [],
            [],
            label="Pareto-optimal: no other schedule is at least as good in both",
            **PARETO_STYLE,
        ),
        Line2D([], [], label="other schedules", **DOMINATED_STYLE),
    ]
    hidden_titles = [row.title for row in rows if not row.policy.stashed]
    size = f"A copy of a rank's weights takes {number(weights)} times the memory of a microbatch"
    notes = [
        STEADY_NOTE,
        f"{size}. Not shown, because its gradients are wrong: {', '.join(hidden_titles)}",
    ]
    figure, (ax,) = new_figure(title, [5.6], legend=legend, left=1.05, notes=notes)
    ax.set_xlim(-0.03, 1.12 * float(max(x for x, _ in titles_by_point)) + 0.05)
    ax.set_ylim(0, 1.12 * float(max(y for _, y in titles_by_point)) + 0.5)
    for points, style in (
        ([point for point in titles_by_point if point not in front], DOMINATED_STYLE),
        (front, PARETO_STYLE),
    ):
        ax.plot([float(x) for x, _ in points], [float(y) for _, y in points], **style)
    ax.grid(color="#E6E6E6")
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_xlabel("idle share of the ranks' time, with consecutive batches", fontsize=TEXT)
    ax.set_ylabel("peak memory of the fullest rank, in microbatches", fontsize=TEXT)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    panel_title(ax, "In brackets: microbatches whose activations are held + copies of the weights")
    labels = {(float(x), float(y)): "\n".join(names) for (x, y), names in titles_by_point.items()}
    page.place_labels(ax, labels)
    return figure
