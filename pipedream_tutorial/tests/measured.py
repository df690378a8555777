"""Turn simulated runs into slices, as if the runs had been measured."""

import json
from pathlib import Path
from typing import Any

from pipedream.schedules.policies import POLICIES
from pipedream.simulate.simulator import Timeline
from pipedream.simulate.trace import Slice, trace_document, transfers


def slices_of(timeline: Timeline, ns: int, start_ns: int = 0) -> list[Slice]:
    """Return one slice per simulated operation. A unit of simulated time is `ns` nanoseconds."""
    return [
        Slice(
            rank=e.rank,
            thread="compute",
            item=e.item,
            start_ns=start_ns + int(e.start * ns),
            end_ns=start_ns + int(e.end * ns),
        )
        for e in timeline.events
    ]


def with_messages(timeline: Timeline, ns: int = 1, start_ns: int = 0) -> list[Slice]:
    """Return the slices of all operations, and of all messages that ranks send and receive."""
    schedule, slices = timeline.schedule, slices_of(timeline, ns, start_ns)
    ends = {op: start_ns + int(e.end * ns) for e in timeline.events for op in e.item.parts}
    ranks, delay = schedule.rank_by_op(), int(timeline.costs.communication * ns)
    for sender, receiver in transfers(schedule):
        for thread, op in (("send", sender), ("receive", receiver)):
            sent = ends[sender]
            slices.append(Slice(ranks[op], thread, sender, sent, sent + delay))
    return slices


def write_trace(path: Path, run: Timeline, **options: Any) -> None:
    document = trace_document(run.schedule, policy=POLICIES["flush"], batch_size=3, **options)
    path.write_text(json.dumps(document))
