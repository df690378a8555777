"""A pipeline simulator in one file: what every rank does when, and what that costs.

    python pipedream_simple.py
    python pipedream_simple.py --set schedule=zb-h1 --set weight_gradient=1/2

Read it from top to bottom: the operations, the order in which each rank runs them, the clock, costs
and what is printed. The package takes the orders from here, reads the options, and runs the rest.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from shutil import get_terminal_size
from typing import Any, NamedTuple

CONFIG: dict[str, Any] = {
    "num_stages": 4,  # p: stages of the pipeline, one a rank
    "num_microbatches": 8,  # m: microbatches that a batch is cut into
    "schedule": "all",  # or naive, gpipe, 1f1b, pipedream, interleaved, zb-h1, zb-h2, zb-v
    "forward": 1,  # F: time of one microbatch's forward pass on a rank, in any unit
    "input_gradient": 1,  # I: the half of the backward pass that the rank before waits for
    "weight_gradient": 1,  # W: the half that only the optimizer waits for
    "communication": 0,  # time from one rank to the next; occupies neither
    "chunks": 2,  # v: stages a rank under interleaved 1F1B
    "num_batches": 4,  # batches in a row, where schedules without a flush show what they save
    "steps": 0,  # batches to train on: python -m pipedream does that
}
DURATIONS = ("forward", "input_gradient", "weight_gradient", "communication")

# --- Operations ------------------------------------------------------------------------------

Op = tuple[str, int, int]
"""(kind, stage, microbatch). Kinds: F forward; B backward, or its halves I and W, where I gives the
gradient of the stage's input and W those of its weights."""

Order = list[Op]  # what one rank runs, first to last


def need(op: Op, last_stage: int) -> Op | None:
    """The operation whose result this one takes in."""
    kind, stage, i = op
    if kind == "F":
        return ("F", stage - 1, i) if stage > 0 else None
    if kind == "W":
        return ("I", stage, i)
    if stage == last_stage:
        return ("F", stage, i)  # by way of the loss
    return (kind, stage + 1, i)  # and its own F, which was there before


# --- Orders: one for each of p ranks and m microbatches --------------------------------------


def in_turn(forwards: Sequence[Any], backwards: Sequence[Any], ahead: int) -> list[Any]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards left over."""
    steps = list(forwards[:ahead])
    for place, backward in enumerate(backwards, ahead):
        steps += [*forwards[place : place + 1], backward]
    return steps


def zero_bubble(m: int, ahead: int, delay: int) -> str:
    """1F1B with the backward pass cut in two: each W comes `delay` microbatches after its I."""
    delay = min(delay, m)
    return "".join(in_turn("F" * m, ["I"] * delay + ["IW"] * (m - delay), ahead)) + "W" * delay


def zb_v(r: int, p: int, m: int) -> str:
    """Two stages a rank in a V. No idle time within a rank's span if F = I = W, in 1F1B's memory.

    Written for 2p - 1 microbatches or more; with fewer, those not there are left out.
    """
    count = max(m, 2 * p - 1)
    word = "F" * (2 * (p - r) - 1) + "fF" * r + "fiw" * (p - r)
    word += "FIWfiw" * (count - (2 * p - 1 - r))  # until all have gone down
    word += "IWfiw" * (p - 1 - r)
    return word + "Ii" * r + "IW" * (p - r) + "w" * r + "W" * r


SCHEDULES: dict[str, tuple[str, Callable[[int, int, int], Iterable[str]] | None]] = {
    # One microbatch in the pipeline at a time: all ranks but one are idle.
    "naive": ("Naive", lambda r, p, m: "FB" * m),
    # All forwards, then all backwards: every rank holds the activations of m microbatches.
    "gpipe": ("GPipe", lambda r, p, m: "F" * m + "B" * m),
    # A backward as early as possible: p - 1 - r forwards, and the first of those in turn; rank r
    # never holds more than p - r microbatches.
    "1f1b": ("1F1B with flush", lambda r, p, m: in_turn("F" * m, "B" * m, p - 1 - r)),
    # The same order on and on, without a flush between batches.
    "pipedream": ("PipeDream", lambda r, p, m: in_turn("F" * m, "B" * m, p - 1 - r)),
    "interleaved": ("Interleaved 1F1B", None),  # no word: rank r has v stages
    # W waits until the rank would idle: rank r puts it off by r microbatches, so that all hold as
    # many activations as rank 0.
    "zb-h1": ("ZB-H1", lambda r, p, m: zero_bubble(m, p - 1 - r, r)),
    # Twice as far ahead, in twice the memory: with 2p - 1 microbatches and F = I = W no rank idles
    # once it has begun.
    "zb-h2": ("ZB-H2", lambda r, p, m: zero_bubble(m, 2 * (p - 1 - r), 2 * r)),
    "zb-v": ("ZB-V", zb_v),
}
"""Title, and the word of rank r of p: what it does with m microbatches, a letter an operation."""


def from_words(words: Sequence[Iterable[str]]) -> list[Order]:
    """Rank r has stage r, and in a V also stage 2p - 1 - r, written in small letters."""
    orders = []
    for r, word in enumerate(words):
        second = 2 * len(words) - 1 - r
        word = list(word)
        step = {x: (x.upper(), r if x.isupper() else second) for x in set(word)}
        orders.append(numbered(step[x] for x in word))
    return orders


def numbered(steps: Iterable[tuple[str, int]]) -> Order:
    """Operations from (kind, stage): each kind takes a stage's microbatches in turn."""
    turn: dict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
    return [(*step, next(turn[step])) for step in steps]


