"""Plots show the records' figures."""

import itertools
import math
import warnings

import pytest
from matplotlib.figure import Figure

from distributed_training.records.comparison import Comparison, Layout
from distributed_training.records.plots import build_figures, save_pngs
from tests.records.test_comparison import PREDICTION, over_seeds  # noqa: F401
from tests.support import made_record

PLOTS = ["loss.png", "throughput.png"]


@pytest.fixture
def drawn(monkeypatch):
    """file name -> axes of every plot that is saved; a warning of matplotlib fails the test."""
    found = {}
    save = Figure.savefig

    def keep(figure, path, **words):
        found[path.name] = figure.axes[0]
        save(figure, path, **words)

    monkeypatch.setattr(Figure, "savefig", keep)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield found


def draw(folder, *records):
    layouts = [Layout(name=r.strategy["name"], records=[r]) for r in records]
    return save_pngs(Comparison(layouts=layouts), folder)


def bars(axes):
    """label -> length of a plot's bars, from the top."""
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert len(axes.patches) == len(names)
    assert axes.yaxis_inverted()
    return list(zip(names, [bar.get_width() for bar in axes.patches], strict=True))


def curves(axes):
    """label -> (places, losses) of the lines; each layout's validation goes without a label."""
    lines = {
        line.get_label(): line.get_data() for line in axes.get_lines() if len(line.get_xdata())
    }
    return {label: data for label, data in lines.items() if not label.startswith("_")}


def test_plots_show_the_records_figures(drawn, tmp_path):
    names = ("dp", "zero2", "fsdp")
    records = [
        made_record(strategy__name=name, performance__tokens_per_s=1000.0 * place)
        for place, name in enumerate(names, 1)
    ]
    records.append(made_record(finished=False, status="oom"))
    folder = tmp_path / "new" / "plots"
    paths = draw(folder, *records)
    assert [path.relative_to(folder).name for path in paths] == PLOTS
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert bars(drawn["throughput.png"]) == [("dp", 1000), ("zero2", 2000), ("fsdp", 3000)]
    assert list(curves(drawn["loss.png"])) == list(names)
    steps, losses = curves(drawn["loss.png"])["dp"]
    assert (list(steps), list(losses)) == ([1, 64], [3.5, 3.0625])


def test_losses_that_were_not_finite_are_gaps_and_without_any_there_is_no_line(drawn, tmp_path):
    gap = made_record(loss_curve=[[1, 3.5], [2, None], [3, 3.0]])
    never = made_record(strategy__name="dp", loss_curve=[[1, None], [2, None]])
    empty = made_record(strategy__name="fsdp", loss_curve=[])
    assert [path.name for path in draw(tmp_path, gap, never, empty)] == PLOTS
    (losses,) = [losses for _, losses in curves(drawn["loss.png"]).values()]
    assert (losses[0], losses[2]) == (3.5, 3.0)
    assert math.isnan(losses[1])
    assert len(bars(drawn["throughput.png"])) == 3
    assert [path.name for path in draw(tmp_path / "alone", empty)] == PLOTS[1:]


def test_equal_records_give_equal_plots(tmp_path):
    """Otherwise each regeneration would change the files that are committed."""
    first = draw(tmp_path / "a", made_record())
    second = draw(tmp_path / "b", made_record())
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_runs_without_results_have_no_plots(tmp_path):
    assert draw(tmp_path / "plots", made_record(finished=False)) == draw(tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()


def test_curves_are_means_over_the_seeds(over_seeds):  # noqa: F811
    figures = build_figures(over_seeds)
    steps, times = (figures[name].axes[0].lines for name in ("loss", "loss-by-time"))
    assert list(curves(figures["loss"].axes[0])) == ["zero2", "dp"]
    assert steps[0].get_ydata().tolist() == pytest.approx([3.895, 3.795, 3.695, 3.595])
    assert times[0].get_xdata().tolist() == [0.5, 1.0, 1.5, 2.0]
    for dots, last in ((steps[1], 4), (times[1], 2.0)):
        assert (list(dots.get_xdata()), list(dots.get_ydata())) == ([0, last] * 2, [3, 3, 4, 4])


def test_tick_labels_do_not_overlap():
    """Names, and numbers of six digits, at the width of a phone."""
    names = ["a-name-that-is-long-enough-for two-lines, batch 128 x 1024", "dp", "tp"]
    sent = {**PREDICTION, "sent_bytes": {"tp": 76_000 * 2**20}}
    layouts = [Layout(name=name, records=[made_record(prediction=sent)]) for name in names]
    for figure in build_figures(Comparison(layouts=layouts), 4.6).values():
        figure.draw_without_rendering()
        (axes, *_) = figure.axes
        for axis, (first, last) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, (0, 9))):
            ticks = [tick for tick in axis.get_major_ticks() if first <= tick.get_loc() <= last]
            boxes = [tick.label1.get_window_extent() for tick in ticks]
            assert all(figure.bbox.padded(1).containsx(box.x0) for box in boxes)
            assert not [pair for pair in itertools.pairwise(boxes) if pair[0].overlaps(pair[1])]


def test_bars_of_memory_are_the_predicted_bytes(over_seeds):  # noqa: F811
    figures = build_figures(over_seeds)
    memory = figures["memory"].axes[0]
    assert max(bar.get_x() + bar.get_width() for bar in memory.patches) == pytest.approx(9)
    (marks,) = (line.get_data() for line in memory.lines)
    assert [list(each) for each in marks] == [[10, 10, 10], [0, 0, 1]]
