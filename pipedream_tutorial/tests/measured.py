"""Turn simulated runs into slices, as if the runs had been measured."""

from pipedream.simulate.simulator import Timeline
from pipedream.simulate.trace import Slice, transfers


def with_messages(timeline: Timeline, ns: int = 1, start_ns: int = 0) -> list[Slice]:
    """Return the slices of all operations, and of all messages that ranks send and receive. A unit
    of simulated time is `ns` nanoseconds."""
    schedule = timeline.schedule
    slices, ends = [], {}
    for rank, item, start, end in timeline.events:
        begun, ended = (start_ns + int(time * ns) for time in (start, end))
        slices.append(Slice(rank, "compute", item, begun, ended))
        ends |= dict.fromkeys(item.parts, ended)
    ranks, delay = schedule.rank_by_op(), int(timeline.costs.communication * ns)
    for sender, receiver in transfers(schedule):
        for thread, op in (("send", sender), ("receive", receiver)):
            sent = ends[sender]
            slices.append(Slice(ranks[op], thread, sender, sent, sent + delay))
    return slices
