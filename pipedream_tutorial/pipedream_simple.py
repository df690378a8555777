"""Simulate pipelines: the times of all operations on every rank, and what each schedule costs.

    python pipedream_simple.py
    python pipedream_simple.py --set schedule=zb-h1 --set weight_gradient=1/2

Read this file from top to bottom: operations, orders, the clock, costs, printing. The file needs no
other files. If the folder `pipedream/` is next to this file, the program also accepts the options
of `python -m pipedream`.
"""

import itertools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NamedTuple

CONFIG: dict[str, Any] = {
    "num_stages": 4,  # p: stages of the pipeline, one per rank
    "num_microbatches": 4,  # m: microbatches per batch
    "layers_per_stage": 1,  # layers on a rank, each with the durations below
    "verbose": True,  # True: draw every schedule; False: none; None: only a schedule that you name
    "schedule": "all",  # or naive, gpipe, 1f1b, pipedream, interleaved, zb-h1, zb-h2, zb-v
    "forward": 1,  # F: time of one microbatch's forward pass through a layer, in any unit
    "input_gradient": 1,  # I: time of the half of the backward pass that other ranks wait for
    "weight_gradient": 1,  # W: time of the half that only the optimizer waits for
    "communication": 0,  # time of a message between two ranks, which keep computing meanwhile
    "chunks": 2,  # v: stages per rank under interleaved 1F1B
    "num_batches": 4,  # consecutive batches, which show the gain of schedules without a flush
    "columns": None,  # columns of the table, such as time,bubble; None: all
    "steps": 0,  # batches to train on; `python -m pipedream` trains
}
# For keys that you remove from CONFIG
DEFAULTS: dict[str, Any] = {
    "num_stages": 4, "num_microbatches": 4, "layers_per_stage": 1, "verbose": True,
    "schedule": "all", "forward": 1, "input_gradient": 1, "weight_gradient": 1, "communication": 0,
    "chunks": 2, "num_batches": 4, "columns": None, "steps": 0,
}  # fmt: skip
DURATIONS = ("forward", "input_gradient", "weight_gradient", "communication")

# --- Operations ------------------------------------------------------------------------------

Op = tuple[str, int, int]
"""(kind, stage, microbatch). The kinds are F (forward) and B (backward), or I and W, the two
halves of B. I computes the gradient of the stage's input, and W the gradients of its weights."""

Order = list[Op]  # operations of one rank, from first to last


def need(op: Op, last_stage: int) -> Op | None:
    """Return the operation whose result this operation needs. Return None for F on stage 0, which
    needs no result."""
    kind, stage, i = op
    if kind == "F":
        return ("F", stage - 1, i) if stage > 0 else None
    if kind == "W":
        return ("I", stage, i)
    if stage == last_stage:
        return ("F", stage, i)  # the loss connects F and B (or I)
    return (kind, stage + 1, i)  # F of this stage has run before


# --- Orders of p ranks and m microbatches ----------------------------------------------------


def in_turn(forwards: Sequence[Any], backwards: Sequence[Any], ahead: int) -> list[Any]:
    """Return `ahead` forwards, then alternately one backward and one forward, then the remaining
    backwards."""
    steps = list(forwards[:ahead])
    for next_forward, backward in enumerate(backwards, ahead):
        steps += [backward, *forwards[next_forward : next_forward + 1]]
    return steps


def zero_bubble(m: int, ahead: int, delay: int) -> str:
    """Return one rank's word (one letter per operation) under 1F1B with split backward passes. The
    word starts with `ahead` forwards, and each W comes `delay` microbatches after its I."""
    delay = min(delay, m)
    return "".join(in_turn("F" * m, ["I"] * delay + ["IW"] * (m - delay), ahead)) + "W" * delay


