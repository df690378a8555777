"""Define formulas for properties of a schedule: idle time, memory, versions and staleness.

Stages are equal and communication takes no time, unless stated otherwise. Every formula equals the
simulator's exact fraction (tests/test_closed_forms.py), often for a wider range of durations than
its paper states. In a ClosedForm, `idle_holds` returns whether the idle-time formulas are valid,
and `source` is an arXiv number. DualPipe's formulas are also in github.com/deepseek-ai/DualPipe.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple


class ClosedFormInputs(NamedTuple):
    """Arguments of the closed forms: the sizes of a pipeline, and the times that the passes of one
    microbatch take on all layers of a rank."""

    p: int
    m: int
    v: int  # stages per rank of the interleaved schedule; the V schedules always have 2
    f: Fraction  # forward pass
    i: Fraction  # input gradient. The whole backward pass B is I + W.
    w: Fraction  # weight gradient

    @property
    def backward(self) -> Fraction:
        return self.i + self.w

    @property
    def total(self) -> Fraction:
        """Time T that a rank spends on one microbatch."""
        return self.f + self.backward


def idle_fraction(idle_time: Fraction, c: ClosedFormInputs) -> Fraction:
    """Return the idle share of a rank's time, from 0 to 1. The share is `X / (m T + X)`, where X is
    `idle_time` and T is `c.total`."""
    return idle_time / (c.m * c.total + idle_time)


def fill_and_drain_idle(c: ClosedFormInputs) -> Fraction:
    return (c.p - 1) * c.total


def interleaved_activations(c: ClosedFormInputs, r: int) -> Fraction:
    per_round = c.m // max(1, c.m // c.p)  # microbatches before a rank switches stages
    return Fraction(min(c.m * c.v, (c.v - 1) * per_round + 2 * (c.p - 1 - r) + 1), c.v)


def zb_h2_step(c: ClosedFormInputs) -> Fraction:
    """Return how long two neighboring ranks wait for each other under ZB-H2. The time is 0 if
    `I <= 2 min(F, W) - F`."""
    return max(Fraction(0), c.f + c.i - 2 * min(c.f, c.w))


def v_half_span_idle(c: ClosedFormInputs, r: int, x: Fraction) -> Fraction:
    """Return rank r's idle time within its span under V-Half. `x` is the idle time within the
    makespan. For an even p above 2, the last two ranks end one operation later than for an odd
    p."""
    late = 1 if c.p % 2 == 0 and c.p - 2 <= r and c.p > 2 else 0
    return x - (_net_delay(c, r) - late) * c.f


def v_min_activations(c: ClosedFormInputs, r: int) -> Fraction:
    """Return the peak activations of rank r under V-Min. In a full pipeline, the peak is
    `(p + 4) // 3`. On rank 0, the peak is lower by one stage's activations if `p % 3 == 2`."""
    peak = 2 * ((c.p + 4) // 3)
    if c.p % 3 == 2 and r == 0:
        peak -= 1
    return Fraction(min(2 * c.m, c.m + 1 + r, peak), 2)


def _net_delay(c: ClosedFormInputs, r: int) -> Fraction:
    """Return rank r's delay behind rank 0 at the start, minus the same delay at the end, in units
    of F. The result is smaller by 1/2 for the last rank, whose two stages are neighbors."""
    return r - Fraction(1 if r == c.p - 1 > 0 else 0, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedForm:
    """Formulas for one schedule. The defaults describe a pipeline that fills once and then
    flushes."""

    makespan_idle: Callable[[ClosedFormInputs], Fraction] = fill_and_drain_idle
    """X: the time from 0 to the last rank's end, minus a rank's work. X is equal on all ranks."""
    span_idle_formula: Callable[[ClosedFormInputs, int, Fraction], Fraction] = lambda c, r, x: (
        x - r * c.total
    )
    """Idle time of rank r between its first start and its last end, computed from X."""
    idle_holds: Callable[[ClosedFormInputs], bool] = lambda c: True
    """Function that returns whether makespan_idle and span_idle are exact."""
    peak_activations: Callable[[ClosedFormInputs, int], Fraction | int]
    """Peak activations of rank r, in microbatches on all of its layers. The formula is exact for
    all sizes that the schedule allows, with these exceptions: V-Min and schedules without a flush
    need m >= p. Otherwise, the formula is an upper bound."""
    peak_versions: Callable[[ClosedFormInputs, int], int] = lambda c, s: 1
    """Maximum number of weight versions on stage s, in a run of at least 2 p microbatches and 3
    batches."""
    staleness: Callable[[ClosedFormInputs, int, int], int] = lambda c, s, microbatch: 0
    """Number of updates of stage s that the microbatch's gradient does not include. m is the number
    of microbatches per batch."""
    idle_text: str = "(p-1) (F+B)"
    range_text: str = "always"
    published: str = "the same"
    """Formula and range of validity in the source, if they differ from ours."""
    source: str

    def span_idle(self, c: ClosedFormInputs, r: int) -> Fraction:
        return self.span_idle_formula(c, r, self.makespan_idle(c))


PIPEDREAM = ClosedForm(
    peak_activations=lambda c, s: c.p - s,
    peak_versions=lambda c, s: c.p - s,
    staleness=lambda c, s, microbatch: min(microbatch, c.p - 1 - s),
    idle_text="(p-1) (F+B), once per run",
    source="1806.03377",
)
"""1F1B's order without flushes, in a run of p microbatches or more."""

CLOSED_FORMS: dict[str, ClosedForm] = {
    "naive": ClosedForm(
        makespan_idle=lambda c: (c.p - 1) * c.m * c.total,
        peak_activations=lambda c, r: 1,
        idle_text="(p-1) m (F+B)",
        source="1811.06965",
    ),
    "gpipe": ClosedForm(peak_activations=lambda c, r: c.m, source="1811.06965"),
    "1f1b": ClosedForm(peak_activations=lambda c, r: min(c.m, c.p - r), source="2104.04473"),
    "eager-1f1b": ClosedForm(
        peak_activations=lambda c, r: min(c.m, 2 * (c.p - r) - 1), source="2211.05322"
    ),
    "pipedream": PIPEDREAM,
    "pipedream-vertical": replace(
        PIPEDREAM,
        peak_versions=lambda c, s: c.p,
        staleness=lambda c, s, microbatch: min(microbatch, c.p - 1),
    ),
    "pipedream-no-stash": replace(PIPEDREAM, peak_versions=lambda c, s: 1),
    "pipedream-2bw": replace(
        PIPEDREAM,
        peak_versions=lambda c, s: 2,
        staleness=lambda c, s, microbatch: min(microbatch // c.m, 1),
        source="2006.09503",
    ),
    "interleaved": ClosedForm(
        # With fewer microbatches than ranks, a rank waits v times for the first microbatch to
        # return.
        makespan_idle=lambda c: (max(0, c.p - c.m) * c.v + min(c.m, c.p) - 1) * c.total / c.v,
        span_idle_formula=lambda c, r, x: x - r * c.total / c.v,
        peak_activations=interleaved_activations,
        idle_text="(p-1) (F+B) / v if m >= p, otherwise (v (p-m) + m - 1) (F+B) / v",
        published="(p-1) (F+B) / v if p divides m",
        source="2104.04473",
    ),
    "zb-h1": ClosedForm(
        makespan_idle=lambda c: (c.p - 1) * (c.f + c.i) - (min(c.m, c.p) - 1) * min(c.f, c.i, c.w),
        span_idle_formula=lambda c, r, x: (
            (c.p - 1 - r) * (c.f + c.i) - max(0, min(c.m, c.p) - 1 - r) * min(c.f, c.w)
        ),
        peak_activations=lambda c, r: min(c.m, c.p),
        idle_text="(p-1) (F+I) - (min(m,p)-1) min(F,I,W); "
        "for the own span of rank 0, replace min(F,I,W) with min(F,W)",
        published="(p-1) (F+I-W): in the makespan if W <= F, I and m >= p, "
        "in rank 0's own span if W <= F",
        source="2401.10241",
    ),
    "zb-h2": ClosedForm(
        makespan_idle=lambda c: (c.p - 1) * max(c.f, zb_h2_step(c)),
        span_idle_formula=lambda c, r, x: (c.p - 1 - r) * zb_h2_step(c),
        idle_holds=lambda c: c.m >= 2 * c.p - 1,
        peak_activations=lambda c, r: min(c.m, 2 * c.p - 1),
        idle_text="(p-1) max(F, d) with d = max(0, F + I - 2 min(F,W)); "
        "within its own span, rank r idles (p-1-r) d",
        range_text="m >= 2p-1",
        published="(p-1) (F+I-2W) in rank 0's own span if W <= F and F+I >= 2W",
        source="2401.10241",
    ),
    "zb-v": ClosedForm(
        makespan_idle=lambda c: (c.p - 1) * max(c.i - c.w, c.i / 2),
        span_idle_formula=lambda c, r, x: (c.p - 1) * (c.i - c.w) - r * (c.f + c.i - 2 * c.w) / 2,
        idle_holds=lambda c: c.m >= 2 * c.p - 1 and c.i >= c.f and c.i >= c.w,
        peak_activations=lambda c, r: Fraction(min(2 * c.m, 2 * c.p, c.m + 1 + r), 2),
        idle_text="(p-1) max(I-W, I/2); "
        "within its own span, rank r idles (p-1) (I-W) - r (F+I-2W) / 2",
        range_text="I >= F, I >= W, m >= 2p-1",
        published="0 within the own span if F = I = W",
        source="2401.10241",
    ),
    "v-half": ClosedForm(
        makespan_idle=lambda c: (
            (3 * ((c.p + 1) // 2) - Fraction(7, 2)) * c.f if c.p > 2 else (c.p - 1) * c.f / 2
        ),
        span_idle_formula=v_half_span_idle,
        idle_holds=lambda c: c.f == c.i == c.w and c.m >= c.p + 2,
        peak_activations=lambda c, r: Fraction(min(2 * c.m, c.m + 1 + r, 2 * (c.p // 2 + 1)), 2),
        idle_text="(3 ceil(p/2) - 7/2) F",
        range_text="F = I = W, m >= p+2, p >= 3",
        published="about p/2 (F+B) if F = I = W, for the block alone",
        source="2405.15362",
    ),
    "v-min": ClosedForm(
        makespan_idle=lambda c: max(Fraction(0), (4 * c.p - (5 if c.p % 3 else 7)) * c.f / 2),
        span_idle_formula=lambda c, r, x: x - _net_delay(c, r) * c.f,
        idle_holds=lambda c: c.f == c.i == c.w and c.m >= c.p + 1,
        peak_activations=v_min_activations,
        idle_text="(4p-5) F / 2, or (4p-7) F / 2 if 3 divides p",
        range_text="F = I = W, m >= p+1, p >= 2",
        published="about 2p/3 (F+B) if F = I = W",
        source="2405.15362",
    ),
    "dualpipe-v": ClosedForm(
        makespan_idle=lambda c: (c.p - 1) * (2 * c.f + c.i - min(c.i, c.w)) / 2,
        span_idle_formula=lambda c, r, x: x - r * (c.f + c.i - min(c.i, c.w)) / 2,
        idle_holds=lambda c: c.f >= c.i,
        peak_activations=lambda c, r: Fraction(2 * c.p + 1, 2),
        idle_text="(p-1) (2F + I - min(I,W)) / 2 without overlap within pairs",
        range_text="F >= I, m >= 2p",
        published="(p-1) (F&B + B - 3W) / 2 for 2p stages on p ranks: equal if F = I >= W",
        source="2412.19437",
    ),
}
