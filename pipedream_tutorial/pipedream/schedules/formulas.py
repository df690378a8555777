"""The arithmetic of the closed forms (closed_forms.py has the table and the sources).

Below them makespans of uneven stages, of a time to send, and what a short run stashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Case(NamedTuple):
    """Sizes and durations; those are of one microbatch on a rank's whole share of the layers."""

    p: int
    m: int
    v: int
    """Stages a rank, in the interleaved schedule; the V schedules have 2, whatever this says."""
    f: Fraction
    """Forward pass."""
    i: Fraction
    """Input gradient. The whole backward pass B is I + W."""
    w: Fraction
    """Weight gradient."""

    @property
    def total(self) -> Fraction:
        """T: the work that one microbatch is for a rank."""
        return self.f + self.i + self.w

    @property
    def backward(self) -> Fraction:
        return self.i + self.w

    @property
    def per_round(self) -> int:
        """Microbatches that go through one stage before an interleaved rank turns to its next."""
        return self.m // max(1, self.m // self.p)


def idle_fraction(idle_time: Fraction, c: Case) -> Fraction:
    """Share of a rank's time, 0 to 1: X / (m T + X)."""
    return idle_time / (c.m * c.total + idle_time)


def even_fill(c: Case) -> Fraction:
    return (c.p - 1) * c.total


def even_fill_span(c: Case, r: int) -> Fraction:
    return (c.p - 1 - r) * c.total


def interleaved_idle(c: Case) -> Fraction:
    """With fewer microbatches than ranks a rank waits for the first one to come round, v times."""
    missing = max(0, c.p - c.m) * c.v + min(c.m, c.p) - 1
    return missing * c.total / c.v


def interleaved_activations(c: Case, r: int) -> Fraction:
    return Fraction(min(c.m * c.v, (c.v - 1) * c.per_round + 2 * (c.p - 1 - r) + 1), c.v)


def zb_h1_idle(c: Case) -> Fraction:
    hidden = (min(c.m, c.p) - 1) * min(c.f, c.i, c.w)
    return (c.p - 1) * (c.f + c.i) - hidden


def zb_h1_span(c: Case, r: int) -> Fraction:
    hidden = max(0, min(c.m, c.p) - 1 - r) * min(c.f, c.w)
    return (c.p - 1 - r) * (c.f + c.i) - hidden


def zb_h2_step(c: Case) -> Fraction:
    """What is left to wait for between two neighbours: nothing while I <= 2 min(F, W) - F."""
    return max(Fraction(0), c.f + c.i - 2 * min(c.f, c.w))


def zb_v_span(c: Case, r: int) -> Fraction:
    return (c.p - 1) * (c.i - c.w) - Fraction(r, 2) * (c.f + c.i - 2 * c.w)


def v_half_idle(c: Case) -> Fraction:
    if c.p <= 2:
        return (c.p - 1) * c.f / 2
    return (3 * ((c.p + 1) // 2) - Fraction(7, 2)) * c.f


def v_half_span(c: Case, r: int) -> Fraction:
    """With p even the last two ranks end an operation later."""
    late = 1 if c.p % 2 == 0 and c.p - 2 <= r and c.p > 2 else 0
    return v_half_idle(c) - (_started(c, r) - late) * c.f


def v_half_activations(c: Case, r: int) -> Fraction:
    return Fraction(min(2 * c.m, c.m + 1 + r, 2 * (c.p // 2 + 1)), 2)


def v_min_idle(c: Case) -> Fraction:
    return max(Fraction(0), (4 * c.p - (5 if c.p % 3 else 7)) * c.f / 2)


def v_min_span(c: Case, r: int) -> Fraction:
    return v_min_idle(c) - _started(c, r) * c.f


def v_min_activations(c: Case, r: int) -> Fraction:
    """(p+4) // 3 where the pipeline is full; on rank 0 one stage's less if p = 2 mod 3."""
    most = 2 * ((c.p + 4) // 3)
    if c.p % 3 == 2 and r == 0:
        most -= 1
    return Fraction(min(2 * c.m, c.m + 1 + r, most), 2)


def _started(c: Case, r: int) -> Fraction:
    """When rank r starts, in F, less what it ends after rank 0: the last rank's two stages are
    neighbours."""
    return r - Fraction(1 if r == c.p - 1 > 0 else 0, 2)


def dualpipe_v_span(c: Case, r: int) -> Fraction:
    exposed = c.i - min(c.i, c.w)
    return ((2 * c.p - 2 - r) * c.f + (c.p - 1 - r) * exposed) / 2


def folded(c: Case) -> Case:
    """DualPipe as a DualPipeV on half the ranks, each with two stages of DualPipe's size."""
    return Case(c.p // 2, c.m // 2, 2, 2 * c.f, 2 * c.i, 2 * c.w)


def chimera_idle(c: Case) -> Fraction:
    """Every unit of p microbatches after the first costs (p-2) |F - B| more."""
    units = c.m // c.p
    longer, apart = max(c.f, c.backward), abs(c.f - c.backward)
    return (c.p - 2) * (longer + (units - 1) * apart)


def from_edge(c: Case, r: int) -> int:
    return min(r, c.p - 1 - r)


def gpipe_makespan(
    forward: Sequence[Fraction], backward: Sequence[Fraction], m: int, communication: Fraction
) -> Fraction:
    """GPipe on uneven stages: each half fills once and then runs at its slowest stage's pace.

    Durations by stage, of whole backward passes; every hop there and back is paid once.
    """
    fill = sum(forward, Fraction(0)) + sum(backward, Fraction(0))
    paced = (m - 1) * (max(forward) + max(backward))
    return fill + paced + 2 * (len(forward) - 1) * communication


def one_f_one_b_makespan(c: Case, communication: Fraction) -> Fraction:
    """1F1B on even stages with a time to send: p microbatches pay for one more round trip.

    Stage 0 has at most p microbatches on the way, so from any m on the next p microbatches cost
    2 (p-1) hops however well sending overlaps computing: 2 c (p-1) / p each.
    """
    hops = 2 * (c.p + c.m - 2 - -(-(c.m - 1) // c.p))
    return (c.m + c.p - 1) * c.total + hops * communication


def one_f_one_b_period(forward: Sequence[Fraction], backward: Sequence[Fraction]) -> Fraction:
    """Time a microbatch once 1F1B runs steadily on uneven stages: the slowest stage's F + B."""
    return max(f + b for f, b in zip(forward, backward, strict=True))


def short_run_versions(c: Case, s: int) -> int:
    """Versions that weight stashing keeps on stage s in a run of m microbatches, however few."""
    ahead = min(c.m, c.p - s)
    return min(ahead, c.m - ahead + 2)


def recomputed_activations(held: Fraction, v: int, kept: Fraction) -> Fraction:
    """What a rank holds with R before each whole B, and `held` without: one stage's all, at its F
    or B, and of the others the share that is kept."""
    return (1 + (held * v - 1) * kept) / v


def zb_recomputed_activations(c: Case, r: int, ahead: int, kept: Fraction) -> Fraction:
    """ZB-H1 (`ahead` 1) and ZB-H2 (2): all of a microbatch is held from R to its late W, so that
    the last rank saves nothing."""
    most = min(c.m, c.p if ahead == 1 else 2 * c.p - 1)
    whole = min(c.m, ahead * r + 1)
    return whole + (most - whole) * kept