def zb_v(m: int, p: int, r: int) -> str:
    """Return rank r's word under ZB-V (arXiv 2401.10241), in PyTorch's order, for `2p - 1` or more
    microbatches. Lowercase letters are operations on the way up the V."""
    word = "F" * (2 * (p - r) - 1) + "fF" * r + "fiw" * (p - r)
    # This part repeats until the rank's first stage has run all forward passes.
    word += "FIWfiw" * (m - (2 * p - 1 - r)) + "IWfiw" * (p - 1 - r)
    return word + "Ii" * r + "IW" * (p - r) + "w" * r + "W" * r


SCHEDULES: dict[str, tuple[str, Callable[[int, int, int], Iterable[str]] | None]] = {
    # One microbatch in the pipeline at a time: all ranks but one are idle.
    "naive": ("Naive", lambda r, p, m: "FB" * m),
    # All forwards, then all backwards: every rank holds the activations of m microbatches.
    "gpipe": ("GPipe", lambda r, p, m: "F" * m + "B" * m),
    # Backwards run as early as possible. Rank r starts with p - r forwards and never holds the
    # activations of more than p - r microbatches.
    "1f1b": ("1F1B with flush", lambda r, p, m: in_turn("F" * m, "B" * m, p - r)),
    # 1F1B's order over all batches, without a flush between them.
    "pipedream": ("PipeDream", lambda r, p, m: in_turn("F" * m, "B" * m, p - r)),
    "interleaved": ("Interleaved 1F1B", None),  # has no word, because rank r has v stages
    # W fills idle time. Rank r delays W by r microbatches, so that all ranks hold as many
    # activations as rank 0.
    "zb-h1": ("ZB-H1", lambda r, p, m: zero_bubble(m, p - r, r)),
    # Twice as many warm-up forwards, in twice the memory. With 2p - 1 microbatches and F = I = W,
    # no rank idles between its first and its last operation.
    "zb-h2": ("ZB-H2", lambda r, p, m: zero_bubble(m, 2 * (p - r) - 1, 2 * r)),
    # Rank r has the stages r and 2p - 1 - r. Rank 0 computes the loss and gets gradients early.
    "zb-v": ("ZB-V", lambda r, p, m: zb_v(m, p, r)),
}
"""Title, and a function of r, p and m that returns rank r's word: one letter per operation."""


def from_words(words: Sequence[Iterable[str]]) -> list[Order]:
    """Return the orders that `words` describes. `words` contains one word per rank. The letters of
    rank r's word are operations on stage r. In a V-shaped schedule, lowercase letters are
    operations on stage `2p - 1 - r`."""
    orders = []
    for r, word in enumerate(words):
        step_of = {}
        for letter in "FBIW":
            step_of[letter] = letter, r
            step_of[letter.lower()] = letter, 2 * len(words) - 1 - r
        orders.append(numbered(step_of[letter] for letter in word))
    return orders


def numbered(steps: Iterable[tuple[str, int]]) -> Order:
    """Return the operations of `steps`. For each kind and stage, microbatches are numbered from
    0."""
    numbers: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
    return [(*step, next(numbers[step])) for step in steps]


