"""Measure the communication in a run's traced steps, and how much of it is exposed.

    python results/lab/overlap.py runs/latest      # a run with --profile STEPS

On a GPU, a rank communicates while an NCCL kernel runs, and computes while any other kernel or copy
runs. On a CPU, a rank communicates during gloo operations, and computes during operators and
compiled code. Communication includes waiting for other ranks. Communication is exposed while the
same rank computes nothing."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import checkout
from matplotlib.figure import Figure
from tabulate import tabulate

from distributed_training.records.display import short_path
from distributed_training.records.record import TRACE_FILE
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import plural, resolve_user_path
from distributed_training.settings.keys import Parser

Spans = list[tuple[float, float]]  # sorted, disjoint (begin, end)
STEP = "ProfilerStep#"
TRACES = TRACE_FILE.format("*")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# Name prefixes of events that compute on a CPU
COMPUTE_PREFIXES = ("aten::", "mkldnn::", "## Call CompiledFxGraph", "torch::distributed::reducer")
KINDS = {  # Patterns for the names of NCCL kernels and gloo operations, in lower case without _
    "all-reduce": "allreduce", "all-gather": "allgather", "reduce-scatter": "reducescatter",
    "all-to-all": "alltoall", "broadcast": "broadcast", "send/receive": "send|recv", "other": "",
}  # fmt: skip


def spans_where(inside: Callable[..., bool], *groups: Iterable[tuple[float, float]]) -> Spans:
    """Return the time spans for which `inside` returns True. The arguments of `inside` are the
    numbers of open spans in each group."""
    edges = [
        (time, group, step)
        for group, spans in enumerate(groups)
        for begin, end in spans
        for time, step in ((begin, 1), (end, -1))
    ]
    counts = [0] * len(groups)
    changes = []
    for time, simultaneous in groupby(sorted(edges), key=itemgetter(0)):
        was_inside = inside(*counts)
        for _, group, step in simultaneous:
            counts[group] += step
        if inside(*counts) != was_inside:
            changes.append(time)
    return list(zip(changes[::2], changes[1::2], strict=True))


def union(spans: Iterable[tuple[float, float]], max_gap: float = 0) -> Spans:
    """Merge `spans`, which may overlap, into disjoint spans. Fill gaps of at most `max_gap`."""
    longer = ((begin, end + max_gap) for begin, end in spans)
    return [(begin, end - max_gap) for begin, end in spans_where(bool, longer)]


def subtract(spans: Spans, others: Spans) -> Spans:
    """Return the parts of `spans` that `others` do not cover."""
    return spans_where(lambda first, second: first > 0 and not second, spans, others)


def clip(spans: Iterable[tuple[float, float]], window: tuple[float, float]) -> Spans:
    """Merge `spans`, which may overlap, and return the parts inside a window."""
    return spans_where(lambda first, within: first > 0 and within > 0, spans, [window])


def length(spans: Spans) -> float:
    """Return the total length of all spans."""
    return sum(end - begin for begin, end in spans)


@dataclass(kw_only=True, slots=True)
class RankTrace:
    """Trace of one rank. Times are in microseconds, counted from 1970 if the trace has a base time,
    and otherwise from the trace's own zero point."""

    rank: int
    steps: int
    window: tuple[float, float]
    computing: Spans
    by_kind: dict[str, Spans]
    counts: dict[str, int]  # kernels or operations of each kind

    @property
    def communicating(self) -> Spans:
        return union(span for spans in self.by_kind.values() for span in spans)

    @property
    def exposed(self) -> Spans:
        return subtract(self.communicating, self.computing)

    def seconds(self) -> dict[str, float]:
        """Return the seconds per step: in total, in each activity, and without any activity."""
        durations_us = {
            "step": length([self.window]),
            "computing": length(self.computing),
            "communicating": length(self.communicating),
            "exposed": length(self.exposed),
        }
        durations_us["neither"] = (
            durations_us["step"] - durations_us["computing"] - durations_us["exposed"]
        )
        return {
            name: microseconds / 1e6 / self.steps for name, microseconds in durations_us.items()
        }


def read_trace(trace: Mapping[str, Any], rank: int) -> RankTrace:
    """Read a rank's activity during its traced steps. A GPU runs operations later than its process
    launches them, so a GPU's window lasts from its first operation to its last. Raises UserError
    for a trace without steps."""
    shift = trace.get("baseTimeNanoseconds", 0) / 1000
    events = [
        {**event, "span": (event["ts"] + shift, event["ts"] + event["dur"] + shift)}
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
    ]
    steps = {e["name"]: e["span"] for e in events if e["name"].startswith(STEP)}
    if not steps:
        raise UserError(f"the trace of rank {rank} has no steps", fix="train with --profile 3")
    on_gpu = [event for event in events if event.get("cat") in GPU_CATEGORIES]
    spans_in_window = [event["span"] for event in on_gpu] or list(steps.values())
    window = (min(begin for begin, _ in spans_in_window), max(end for _, end in spans_in_window))
    communication = "nccl" if on_gpu else "gloo:"
    compute_prefixes = "" if on_gpu else COMPUTE_PREFIXES  # On a GPU, every other kernel computes.
    by_kind = defaultdict[str, Spans](list)
    threads = defaultdict[Any, tuple[Spans, Spans]](lambda: ([], []))  # computing, waiting
    for event in on_gpu or events:
        if communication in event["name"].lower():
            by_kind[kind_of(event["name"])].append(event["span"])
        elif event["name"].startswith(compute_prefixes):
            threads[event["tid"]][0].append(event["span"])
        elif event["name"].startswith("_c10d_functional::wait_tensor"):
            threads[event["tid"]][1].append(event["span"])
    computing = (
        span
        for computing_spans, waiting_spans in threads.values()
        for span in subtract(computing_spans, waiting_spans)
    )
    return RankTrace(
        rank=rank,
        steps=len(steps),
        window=window,
        computing=clip(computing, window),
        by_kind={kind: clip(spans, window) for kind, spans in sorted(by_kind.items())},
        counts={kind: len(spans) for kind, spans in sorted(by_kind.items())},
    )


