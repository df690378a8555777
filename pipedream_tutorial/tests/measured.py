"""Runs that the simulator made, as if they had been measured."""

import json
from pathlib import Path
from typing import Any

from pipedream.simulate.simulator import Timeline
from pipedream.simulate.trace import MeasuredEvent, trace_document, transfers


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
        for e in timeline.events
    ]


def with_messages(timeline: Timeline, ns: int = 1, start_ns: int = 0) -> list[MeasuredEvent]:
    """The same, and what is sent and received between ranks."""
    schedule, found = timeline.schedule, events_of(timeline, ns, start_ns)
    ends = {op: start_ns + int(e.end * ns) for e in timeline.events for op in e.item.parts}
    ranks, delay = schedule.ranks(), int(timeline.costs.communication * ns)
    for sender, receiver in transfers(schedule):
        for thread, op in (("send", sender), ("receive", receiver)):
            fields = dict(zip(("kind", "stage", "microbatch"), sender, strict=True))
            sent = ends[sender]
            event = MeasuredEvent(
                rank=ranks[op], **fields, start_ns=sent, end_ns=sent + delay, thread=thread
            )
            found.append(event)
    return found


def write_trace(path: Path, **given: Any) -> None:
    path.write_text(json.dumps(trace_document(**given)))
