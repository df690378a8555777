"""A pipeline simulator in one file: what every rank does when, and what that costs.

    python pipedream_simple.py
    python pipedream_simple.py --set schedule=zb-h1 --set weight_gradient=1/2

Read it from top to bottom: the operations, the order in which each rank runs them, the clock, the
costs and what is printed. The file runs alone. Beside the folder `pipedream/`, it also takes the
options of `python -m pipedream`.
"""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
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
    "columns": None,  # of the table, such as time,bubble; None: all
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
    """`ahead` forwards, then one backward and one forward in turn, then the remaining backwards."""
    steps = list(forwards[:ahead])
    for place, backward in enumerate(backwards, ahead):
        steps += [backward, *forwards[place : place + 1]]
    return steps


def zero_bubble(m: int, ahead: int, delay: int) -> str:
    """1F1B with the backward pass cut in two: each W comes `delay` microbatches after its I."""
    delay = min(delay, m)
    return "".join(in_turn("F" * m, ["I"] * delay + ["IW"] * (m - delay), ahead)) + "W" * delay


SCHEDULES: dict[str, tuple[str, Callable[[int, int, int], Iterable[str]] | None]] = {
    # One microbatch in the pipeline at a time: all ranks but one are idle.
    "naive": ("Naive", lambda r, p, m: "FB" * m),
    # All forwards, then all backwards: every rank holds the activations of m microbatches.
    "gpipe": ("GPipe", lambda r, p, m: "F" * m + "B" * m),
    # A backward as early as possible: rank r starts with p - r forwards, and never holds the
    # activations of more than p - r microbatches.
    "1f1b": ("1F1B with flush", lambda r, p, m: in_turn("F" * m, "B" * m, p - r)),
    # The same order on and on, without a flush between batches.
    "pipedream": ("PipeDream", lambda r, p, m: in_turn("F" * m, "B" * m, p - r)),
    "interleaved": ("Interleaved 1F1B", None),  # no word: rank r has v stages
    # W waits until the rank would idle: rank r delays it by r microbatches, so that all ranks hold
    # as many activations as rank 0.
    "zb-h1": ("ZB-H1", lambda r, p, m: zero_bubble(m, p - r, r)),
    # Twice as far ahead, in twice the memory: with 2p - 1 microbatches and F = I = W no rank idles
    # once it has begun.
    "zb-h2": ("ZB-H2", lambda r, p, m: zero_bubble(m, 2 * (p - r) - 1, 2 * r)),
    "zb-v": ("ZB-V", None),  # no word: it depends on the durations
}
"""Title, and the word of rank r of p: what it does with m microbatches, a letter per operation."""


def from_words(words: Sequence[Iterable[str]]) -> list[Order]:
    """Rank r has stage r, and in a V also stage 2p - 1 - r, written in small letters."""
    orders = []
    for r, word in enumerate(words):
        second = 2 * len(words) - 1 - r
        orders.append(numbered((x.upper(), r if x.isupper() else second) for x in word))
    return orders


def numbered(steps: Iterable[tuple[str, int]]) -> Order:
    """Operations from (kind, stage): each kind takes a stage's microbatches in turn."""
    done: Counter[tuple[str, int]] = Counter()
    order = []
    for step in steps:
        order.append((*step, done[step]))
        done[step] += 1
    return order


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
        # Before its first backward: all its stages but the last, and 2 per rank behind it, and 1.
        orders.append(numbered(in_turn(forwards, backwards, (v - 1) * size + 2 * (p - 1 - r) + 1)))
    return orders


EVEN = {"F": 1, "I": 1, "W": 1, "send": 0}


def build(
    name: str, p: int, m: int, v: int = 2, duration: dict[str, int] | None = None
) -> list[Order]:
    """Every rank's order. v: stages per rank of the interleaved one; `duration`: by kind, for ZB-V,
    F = I = W by default."""
    _, word = SCHEDULES[name]
    if word is not None:
        return from_words([word(r, p, m) for r in range(p)])
    return interleaved(p, m, v) if name == "interleaved" else zb_v(p, m, duration or EVEN)


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
    orders = build(name, p, m, v, duration)
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


# --- ZB-V, whose order depends on the durations: skip it at first ---------------------------


