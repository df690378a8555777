"""Timelines: a panel a run, a lane for each thing that it does, times as in the record."""

from __future__ import annotations

from distributed_training.settings.files import ROOT
from results.lab.pages.figures import render
from results.lab.pages.timelines import INCHES, draw

SECONDS = {"step": 0.5, "communicating": 0.2, "exposed": 0.05}
LONG = {
    "step_us": 9000, "computing": [[0, 4000], [5000, 8000]], "exposed": [[4000, 5000]],
    "by_kind": {"all-gather": [[3000, 5000]], "all-reduce": [], "reduce-scatter": [[5000, 6000]]},
}  # fmt: skip
SHORT = {"step_us": 3000, "computing": [[1000, 3000]], "exposed": [], "by_kind": {}}
RECORD = {
    "runs": {
        "one": {"timeline": LONG, "ranks": [{"traced_s": SECONDS}, {"traced_s": None}]},
        "left out": {"failed": "why"},
        "two": {"timeline": SHORT, "ranks": [{"traced_s": {**SECONDS, "exposed": 0.0}}]},
    }
}


def lanes(axes):
    """Label -> (begin, end) in milliseconds of what is drawn at its height."""
    found = {}
    for label, patch in zip(axes.get_yticklabels(), axes.patches, strict=True):
        corners = patch.get_path().vertices.reshape(-1, 5, 2)
        assert all(abs(y - label.get_position()[1]) < 0.5 for _, y in corners.reshape(-1, 2))
        found[label.get_text()] = [(bar[0, 0], bar[1, 0]) for bar in corners]
    return found


def test_lanes_are_the_records_spans_on_one_axis():
    figure = draw(RECORD, ("one", "two"), "title", "of what")
    first, second = figure.axes
    assert lanes(first) == {
        "computes": [(0, 4), (5, 8)],
        "all-gather": [(3, 5)],
        "reduce-scatter": [(5, 6)],
        "exposed": [(4, 5)],
    }
    assert lanes(second) == {"computes": [(1, 3)], "exposed": []}
    assert first.get_xlim() == second.get_xlim() == (0, 9)
    assert [axes.lines[0].get_xdata()[0] for axes in figure.axes] == [9, 3]  # the step's end
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == "of what\none: communicates 40% of the step, 10% exposed"
    assert titles[1] == "two: communicates 40% of the step, 0% exposed"
    assert figure.get_figwidth() * 96 == INCHES * 96 == 900
    svg = render(lambda _: figure, ROOT)
    assert svg == render(lambda _: figure, ROOT)
    assert "10% exposed" in svg
