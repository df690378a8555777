"""Test the timelines that are drawn in the terminal."""

import math
import re
from collections import Counter
from fractions import Fraction

import pipedream_simple as simple
import pytest
from pipedream.draw.terminal import cells_of, draw
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.simulate.simulator import Timeline, build_costs, simulate


def timeline(name: str, p: int, m: int, v: int = 2, **durations) -> Timeline:
    schedule = build_schedule(name, p, m, v)
    return simulate(schedule, build_costs(schedule, **durations))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("columns", [60, 400])
def test_every_column_shows_the_event_that_runs_at_that_time(name, columns):
    shown = timeline(name, 4, 8, forward=1, input_gradient=2, weight_gradient=1)
    text = draw(shown, columns)
    assert max(map(len, text.splitlines())) <= columns
    lines = [""] * 4  # lines of each rank, with wrapped parts joined
    for line in text.splitlines():
        if line.startswith("rank"):
            lines[int(line[5])] += line[7:].ljust(columns - 8)
    # Number of columns per unit of time: the shortest operation has two columns
    rate = 2 * shown.schedule.stages_per_rank
    expected = [["."] * math.ceil(shown.makespan * rate) for _ in lines]
    for event in shown.events:
        first = shown.schedule.stages_by_rank()[event.rank][0]
        cells = [(k if s == first else k.lower()) + str(i) for k, s, i in event.item.parts]
        begin, end = int(event.start * rate), int(event.end * rate)
        expected[event.rank][begin:end] = "&".join(cells).ljust(end - begin, "-")
    assert [line.rstrip() for line in lines] == ["".join(line) for line in expected]


def test_small_pipelines_are_drawn_as_expected():
    assert draw(timeline("1f1b", 2, 2), 40).splitlines() == [
        "time   0         5",
        "rank 0 F0F1....B0--..B1--",
        "rank 1 ..F0B0--F1B1--....",
    ]
    assert draw(timeline("interleaved", 1, 1, v=3), 60).splitlines() == [
        "time   0           1           2",
        "rank 0 F0/0F0/1F0/2B0/2----B0/1----B0/0----",
    ]
    for w in (Fraction(1, 999_999_999), 10**6):
        assert draw(timeline("zb-h1", 4, 8, weight_gradient=w), 100).count("\n") < 60


def test_a_timeline_too_long_for_a_terminal_becomes_a_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = timeline("1f1b", 16, 64)
    text = draw(shown, 60)
    assert str(tmp_path / "long.svg") in simple.draw_or_save("long", cells_of(shown), text)
    assert (tmp_path / "long.svg").read_text().count("v10h-") == len(shown.events)
    assert simple.draw_or_save("short", cells_of(shown), "text") == "text"


def test_colors_keep_the_letters_and_continue_on_wrapped_lines():
    shown = timeline("dualpipe-v", 2, 4)
    colored = draw(shown, 50, color=True)
    letters = re.findall(r"\x1b\[30;48;5;(\d+)m(.)\x1b\[0m", colored)
    assert re.sub(r"\x1b\[.*?m", "", colored) == draw(shown, 50)
    background = dict(zip("FBIW&", ("74", "214", "227", "36", "175"), strict=True))
    expected: Counter = Counter()
    for event in shown.events:  # a unit of time has four columns
        kind, *more = (op.kind for op in event.item.parts)
        expected[background["&" if more else kind]] += int(4 * (event.end - event.start))
    assert Counter(color for color, _ in letters) == expected
