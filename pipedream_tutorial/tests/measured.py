"""Runs that the simulator made, as if they had been measured."""

import json
from pathlib import Path
from typing import Any

from pipedream.simulate.simulator import Timeline
from pipedream.simulate.trace import MeasuredEvent, trace_document


def events_of(timeline: Timeline, ns: int, start_ns: int = 0) -> list[MeasuredEvent]:
    """Each operation as it was simulated, a unit of time being `ns` nanoseconds."""
    return [
        MeasuredEvent(
            rank=e.rank,
            kind=e.item.kind,
            stage=e.item.stage,
            microbatch=e.item.microbatch,
            start_ns=start_ns + int(e.start * ns),
            end_ns=start_ns + int(e.end * ns),
            thread="compute",
        )
        for e in timeline.all_events()
    ]


def write_trace(path: Path, **given: Any) -> None:
    path.write_text(json.dumps(trace_document(**given)))
