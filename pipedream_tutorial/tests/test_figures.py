"""Test that pictures show the computed values and that their labels do not overlap."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pipedream_visual
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from pipedream.draw import charts, grids
from pipedream.draw.charts import idle_curves
from pipedream.draw.grids import forwards_only, kind_colors
from pipedream.draw.page import MIN_FONT_SIZE, save
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.comparison import Config, measure
from pipedream.simulate.simulator import Timeline, build_costs, simulate

from results.lab.tutorial.figures import (
    CURVE_BATCH,
    RANKS,
    batch_times,
    draw_held,
    draw_microbatch_size,
    draw_picture,
)
from results.lab.tutorial.figures import PICTURES as STEPS

MODULES = {"charts": charts, "grids": grids}
PICTURES: dict[str, Callable[[Config], Figure]] = {
    name: getattr(MODULES[module], name) for name, module in pipedream_visual.PICTURES.items()
}

CONFIG = pipedream_visual.CONFIG | {"num_batches": 2}


def draw_and_check(make: Callable[[], Figure]) -> Figure:
    """Draw a picture and return it. Check that its labels do not overlap, are inside the page and
    are large enough."""
    texts: list[tuple[str, tuple[float, ...], float]] = []
    original, begin = Text.draw, Figure.draw

    def spy(self: Text, renderer: Any) -> None:
        original(self, renderer)
        if self.get_visible() and self.get_text().strip():
            box = self.get_window_extent(renderer)
            texts.append((self.get_text(), (box.x0, box.y0, box.x1, box.y1), self.get_fontsize()))

    def start(self: Figure, renderer: Any) -> None:
        texts.clear()  # keep only the labels of the last drawing
        begin(self, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", spy)
        patch.setattr(Figure, "draw", start)
        figure = make()
    boxes = np.array([box for _, box, _ in texts])
    assert min(size for _, _, size in texts) >= MIN_FONT_SIZE
    width, height = figure.canvas.get_width_height(physical=True)
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2] <= width).all()
    assert (boxes[:, 3] <= height).all()
    low = np.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = np.argwhere(np.triu((high - low > 0.5).all(axis=2), k=1))
    assert [(texts[a][0], texts[b][0]) for a, b in shared] == []
    return figure


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    """Draw all pictures with the shipped CONFIG, check that they match the files in figures/, and
    return them."""
    folder = tmp_path_factory.mktemp("shipped")
    figures = {}
    for name, draw in PICTURES.items():
        path = folder / f"{name}.png"
        figures[name] = draw_and_check(lambda: save(draw(CONFIG), path))  # noqa: B023
        shipped_path = Path(pipedream_visual.__file__).with_name("figures") / path.name
        numbers, expected = map(imread, (path, shipped_path))
        assert numbers.shape == expected.shape, f"python pipedream_visual.py --only {name}"
        assert np.abs(numbers - expected).mean() < 1e-3, f"python pipedream_visual.py --only {name}"
    return figures


def rectangles(ax: Axes) -> list[Rectangle]:
    """Return the rectangles that show operations, but not the rectangles behind them that show idle
    time."""
    patches = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    return [patch for patch in patches if not str(patch.get_gid()).startswith("idle")]


Cells = Counter[tuple[str, float, float, float, float]]


def expected_cells(timeline: Timeline) -> Cells:
    found: Cells = Counter()
    for event in timeline.events:
        parts = event.item.parts
        for half_index, op in enumerate(parts):
            height = 0.88 / len(parts)
            y = event.rank - 0.44 + half_index * height
            found[str(op), float(event.start), y, float(event.end - event.start), height] += 1
    return found


def drawn_cells(ax: Axes) -> Cells:
    return Counter(
        (str(r.get_gid()), r.get_x(), r.get_y(), r.get_width(), r.get_height())
        for r in rectangles(ax)
    )


def shown_timelines() -> dict[str, list[Timeline]]:
    """Return the timelines that the panels of each picture must show, keyed by picture. Pictures
    without timelines are left out."""
    uncut = CONFIG | {"num_microbatches": 1, "forward": 8}
    gpipe = measure("gpipe", CONFIG).batch
    return {
        "naive_pipeline": [measure("naive", CONFIG | {"num_microbatches": 3}).batch],
        "microbatch_forward": list(map(forwards_only, (measure("gpipe", uncut).batch, gpipe))),
        "microbatch_backward": [gpipe],
        "weight_versioning": [measure("pipedream", CONFIG).batch] * 2,
    }


def test_rectangles_match_the_timeline(shipped: dict[str, Figure]) -> None:
    panels = [
        (name, *panel)
        for name, timelines in shown_timelines().items()
        for panel in zip(filter(rectangles, shipped[name].axes), timelines, strict=True)
    ]
    for name, ax, timeline in panels:
        assert drawn_cells(ax) == expected_cells(timeline)
        idle_until = {r.get_width() for r in ax.patches if str(r.get_gid()).startswith("idle")}
        assert idle_until == {float(timeline.makespan)}
        if name != "weight_versioning":
            color = kind_colors(timeline.schedule)
            ops = {str(op): op for op in timeline.schedule.ops()}
            for r in rectangles(ax):
                assert to_hex(r.get_facecolor()) == to_hex(color(ops[str(r.get_gid())]))


def test_bubble_points_lie_on_the_closed_forms(shipped: dict[str, Figure]) -> None:
    counts = [1, 2, 4, 8, 16, 32, 64]
    curves = idle_curves(CONFIG, counts)
    assert sum(len(curve.closed) for curve in curves) > 30
    for curve in curves:
        assert curve.closed.items() <= curve.simulated.items()
    for measure_index, ax in enumerate(shipped["bubble_vs_microbatches"].axes):
        points = [line for line in ax.get_lines() if line.get_linestyle() == "None"]
        lines = [line for line in ax.get_lines() if line.get_linestyle() != "None"]
        assert len(points) == len(lines) == len(curves)
        for dots, line, curve in zip(points, lines, curves, strict=True):
            drawn = list(zip(dots.get_xdata(), dots.get_ydata(), strict=True))
            assert drawn == [(m, float(pair[measure_index])) for m, pair in curve.simulated.items()]
            on_line = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
            closed = {m: float(pair[measure_index]) for m, pair in curve.closed.items()}
            assert {m: on_line[m] for m in counts if m in on_line} == closed


def test_labels_do_not_overlap_if_many_schedules_have_similar_costs(tmp_path: Path) -> None:
    config = CONFIG | {"num_microbatches": 24}
    draw_and_check(lambda: save(charts.memory_vs_bubble(config), tmp_path / "picture.png"))


@pytest.mark.parametrize("name", STEPS)
def test_step_pictures_match_their_timelines(tmp_path: Path, name: str) -> None:
    picture = STEPS[name]()
    axes = draw_and_check(lambda: draw_picture(picture, tmp_path / "step.png")).axes
    for ax, panel in zip(axes, picture.panels, strict=True):
        assert drawn_cells(ax) == expected_cells(panel.timeline)


def test_held_strips_and_batch_times_match_the_simulator_and_the_record(tmp_path: Path) -> None:
    """The strips under ZB-H1 show at most p microbatches, and the bars sum to the time of GPipe
    with the record's times."""
    axes = draw_and_check(lambda: draw_held(tmp_path / "held.png")).axes
    for ax, held in zip(axes[1::2], ([4, 3, 2, 1], [4, 4, 4, 4]), strict=True):
        by_rank: dict[int, list[int]] = {}
        for text in ax.texts:
            by_rank.setdefault(round(text.get_position()[1]), []).append(int(text.get_text()))
        assert [max(by_rank[rank]) for rank in sorted(by_rank)] == held
    rows = [{"sequences": n, "seconds": 1 + n} for n in (1, 4, 16)]
    settings = {"model": "gpt2-medium", "tokens": 1024}
    record = {"rows": rows, "device": "NVIDIA H100 80GB HBM3", "settings": settings}
    gpipe = (
        simulate(
            schedule, build_costs(schedule, forward=1 + n, input_gradient=0, weight_gradient=0)
        )
        for n in (1, 4, 16)
        for schedule in [build_schedule("gpipe", RANKS, CURVE_BATCH // n)]
    )
    assert list(map(sum, batch_times(record))) == [1000 * float(t.makespan) for t in gpipe]
    draw_and_check(lambda: draw_microbatch_size(record, tmp_path / "size.png"))


def test_script_writes_every_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Draw every picture with as few stages and microbatches as possible."""

    def small(config: Config, make: Callable[[Config], Figure]) -> Figure:
        return draw_and_check(lambda: save(make(config), tmp_path / "picture.png"))

    for name, make in PICTURES.items():
        module = MODULES[pipedream_visual.PICTURES[name]]
        monkeypatch.setattr(module, name, partial(small, make=make))
    out = tmp_path / "new" / "folder"
    sizes = ["--set", "num_stages=2", "--num_microbatches", "2", "--output", str(out)]
    monkeypatch.setattr(sys, "argv", ["pipedream_visual.py", *sizes])
    pipedream_visual.main()
    names = [f"{name}.png" for name in PICTURES]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert capsys.readouterr().out.split() == [str(out / name) for name in names]