def interleaved(p: int, m: int, v: int) -> list[Order]:
    """Return orders for v stages per rank. A rank's stages are p apart. The microbatches pass
    through all ranks v times, in rounds of about p microbatches."""
    rounds = max(1, m // p)
    if m % rounds:
        raise ValueError(
            f"{m} microbatches cannot be cut into {rounds} equal rounds over {p} ranks; use a "
            f"multiple of {p}, such as {rounds * p} or {(rounds + 1) * p}"
        )
    size = m // rounds
    chunks = [chunk for _ in range(rounds) for chunk in range(v) for _ in range(size)]
    orders = []
    for r in range(p):
        forwards = [("F", chunk * p + r) for chunk in chunks]
        backwards = [("B", (v - 1 - chunk) * p + r) for chunk in chunks]
        # Before its first backward, the rank runs a round of forwards on all of its stages but one,
        # two forwards per later rank, and one more.
        orders.append(numbered(in_turn(forwards, backwards, (v - 1) * size + 2 * (p - 1 - r) + 1)))
    return orders


def build(name: str, p: int, m: int, v: int = 2) -> list[Order]:
    """Return each rank's order. Only interleaved 1F1B uses `v`. If ZB-V has too few microbatches,
    the surplus microbatches are taken out of the order for `2p - 1`."""
    _, word = SCHEDULES[name]
    if word is None:
        return interleaved(p, m, v)
    count = max(m, 2 * p - 1) if name == "zb-v" else m
    orders = from_words([word(r, p, count) for r in range(p)])
    return [[op for op in order if op[2] < m] for order in orders]


# --- The clock -------------------------------------------------------------------------------

# All times are whole numbers of ticks, so that sums are exact.
Times = dict[Op, tuple[int, int]]  # operation -> start and end
Durations = dict[str, int]  # of F, B, I and W on a stage, and of sending a message


def simulate(
    orders: list[Order], duration: Durations, free: Sequence[int] = ()
) -> tuple[Times, list[int]]:
    """Start each operation when its rank is free and its input has arrived.

    `free` contains the time at which each rank may begin. An empty `free` means 0 for all ranks.
    Return the times of all operations, and the time at which each rank ends.
    """
    rank_of = {op: rank for rank, order in enumerate(orders) for op in order}
    last_stage = max(stage for _, stage, _ in rank_of)
    now = list(free) or [0] * len(orders)
    remaining = [order[::-1] for order in orders]  # the last element is the next operation
    times: Times = {}
    while any(remaining):
        before = len(times)
        for rank, order in enumerate(remaining):
            while order:
                op = order[-1]
                start = now[rank]
                source = need(op, last_stage)
                if source is not None:
                    if source not in times:
                        break  # another rank must run first
                    sending = 0 if rank_of[source] == rank else duration["send"]
                    start = max(start, times[source][1] + sending)
                order.pop()
                now[rank] = start + duration[op[0]]
                times[op] = start, now[rank]
        if len(times) == before:
            stuck = [order[-1] for order in remaining if order]
            raise ValueError(f"deadlock: {stuck} wait for operations that never run")
    return times, now


# --- What it costs ---------------------------------------------------------------------------


class Row(NamedTuple):
    """Results of one schedule for a single batch and for `num_batches` consecutive batches (the
    stream)."""

    orders: list[Order]  # drawn orders: a batch or, for PipeDream, the stream
    times: Times
    ticks: int  # per unit of time
    makespan: Fraction  # in units of time, like `stream`
    idle: Fraction  # idle share of all ranks' time until the last rank ends
    span_idle: Fraction  # idle share of the time between each rank's first start and last end
    stream: Fraction
    stream_idle: Fraction
    activations: list[Fraction]  # by rank: maximum number of microbatches held
    versions: list[int]  # by rank: maximum number of weight versions kept
    # By rank: maximum number of updates between a microbatch's weights and its own update
    staleness: list[int]


def measure(name: str, config: dict[str, Any]) -> Row:
    """Simulate a schedule and return its Row. Raises ValueError for sizes that the schedule does
    not allow."""
    p, m, count = config["num_stages"], config["num_microbatches"], config["num_batches"]
    v = {"interleaved": config["chunks"], "zb-v": 2}.get(name, 1)
    duration, ticks = stage_durations(config, v)
    orders = build(name, p, m, v)
    times, ends = simulate(orders, duration)
    makespan = max(ends)
    spans = sum(ends) - sum(times[order[0]][0] for order in orders)
    versions, staleness = [1] * p, [0] * p
    if name == "pipedream":  # never pauses, so the stream is one long batch
        orders = build(name, p, m * count, v)
        times, ends = simulate(orders, duration)
        versions, staleness = map(list, zip(*map(stashed_versions, orders), strict=True))
    else:
        for _ in range(count - 1):  # a rank begins a batch when it has finished the previous one
            _, ends = simulate(orders, duration, ends)
    stream = max(ends)
    work = m * v * (duration["F"] + duration["B"])  # work of a rank per batch
    return Row(
        orders, times, ticks,
        Fraction(makespan, ticks), 1 - Fraction(work, makespan), 1 - Fraction(work * p, spans),
        Fraction(stream, ticks), 1 - Fraction(work * count, stream),
        [peak_activations(order, v) for order in orders], versions, staleness,
    )  # fmt: skip


def stage_durations(config: dict[str, Any], v: int) -> tuple[Durations, int]:
    """Return the duration of each kind of operation on one stage of a rank with v stages, and the
    time to send a message. Also return the number of ticks per unit of time."""
    f, i, w, send = (Fraction(config[key]) for key in DURATIONS)
    fractions = {"F": f / v, "B": (i + w) / v, "I": i / v, "W": w / v, "send": send}
    ticks = math.lcm(*(duration.denominator for duration in fractions.values()))
    return {key: int(duration * ticks) for key, duration in fractions.items()}, ticks


def peak_activations(order: Sequence[Op], v: int) -> Fraction:
    """Return the largest number of microbatches held at any time. Each F adds 1/v, because a rank
    has v stages. Each B or W subtracts 1/v."""
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    held = itertools.accumulate(change[kind] for kind, _, _ in order)
    return Fraction(max(held, default=0), v)


def stashed_versions(order: Order) -> tuple[int, int]:
    """Return two maximums for a PipeDream stage: the number of weight versions that it keeps, and
    the number of updates by which its gradients are late.

    A forward pass uses the newest weights. Its backward pass uses the same version, and then the
    stage updates its weights. Therefore a stage keeps a version while a microbatch that used it is
    in flight."""
    updates, most, behind = 0, 1, 0
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

LEGEND = """\
F forward; B backward, or its halves I (the input's gradient) and W (the weights'); number:
microbatch; - continues; . idle; times are rounded to columns; f, b, i, w: on a stage of the rank
that is not its first"""

Cell = tuple[int, str, Fraction, Fraction]  # rank, text, start and end
Paint = Callable[[str, str], Iterable[str]]  # colors the letters of a cell's text
MAX_COLUMNS = 1000  # longer timelines get narrower cells, which show one letter or nothing
MAX_LINES = 100  # longer timelines are drawn as a picture
COLORS = {"F": "#56B4E9", "B": "#D55E00", "I": "#F0E442", "W": "#00523B"}


def number(value: Fraction | int) -> str:
    return f"{float(value):.4g}" if value < 10_000 else f"{float(value):.0f}"


def percent(share: Fraction) -> str:
    return f"{float(100 * share):.1f}%"


# Name -> width, function that formats a value as text (the largest value, if there is one per rank
# or stage), and meaning
COLUMNS: dict[str, tuple[int, Callable[[Any], str], str]] = {
    "time": (6, number, "time of one batch"),
    "bubble": (7, percent, "idle share of all ranks' time in one batch"),
    "span": (6, percent, "idle share of the time from each rank's first start to its last end"),
    "in-a-row": (9, number, "time of {num_batches} batches; a rank starts its next batch at once"),
    "used": (
        7,
        lambda idle: percent(1 - idle),
        "busy share of all ranks' time in {num_batches} batches",
    ),
    "activ.": (
        7,
        lambda held: number(max(held)),
        "largest number of microbatches that a rank holds in memory",
    ),
    "weights": (8, lambda kept: number(max(kept)), "largest number of parameter copies on a rank"),
    "stale": (
        6,
        lambda behind: number(max(behind)),
        "largest number of updates by which a gradient is late",
    ),
}


def table_line(title: str, values: Iterable[Any], shown: Sequence[str] | None) -> str:
    """Format one row of the table. `values` contains either the column names or the values of a
    Row, starting with the makespan. `shown` names the columns to print; None prints all columns."""
    line = f"{title:<24}"
    for (name, (width, text, _)), value in zip(COLUMNS.items(), values, strict=True):
        if not shown or name in shown:
            line += f"{value if isinstance(value, str) else text(value):>{width}}"
    return line


def notes(config: dict[str, Any]) -> list[str]:
    """Return one line of explanation for each shown column."""
    names = config["columns"] or COLUMNS
    return [f"{name}: {COLUMNS[name][2].format(**config)}" for name in names]


def cells(row: Row) -> list[Cell]:
    cell_list = []
    for rank, order in enumerate(row.orders):
        for kind, stage, i in order:
            letter = kind if stage < len(row.orders) else kind.lower()
            start, end = row.times[kind, stage, i]
            times = Fraction(start, row.ticks), Fraction(end, row.ticks)
            cell_list.append((rank, f"{letter}{i}", *times))
    return cell_list


def time_marks(last: Fraction, rate: Fraction) -> list[tuple[Fraction, str]]:
    """Return the columns and texts of time marks that are at least 10 columns apart. The distance
    between marks is 1, 2 or 5 times a power of ten."""
    steps = (step * Fraction(10) ** power for power in range(-9, 99) for step in (1, 2, 5))
    every = next(step for step in steps if step * rate >= 10)
    times = (mark * every for mark in range(math.ceil(last / every)))
    return [(time * rate, f"{float(time):.12g}") for time in times]


def draw(
    cell_list: Sequence[Cell], columns: int, paint: Paint = lambda text, letters: letters
) -> str:
    """Return a time axis and one line per rank. Lines are wrapped at `columns`."""
    last = max(end for *_, end in cell_list)
    rate = max(len(text) / (end - start) for _, text, start, end in cell_list if start < end)
    rate = min(rate, MAX_COLUMNS / last)  # columns per unit of time
    width = math.ceil(last * rate)
    lines = [["."] * width for _ in range(1 + max(rank for rank, *_ in cell_list))]
    for rank, text, start, end in cell_list:
        first, after = math.floor(start * rate), math.floor(end * rate)
        letters = text if len(text) <= after - first else text[0]
        lines[rank][first:after] = paint(text, letters.ljust(after - first, "-")[: after - first])
    marks = ""
    for column, text in time_marks(last, rate):
        marks = marks.ljust(math.floor(column)) + text
    named = [("time", marks)]
    named += [(f"rank {rank} ", line) for rank, line in enumerate(lines)]
    prefix = len(named[-1][0])
    text_width = max(40, columns - prefix - 1)
    return "\n".join(
        f"{name:<{prefix}}{''.join(line[begin : begin + text_width])}".rstrip()
        for begin in range(0, width, text_width)
        for name, line in named
    )


def draw_or_save(name: str, cell_list: Sequence[Cell], text: str) -> str:
    """Return `text`, the timeline of these cells. If it has more than MAX_LINES lines, save a
    picture instead, and return a line that names the file."""
    num_lines = text.count("\n") + 1
    if num_lines <= MAX_LINES:
        return text
    path = Path(f"{name}.svg")
    path.write_text(picture(cell_list))
    return f"The timeline would take {num_lines} lines. A browser shows it: {path.absolute()}"


def picture(cell_list: Sequence[Cell]) -> str:
    """Return the timeline as an SVG picture. A column is 8 pixels wide, and a rank 12 high."""
    last = max(end for *_, end in cell_list)
    bottom = 12 * (1 + max(rank for rank, *_ in cell_list))
    rate = 200 / last  # columns per unit of time
    boxes: dict[str, list[str]] = {kind: [] for kind in COLORS}
    for rank, text, start, end in cell_list:
        x, width = float(8 * rate * start), float(8 * rate * (end - start))
        boxes[text[0].upper()].append(f"M{x:.2f} {12 * rank}h{width:.2f}v10h-{width:.2f}z")
    size = f'x="-60" y="-20" width="1680" height="{bottom + 60}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-60 -20 1680 {bottom + 60}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect {size} fill="white"/>',
    ]
    for place, (kind, color) in enumerate(COLORS.items()):
        lines.append(f'<path fill="{color}" d="{"".join(boxes[kind])}"/>')
        swatch = f'<tspan fill="{color}">&#9632;</tspan>'
        lines.append(f'<text x="{60 * place}" y="{bottom + 30}">{swatch} {kind}</text>')
    for y in range(0, bottom, 12):
        lines.append(f'<text x="-50" y="{y + 9}">rank {y // 12}</text>')
    for column, text in time_marks(last, rate):
        lines.append(f'<text x="{float(8 * column):.2f}" y="{bottom + 12}">{text}</text>')
    return "\n".join([*lines, "</svg>"])


