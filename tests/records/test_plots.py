"""Test that plots show the values in the records."""

import math

import pytest

from distributed_training.records.report import plot_losses
from distributed_training.records.results import LayoutRow
from tests.records.test_comparison import four_layouts  # noqa: F401
from tests.support import made_record

pytestmark = pytest.mark.filterwarnings("error")


def of_runs(*records):
    return [LayoutRow(name=r.strategy["name"], record=r) for r in records]


def curves(axes):
    """Return the x values and losses of a plot's lines, keyed by label. Validation curves, which
    have no label, are omitted."""
    lines = {
        line.get_label(): line.get_data() for line in axes.get_lines() if len(line.get_xdata())
    }
    return {label: data for label, data in lines.items() if not label.startswith("_")}


def test_non_finite_losses_are_gaps_and_runs_without_losses_have_no_line():
    gap = made_record(loss_curve=[[1, 3.5], [2, None], [3, 3.0]])
    never = made_record(strategy__name="dp", loss_curve=[[1, None], [2, None]])
    empty = made_record(strategy__name="fsdp", loss_curve=[])
    figure = plot_losses(of_runs(gap, never, empty))
    (losses,) = [losses for _, losses in curves(figure.axes[0]).values()]
    assert (losses[0], losses[2]) == (3.5, 3.0)
    assert math.isnan(losses[1])
    assert plot_losses(of_runs(empty)) is None


def test_each_layout_has_a_line_and_a_color(four_layouts):  # noqa: F811
    figure = plot_losses(four_layouts.layouts)
    lines = figure.axes[0].lines
    assert list(curves(figure.axes[0])) == ["zero2", "dp"]
    assert [line.get_color() for line in lines] == ["C0"] * 2 + ["C1"] * 2
    assert lines[0].get_ydata().tolist() == pytest.approx([3.89, 3.79, 3.69, 3.59])
    assert (list(lines[1].get_xdata()), list(lines[1].get_ydata())) == ([0, 4], [4, 4])