def interleaved(p: int, m: int, v: int) -> list[Order]:
    """v stages a rank, p apart: microbatches go round the ranks v times, in rounds of p or so."""
    rounds = max(1, m // p)
    if m % rounds:
        raise ValueError(
            f"{m} microbatches cannot be cut into {rounds} equal rounds over {p} ranks; take a "
            f"multiple of {p}, such as {rounds * p} or {(rounds + 1) * p}"
        )
    size = m // rounds
    chunks = [chunk for _ in range(rounds) for chunk in range(v) for _ in range(size)]
    orders = []
    for r in range(p):
        forwards = [("F", chunk * p + r) for chunk in chunks]
        backwards = [("B", (v - 1 - chunk) * p + r) for chunk in chunks]
        # Before its first backward: all its stages but the last, and 2 a rank from here to the end.
        orders.append(numbered(in_turn(forwards, backwards, (v - 1) * size + 2 * (p - 1 - r))))
    return orders


def build(name: str, p: int, m: int, v: int = 2) -> list[Order]:
    """Every rank's order; v: stages a rank of the interleaved one."""
    _, word = SCHEDULES[name]
    if word is None:
        return interleaved(p, m, v)
    orders = from_words([word(r, p, m) for r in range(p)])
    return [[op for op in order if op[2] < m] for order in orders]  # zb_v's may be more


# --- The clock -------------------------------------------------------------------------------

Times = dict[Op, tuple[int, int]]  # operation -> start and end


def simulate(
    orders: list[Order], duration: dict[str, int], free: Sequence[int] = ()
) -> tuple[Times, list[int]]:
    """Start each operation when its rank has ended the one before it and all it needs has arrived.

    `free`: when each rank may begin, 0 by default. Also returns when each rank ends.
    """
    rank_of = {op: rank for rank, order in enumerate(orders) for op in order}
    last_stage = max(stage for _, stage, _ in rank_of)
    now = list(free) or [0] * len(orders)
    left = [order[::-1] for order in orders]  # the next operation is the last one of the list
    times: Times = {}
    while any(left):
        before = len(times)
        for rank, order in enumerate(left):
            while order:
                op = order[-1]
                source = need(op, last_stage)
                if source is not None and source not in times:
                    break  # another rank has to get there first
                start = now[rank]
                if source is not None:
                    sending = 0 if rank_of[source] == rank else duration["send"]
                    start = max(start, times[source][1] + sending)
                order.pop()
                now[rank] = start + duration[op[0]]
                times[op] = start, now[rank]
        if len(times) == before:
            stuck = [order[-1] for order in left if order]
            raise ValueError(f"deadlock: each of {stuck} waits for one that is not run")
    return times, now


# --- What it costs ---------------------------------------------------------------------------


class Row(NamedTuple):
    """One schedule: a batch on its own, and `num_batches` of them in a row (the stream)."""

    orders: list[Order]  # what is drawn: a batch, or for PipeDream the stream
    times: Times  # in ticks
    tick: Fraction
    makespan: Fraction
    idle: Fraction  # share of all ranks' time until the last one ends
    span_idle: Fraction  # share of the time between a rank's own first start and last end
    stream: Fraction
    stream_idle: Fraction
    activations: list[Fraction]  # by rank: microbatches whose activations it holds at most
    versions: list[int]  # by rank: versions of its weights that it keeps at most
    staleness: list[int]  # by rank: most updates between a microbatch's weights and its own update


def measure(name: str, config: dict[str, Any]) -> Row:
    """Simulate one schedule. Raises ValueError for sizes that it does not take."""
    p = config["num_stages"]
    m = config["num_microbatches"]
    count = config["num_batches"]
    v = {"interleaved": config["chunks"], "zb-v": 2}.get(name, 1)
    duration, tick = in_ticks(config, v)
    orders = build(name, p, m, v)
    times, ends = simulate(orders, duration)
    makespan = max(ends)
    spans = sum(ends) - sum(times[order[0]][0] for order in orders)
    versions = [1] * p
    staleness = [0] * p
    if name == "pipedream":  # never pauses: the stream is one long batch
        orders = build(name, p, m * count, v)
        times, ends = simulate(orders, duration)
        versions, staleness = map(list, zip(*map(stashed_versions, orders), strict=True))
    else:
        for _ in range(count - 1):  # a rank begins the next batch once its own work is done
            _, ends = simulate(orders, duration, ends)
    stream = max(ends)
    work = m * v * (duration["F"] + duration["B"])  # of a rank, in a batch
    idle = 1 - Fraction(work, makespan)
    span_idle = 1 - Fraction(work * p, spans)
    stream_idle = 1 - Fraction(work * count, stream)
    return Row(
        orders, times, tick, makespan * tick, idle, span_idle, stream * tick, stream_idle,
        [peak_activations(order, v) for order in orders], versions, staleness,
    )  # fmt: skip


def in_ticks(config: dict[str, Any], v: int) -> tuple[dict[str, int], Fraction]:
    """Durations on one of a rank's v stages, and the tick they are multiples of: sums of whole
    numbers are exact, and quick."""
    exact = [Fraction(config[key]) for key in DURATIONS]
    tick = Fraction(1, v * math.lcm(*(time.denominator for time in exact)))
    f, i, w, send = (int(time / tick) for time in exact)
    return {"F": f // v, "B": (i + w) // v, "I": i // v, "W": w // v, "send": send}, tick


def peak_activations(order: Order, v: int) -> Fraction:
    """A forward pass adds a microbatch's activations on one stage, 1/v of what a rank would hold;
    they go with B, or with W where the backward pass is cut."""
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    return Fraction(max(itertools.accumulate(change[kind] for kind, _, _ in order)), v)


def stashed_versions(order: Order) -> tuple[int, int]:
    """PipeDream's weight stashing on one stage: versions kept and updates behind, each at most.

    A forward pass takes the newest weights, its backward pass the same ones again; then the stage
    updates. So a version is kept while a microbatch that used it is in flight.
    """
    updates = 0
    most = 1
    behind = 0
    used: dict[int, int] = {}  # microbatch in flight -> version
    for kind, _, i in order:
        if kind == "F":
            used[i] = updates
        else:
            behind = max(behind, updates - used.pop(i))
            updates += 1
        most = max(most, len({updates, *used.values()}))
    return most, behind


# --- What is printed -------------------------------------------------------------------------

NOTES = (
    "bubble: idle share until the last rank ends; span: within each rank's own span; used: busy "
    "share.",
    "In a row: after a flush a rank starts the next batch once its own work is done; others never "
    "pause.",
    "At most, on any rank or stage: activ., microbatches whose activations it holds; weights, "
    "copies of\nits parameters; stale, updates between the weights a microbatch saw and its own.",
)
LEGEND = """\
F forward; B backward, or its halves I (the input's gradient) and W (the weights'); number:
microbatch; - goes on; . idle; times are rounded to columns; f, b, i, w: on a stage of the rank that
is not its first"""

Cell = tuple[int, str, Fraction, Fraction]  # rank, what is written, start and end
MOST_COLUMNS = 1000  # then cells are narrower than their text: a letter, or nothing


def number(value: Fraction | int) -> str:
    return f"{float(value):.4g}"


def percent(share: Fraction) -> str:
    return f"{float(100 * share):.1f}%"


def table_head(num_batches: int) -> str:
    return f"""{"":<24}{"one batch":^20}{f"{num_batches} in a row":^15}{"at most":>14}
{"":<24}  time bubble   span    time   used activ. weights stale"""


def table_line(title: str, *figures: Any) -> str:
    """A Row's figures, from its makespan on; of those by rank or stage the largest."""
    makespan, idle, span_idle, stream, stream_idle, activations, versions, staleness = figures
    cells = f"{number(makespan):>6}{percent(idle):>7}{percent(span_idle):>7}"
    cells += f" {number(stream):>7}{percent(1 - stream_idle):>7}"
    cells += f"{number(max(activations)):>7}{number(max(versions)):>8}{max(staleness):>5}"
    return f"{title:<24}{cells}"


def cells(row: Row) -> Iterator[Cell]:
    p = len(row.orders)
    for rank, order in enumerate(row.orders):
        for op in order:
            kind, stage, i = op
            start, end = row.times[op]
            text = f"{kind if stage < p else kind.lower()}{i}"
            yield rank, text, start * row.tick, end * row.tick


def draw(
    shown: Sequence[Cell],
    columns: int,
    paint: Callable[[str, str], Iterable[str]] = lambda text, letters: letters,
) -> str:
    """A line a rank, each operation from start to end; goes on below after so many columns. `paint`
    colours a cell's letters."""
    last = max(end for *_, end in shown)
    rate = max(len(text) / (end - start) for _, text, start, end in shown if start < end)
    rate = min(rate, MOST_COLUMNS / last)  # columns a unit of time
    steps = (digit * Fraction(10) ** power for power in range(-9, 20) for digit in (1, 2, 5))
    every = next(step for step in steps if step * rate >= 10)
    marks = ""
    for time in (place * every for place in range(math.ceil(last / every))):
        marks = marks.ljust(math.floor(time * rate)) + f"{float(time):.12g}"
    width = math.ceil(last * rate)
    lines = [["."] * width for _ in range(1 + max(rank for rank, *_ in shown))]
    for rank, text, *times in shown:
        first, end = (math.floor(time * rate) for time in times)
        letters = text if len(text) <= end - first else text[0]
        lines[rank][first:end] = paint(text, letters.ljust(end - first, "-")[: end - first])
    named = [("time", marks), *((f"rank {rank} ", line) for rank, line in enumerate(lines))]
    prefix = len(named[-1][0])
    room = max(40, columns - prefix - 1)
    return "\n".join(
        f"{name:<{prefix}}{''.join(line[begin : begin + room])}".rstrip()
        for begin in range(0, width, room)
        for name, line in named
    )


def title_line(p: int, m: int, config: dict[str, Any]) -> str:
    f, i, w, c = (number(config[key]) for key in DURATIONS)
    return (
        f"p = {p} ranks, m = {m} microbatches a batch; durations F = {f}, I = {i}, W = {w},\n"
        f"B = I + W, communication {c}"
    )


def main(config: dict[str, Any]) -> None:
    """The table of all schedules, or one schedule's timeline and its line of the table."""
    print(title_line(config["num_stages"], config["num_microbatches"], config))
    names = [config["schedule"]]
    if names == ["all"]:
        names = list(SCHEDULES)
    else:
        timeline = draw([*cells(measure(names[0], config))], get_terminal_size((100, 24)).columns)
        title, _ = SCHEDULES[names[0]]
        count = f", {config['num_batches']} batches in a row" * (names == ["pipedream"])
        print(LEGEND, "", title + count, timeline, "", sep="\n")
    print(table_head(config["num_batches"]))
    for name in names:
        title, _ = SCHEDULES[name]
        try:
            line = table_line(title, *measure(name, config)[3:])
        except ValueError as error:
            line = f"{title:<24}not possible: {error}"
        print(line, flush=True)  # each as soon as it is there
    print(*NOTES, "More schedules, search, training: python -m pipedream", sep="\n")


if __name__ == "__main__":
    from pipedream.__main__ import run_script

    run_script(main, CONFIG)  # reads the options, and runs what this file does not know