def zb_v(p: int, m: int, duration: dict[str, int]) -> list[Order]:
    """The order of ZB-V's authors (arXiv 2401.10241): of several fillings of the V the one whose
    ranks idle least. A filling shows which ranks may idle longer in the next one."""
    best: list[Order] = []
    least = math.inf
    for more in ("iFf", "i", "Ff", ""):
        allowed = [0] * p
        before = math.inf
        while least:
            orders, idle = fill_v(p, m, duration, allowed, more)
            if max(idle) < least:
                best, least = orders, max(idle)
            if max(idle) >= before:
                break
            before = max(idle)
            allowed = [before - own for own in idle]
    return best


def fill_v(
    p: int, m: int, duration: dict[str, int], allowed: Sequence[int], more: str
) -> tuple[list[Order], list[int]]:
    """Every rank's order, and how long it idles after its first F. F and I follow a pattern, and W
    fills the time for which a rank would wait. A step on the way down is F or I, on the way up f or
    i. `allowed`: how much longer than others a rank may idle; `more`: steps that W may delay."""
    orders: list[Order] = [[] for _ in range(p)]
    late: list[Order] = [[] for _ in range(p)]  # W whose I has been run
    done: list[Counter[str]] = [Counter() for _ in range(p)]
    ends: dict[tuple[str, int, int], int] = {}  # step, rank, microbatch
    clock, idle, held = [0] * p, [0] * p, [0] * p  # held: stages' activations

    def arrival(r: int, step: str) -> int:
        """When the step's next input comes from the rank before or after, 0 if from neither."""
        source = r - 1 if step in "Fi" else r + 1
        return ends[step, source, done[r][step]] + duration["send"] if 0 <= source < p else 0

    def run(r: int, step: str) -> None:
        op = (step.upper(), r if step in "FI" else 2 * p - 1 - r, done[r][step])
        start = max(clock[r], arrival(r, step))
        if done[r]["F"]:
            idle[r] += start - clock[r]
        ends[step, r, done[r][step]] = clock[r] = start + duration[op[0]]
        done[r][step] += 1
        orders[r].append(op)
        if step in "Ff":
            held[r] += 1
        else:
            late[r].append(("W", *op[1:]))

    def run_weights(r: int) -> None:
        orders[r].append(late[r].pop(0))
        clock[r] += duration["W"]
        held[r] -= 1

    def run_after_weights(r: int, step: str) -> None:
        """Each W that ends before the step's input arrives; one more if the rank would otherwise
        have idled longer than others; the step."""
        while late[r] and arrival(r, step) >= clock[r] + duration["W"]:
            run_weights(r)
        spare = max(*idle, allowed[r]) - idle[r]
        if late[r] and (step == "I" or step in more) and arrival(r, step) - clock[r] > spare:
            run_weights(r)
        run(r, step)

    # Microbatch 0 goes down the V and up again; what arrives late leaves time for further F.
    for r in range(p):
        run(r, "F")
    for r in reversed(range(p)):
        up = arrival(r, "f")
        room = 2 * (p - 1 - r)
        while held[r] <= room and clock[r] + duration["F"] <= up and done[r]["F"] < m:
            for rank in range(r + 1):
                run(rank, "F")
        run(r, "f")
    # Each rank catches up with the rank before it, F and f in turn.
    turns = 0
    for r in range(1, p):
        ahead = done[r - 1]
        while done[r].total() < ahead.total() or done[r]["f"] <= ahead["f"] < m:
            step = "Ff"[turns % 2]
            turns += 1
            for rank in reversed(range(r, p)):
                if done[rank][step] < m:
                    run(rank, step)
    # From now on one backward and one forward in turn on each rank.
    for _ in range(2 * m):
        down, up_again = [], []
        for r in range(p):
            arrived = r == p - 1 or done[r]["I"] < done[r + 1]["I"] or done[r]["i"] == m
            (down if done[r]["I"] < done[r]["i"] and arrived else up_again).append(r)
        for r in reversed(down):
            run_after_weights(r, "I")
        for r in up_again:
            run_after_weights(r, "i")
        for r in range(p):
            first, second = done[r]["F"], done[r]["f"]
            if second < first and (r == p - 1 or second < done[r + 1]["f"]):
                step = "f"
            elif first < m and (second == first or r == 0 or first < done[r - 1]["F"]):
                step = "F"
            else:
                continue
            while held[r] == 2 * p:  # no more than 1F1B's rank 0 holds
                run_weights(r)
            run_after_weights(r, step)
    for r in range(p):
        while late[r]:
            run_weights(r)
    return orders, idle