def title_line(p: int, m: int, config: dict[str, Any]) -> str:
    f, i, w, c = (number(config[key]) for key in DURATIONS)
    return (
        f"p = {p} ranks, m = {m} microbatches per batch; durations F = {f}, I = {i}, W = {w},\n"
        f"B = I + W, communication {c}"
    )


def main(config: dict[str, Any]) -> None:
    """Print the table of all schedules, or one schedule's timeline and table row."""
    layers = config["layers_per_stage"]
    config = config | {key: layers * Fraction(config[key]) for key in DURATIONS[:3]}
    print(title_line(config["num_stages"], config["num_microbatches"], config))
    name, shown = config["schedule"], config["columns"]
    lines = [table_line("", COLUMNS, shown)]
    names = SCHEDULES if name == "all" else [name]
    draws = config["verbose"] or (config["verbose"] is None and name != "all")
    if draws:
        print(LEGEND)
    for name in names:
        title, _ = SCHEDULES[name]
        try:
            row = measure(name, config)
        except ValueError as error:
            lines.append(f"{title:<24}not possible: {error}")
            continue
        lines.append(table_line(title, row[3:], shown))
        if draws:
            text = draw(cells(row), get_terminal_size((100, 24)).columns)
            count = f", {config['num_batches']} batches in a row" * (name == "pipedream")
            print("", title + count, draw_or_save(name, cells(row), text), sep="\n")
    print("" if draws else lines.pop(0), *lines, sep="\n")
    print(*notes(config), "More schedules, search, training: python -m pipedream", sep="\n")