def kind_of(name: str) -> str:
    """Return the key of KINDS that matches the name of an NCCL kernel or gloo event."""
    plain = name.lower().replace("_", "").replace("coalesced", "")
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, plain))


def read_run(folder: Path) -> list[RankTrace]:
    """Read the traces of a run, sorted by rank. Raises UserError if the run has no traces or if a
    trace cannot be read."""
    files = {int(re.findall(r"\d+", path.name)[0]): path for path in folder.glob(TRACES)}
    if not files:
        raise UserError(f"{short_path(folder)} has no {TRACES}", fix="train with --profile 3")
    ranks = []
    for rank, file in sorted(files.items()):
        try:
            with gzip.open(file, "rt", encoding="utf-8") as text:
                ranks.append(read_trace(json.load(text), rank))
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise UserError(f"{short_path(file)} is not a trace", str(error)) from None
    return ranks


def describe(ranks: Sequence[RankTrace]) -> str:
    """Return two tables. The first shows the milliseconds per step and the shares of the step for
    each rank, and the second shows the milliseconds per step for each operation."""
    rows = []
    for rank in ranks:
        step, *parts = rank.seconds().values()
        shares = [f"{1000 * part:.1f}  {100 * part / step:3.0f}%" for part in parts]
        rows.append([str(rank.rank), f"{1000 * step:.1f}", *shares])
    headers = ["rank", "ms per step", "computes", "communicates", "exposed", "neither"]
    by_rank = tabulate(rows, headers, disable_numparse=True, stralign="right")
    kinds = []
    for kind in sorted({kind for rank in ranks for kind in rank.by_kind}):
        spans = [(rank, rank.by_kind.get(kind, [])) for rank in ranks]
        total = max(length(busy) / rank.steps for rank, busy in spans)
        exposed = max(length(subtract(busy, rank.computing)) / rank.steps for rank, busy in spans)
        kinds.append([kind, total / 1000, exposed / 1000])
    if not kinds:
        return f"{by_rank}\n\nThe traces have no communication."
    by_kind = tabulate(kinds, ["operation", "ms per step", "exposed"], floatfmt=".1f")
    return f"{by_rank}\n\n{by_kind}"


def draw(ranks: Sequence[RankTrace], path: Path) -> None:
    """Draw the computation and communication of all ranks on one time axis, in a figure that is 900
    pixels wide."""
    figure = Figure(figsize=(9, 1.6 + 0.75 * len(ranks)), layout="constrained", dpi=100)
    axes = figure.subplots()
    start = min(rank.window[0] for rank in ranks)
    end = max(rank.window[1] for rank in ranks)
    max_gap = (end - start) / 3000  # Spans closer than a third of a pixel are drawn as one.
    colors = {name: f"C{index}" for index, name in enumerate(("computes", *KINDS))}
    colors["exposed"] = "black"
    drawn_bars = {}
    for row, rank in enumerate(ranks):
        lanes = [("computes", 0.52, 0.32, rank.computing)]
        lanes += [(kind, 0.18, 0.32, spans) for kind, spans in rank.by_kind.items()]
        lanes += [("exposed", 0.08, 0.08, rank.exposed)]
        for name, low, height, spans in lanes:
            bars = [((b - start) / 1000, (e - b) / 1000) for b, e in union(spans, max_gap)]
            vertical = (row + low, height)
            drawn_bars[name] = axes.broken_barh(bars, vertical, color=colors[name], linewidth=0)
    centers = [row + 0.5 for row in range(len(ranks))]
    axes.set_yticks(centers, labels=[f"rank {r.rank}" for r in ranks])
    axes.set_ylim(len(ranks), 0)
    axes.set_xlim(0, (end - start) / 1000)
    axes.set_xlabel(f"milliseconds; {plural(ranks[0].steps, 'step')}")
    legend_names = [name for name in colors if name in drawn_bars]
    handles = [drawn_bars[name] for name in legend_names]
    figure.legend(
        handles, legend_names, loc="outside upper center", ncols=len(legend_names), fontsize=9
    )
    figure.savefig(path, metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Describe and draw a run. Return the exit code."""
    parser = Parser(prog="python results/lab/overlap.py", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder of a run with --profile STEPS")
    folder = resolve_user_path(parser.parse_args(argv).run)
    ranks = read_run(folder)
    print(describe(ranks))
    draw(ranks, folder / "overlap.png")
    print("\nTo view the traces, open them in ui.perfetto.dev.")
    print(f"Wrote {short_path(folder / 'overlap.png')}.")
    return 0


if __name__ == "__main__":
    checkout.run(main)
