"""Arithmetic of sets of times: sorted, disjoint (begin, end). No torch import."""

from __future__ import annotations

from collections.abc import Iterable

Spans = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]], apart: float = 0.0) -> Spans:
    """The times in any of `spans`, which may overlap; gaps of `apart` and less are filled."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + apart:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def minus(spans: Spans, others: Spans) -> Spans:
    """The times in `spans` but not in `others`."""
    found: Spans = []
    place = 0
    for begin, end in spans:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        following = place
        while following < len(others) and others[following][0] < end:
            if others[following][0] > begin:
                found.append((begin, others[following][0]))
            begin = max(begin, others[following][1])
            following += 1
        if begin < end:
            found.append((begin, end))
    return found


def clip(spans: Spans, window: tuple[float, float]) -> Spans:
    """The times in `spans` within a window."""
    first, last = window
    cut = ((max(begin, first), min(end, last)) for begin, end in spans)
    return [(begin, end) for begin, end in cut if begin < end]


def length(spans: Spans) -> float:
    """How long they are together."""
    return sum(end - begin for begin, end in spans)