# Key -> accepted texts, with their values
CHOICES: dict[str, dict[str, Any]] = {
    "schedule": {name: name for name in ("all", *SCHEDULES)},
    "verbose": {"True": True, "False": False, "None": None},
    "columns": {name: name for name in COLUMNS},  # one or several
    "steps": {"0": 0},  # `python -m pipedream` trains
}
MAY_BE_0 = ("weight_gradient", "communication")


def read_value(key: str, text: str) -> Any:
    """Return the value of a key. Raises ValueError if the key does not accept the text."""
    if key == "columns":
        names = re.findall(r"[\w.-]+", text)  # with or without brackets, quotes and spaces
        if set(names) <= {"None"}:
            return None
        if set(names) <= COLUMNS.keys():
            return names
    elif key in CHOICES:
        if text in CHOICES[key]:
            return CHOICES[key][text]
    else:
        value = Fraction(text) if key in DURATIONS else int(text)
        if value > 0 or (value == 0 and key in MAY_BE_0):
            return value
    raise ValueError(text)


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return CONFIG, with defaults for missing keys, after applying each `--set key=value`. If a
    key or value is not accepted, print one line and exit."""
    if "--help" in arguments:
        print(__doc__)
        sys.exit()
    config = dict(DEFAULTS)
    for change in [*map("{0[0]}={0[1]}".format, CONFIG.items()), *arguments]:
        key, _, text = change.partition("=")
        if change == "--set":
            continue
        if key not in DEFAULTS:
            names = ", ".join(DEFAULTS)
            sys.exit(f"error: CONFIG has no key {key}; write --set KEY=VALUE with one of {names}")
        try:
            config[key] = read_value(key, text)
        except (ValueError, ZeroDivisionError):
            numbers = "a number" if key in DURATIONS else "a whole number"
            numbers += " of at least 0" if key in MAY_BE_0 else " above 0"
            accepted = ", ".join(CHOICES.get(key, [numbers]))
            sys.exit(f"error: {change} is not accepted; use {accepted}")
    return config


if __name__ == "__main__":
    if Path(__file__).with_name("pipedream").is_dir():
        from pipedream.__main__ import run_script

        # Read the options, and call `main` if this file supports them. Otherwise, run
        # `python -m pipedream`.
        run_script(main, CONFIG)
    main(read_arguments(sys.argv[1:]))
