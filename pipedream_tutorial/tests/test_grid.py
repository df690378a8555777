"""What the terminal shows is what the timeline says, at any scale."""

import math
import re

import pytest
from pipedream.draw.terminal import choose_scale, draw
from pipedream.schedules.orders import SCHEDULES, build_schedule
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
    return "&".join(
        f"{op.kind.lower() if op.stage in second else op.kind}{op.microbatch}"
        for op in event.item.parts
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("columns", [60, 400])
def test_every_column_is_the_event_that_runs_then(name, columns):
    shown = timeline(name, 4, 8, forward=1, input_gradient=2, weight_gradient=1)
    scale = choose_scale(shown, columns - len("rank 3 "))
    lines = rows(draw(shown, columns), 4, scale.width)
    text = draw(shown, columns).partition("\n(shown up to")[0]
    assert max(map(len, text.splitlines())) <= columns
    assert scale.exact
    assert scale.numbers
    for rank, line in enumerate(lines):
        events = [event for event in shown.events if event.rank == rank]
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