# --- What is printed -------------------------------------------------------------------------

NOTES = {
    "one batch": "bubble: idle share until the last rank ends; span: within each rank's own span.",
    "in a row": "In a row: after a flush a rank starts the next batch once its own work is done; "
    "others never\npause; used: busy share.",
    "at most": "At most, on any rank or stage: activ., microbatches whose activations it holds; "
    "weights, copies of\nits parameters; stale, updates between the weights a microbatch saw and "
    "its own.",
}
"""By group of COLUMNS."""
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


# Of the table: a name, what stands over it, how wide it is, and a Row's figure as text; of figures
# by rank or stage the largest.
COLUMNS: dict[str, tuple[str, int, Callable[[Any], str]]] = {
    "time": ("one batch", 6, number),
    "bubble": ("one batch", 7, percent),
    "span": ("one batch", 7, percent),
    "in-a-row": ("in a row", 8, number),
    "used": ("in a row", 7, lambda idle: percent(1 - idle)),
    "activ.": ("at most", 7, lambda held: number(max(held))),
    "weights": ("at most", 8, lambda kept: number(max(kept))),
    "stale": ("at most", 6, lambda behind: number(max(behind))),
}


def table_head(num_batches: int, shown: Sequence[str] | None = None) -> str:
    groups: Counter[str] = Counter()
    for name in shown or COLUMNS:
        group, width, _ = COLUMNS[name]
        groups[group] += width
    titles = {"in a row": f"{num_batches} in a row"}
    over = "".join(f"{titles.get(group, group):^{width}}" for group, width in groups.items())
    names = {"in-a-row": "time"}
    heads = "".join(f"{names.get(name, name):>{COLUMNS[name][1]}}" for name in shown or COLUMNS)
    return f"{'':<24}{over.rstrip()}\n{'':<24}{heads}"


def notes(shown: Sequence[str] | None) -> list[str]:
    """What the columns are."""
    groups = dict.fromkeys(COLUMNS[name][0] for name in shown or COLUMNS)
    return [NOTES[group] for group in groups]


def table_line(title: str, figures: Iterable[Any], shown: Sequence[str] | None = None) -> str:
    """A Row's figures, from its makespan on, those whose columns are shown."""
    line = f"{title:<24}"
    for (name, (_, width, text)), figure in zip(COLUMNS.items(), figures, strict=True):
        if not shown or name in shown:
            line += f"{text(figure):>{width}}"
    return line


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
    print(table_head(config["num_batches"], config["columns"]))
    for name in names:
        title, _ = SCHEDULES[name]
        try:
            line = table_line(title, measure(name, config)[3:], config["columns"])
        except ValueError as error:
            line = f"{title:<24}not possible: {error}"
        print(line, flush=True)  # each as soon as it is there
    print(
        *notes(config["columns"]), "More schedules, search, training: python -m pipedream", sep="\n"
    )


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """CONFIG with each `--set key=value`; exits with a line for what is not accepted."""
    config = dict(CONFIG)
    for change in arguments:
        key, _, value = change.partition("=")
        if change == "--set":
            continue
        try:
            if key == "schedule":
                accepted = value in ("all", *SCHEDULES)
                config[key] = value
            elif key == "columns":
                config[key] = value.split(",")
                accepted = set(config[key]) <= COLUMNS.keys()
            else:
                config[key] = Fraction(value) if key in DURATIONS else int(value)
                least = 0 if key in ("weight_gradient", "communication", "steps") else 1e-9
                accepted = key in CONFIG and config[key] >= least
        except ValueError:
            accepted = False
        if not accepted:
            sys.exit(f"error: {change} is not accepted; give --set key=value, with a CONFIG key")
    return config


if __name__ == "__main__":
    if Path(__file__).with_name("pipedream").is_dir():
        from pipedream.__main__ import run_script

        run_script(main, CONFIG)  # reads the options, and runs what this file does not know
    main(read_arguments(sys.argv[1:]))
