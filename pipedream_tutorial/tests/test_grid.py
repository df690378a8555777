"""What the terminal shows is what the timeline says, at any scale."""

import math
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream.draw.terminal import cells, choose_scale, draw
from pipedream.schedules.catalogue import SCHEDULES, build_schedule
from pipedream.simulate.simulator import Timeline, build_costs, simulate


def timeline(name: str, p: int, m: int, v: int = 2, **durations) -> Timeline:
    schedule = build_schedule(name, p, m, v)
    return simulate(schedule, build_costs(schedule, **durations))


def rows(text: str, num_ranks: int, width: int) -> list[str]:
    """Each rank's line, put together again where it was wrapped."""
    found = [""] * num_ranks
    for line in text.splitlines():
        match = re.match(r"rank (\d+) +", line)
        if match:
            prefix = len(f"rank {num_ranks - 1} ")
            found[int(match[1])] += line[prefix:].ljust(width)
    return found


def label(event, second: set[int]) -> str:
    """What an event's cell begins with, written down independently of the grid."""
    text = []
    for op in event.item.parts:
        kind = op.kind.lower() if op.stage in second else op.kind
        text.append(f"{kind}{op.microbatch}")
    return "&".join(text)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("columns", [60, 400])
def test_every_column_is_the_event_that_runs_then(name, columns):
    shown = timeline(name, 4, 8, forward=1, input_gradient=2, weight_gradient=1)
    scale = choose_scale(shown, columns - len("rank 3 "))
    lines = rows(draw(shown, columns), 4, scale.width)
    assert scale.exact
    assert scale.numbers
    for events, line in zip(shown.events, lines, strict=True):
        own = sorted({op.stage for event in events for op in event.item.parts})
        line = line[: scale.width * scale.blocks]
        idle = set(range(min(len(line.rstrip()), math.floor(shown.makespan * scale.rate))))
        for event in events:
            first, end = event.start * scale.rate, event.end * scale.rate
            assert first.denominator == end.denominator == 1
            text = line[int(first) : int(end)]
            expected = label(event, set(own[1:]))
            if len(text) == end - first:  # otherwise it is behind the cut
                assert re.fullmatch(re.escape(expected) + "-* ?", text)
            idle -= set(range(int(first), int(end)))
        assert {line[column] for column in idle} <= {"."}


durations = st.fractions(min_value=Fraction(1, 50), max_value=20, max_denominator=60)


@given(
    name=st.sampled_from(list(SCHEDULES)),
    columns=st.integers(20, 250),
    forward=durations,
    input_gradient=durations,
    weight=durations | st.just(Fraction(0)),
    communication=durations | st.just(Fraction(0)),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_any_durations_are_drawn_in_order_within_the_width(
    name, columns, forward, input_gradient, weight, communication
):
    shown = timeline(
        name,
        4,
        8,
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight,
        communication=communication,
    )
    scale = choose_scale(shown, columns)
    for line, events in zip(cells(shown, scale), shown.events, strict=True):
        assert len(line) == len(events)
        before = 0
        for cell, event in zip(line, events, strict=True):
            assert before <= cell.first <= cell.end
            before = cell.end
            assert abs(cell.first - event.start * scale.rate) < 1
            assert abs(cell.end - event.end * scale.rate) < 1
            assert len(cell.text) == cell.end - cell.first
            # A number is whole or absent.
            digits = re.findall(r"\d+", cell.text)
            assert digits in ([], [str(op.microbatch) for op in event.item.parts])
    prefix = len("rank 3 ")
    lines = [line for line in draw(shown, columns).splitlines() if not line.startswith("(")]
    assert max(map(len, lines)) <= max(columns, 10 + prefix)


def test_the_picture_of_a_small_pipeline():
    assert draw(timeline("1f1b", 2, 2), 40).splitlines() == [
        "time   0              5",
        "rank 0 F0 F1 ......B0--- ...B1---",
        "rank 1 ...F0 B0--- F1 B1--- ......",
    ]
    assert draw(timeline("interleaved", 1, 1, v=3), 60).splitlines() == [
        "time   0           1           2",
        "rank 0 F0a F0b F0c B0c---- B0b---- B0a----",
    ]


def test_letters_alone_where_numbers_do_not_fit_and_a_note_where_the_end_does_not():
    assert draw(timeline("gpipe", 2, 14), 60, max_blocks=1).splitlines() == [
        "time   0         10        20        30        40",
        "rank 0 FFFFFFFFFFFFFF...B-B-B-B-B-B-B-B-B-B-B-B-B-B-",
        "rank 1 .FFFFFFFFFFFFFFB-B-B-B-B-B-B-B-B-B-B-B-B-B-..",
    ]
    cut = draw(timeline("naive", 4, 8), 60, max_blocks=1).splitlines()
    assert cut[-1].startswith("(shown up to time 17 of 96: ")
