"""PipeDream's partitioner: from a profile to stages, replicas and the period of the pipeline.

Source: Harlap et al., arXiv 1806.03377; Narayanan et al., SOSP 2019. With m workers on a stage

    T(i..j, m) = max(sum of T_l, sum of W_l) / m        T_l forward + backward seconds of layer l
    W_l        = sync_factor * (m - 1) / m * w_l / bandwidth           w_l weight bytes of layer l
    A(j, m)    = the smaller of T(0..j, m) and, over i < j and m' < m,
                 max(A(i, m - m'), 2 a_i / bandwidth, T(i+1..j, m'))   a_i bytes layer i puts out

A(j, m) is the seconds a microbatch of the best pipeline of layers 0..j on m workers. All sums are
exact fractions. Compute, weight synchronisation and sending are taken to overlap fully: the
slowest alone fixes the period. PipeDream's published optimizer adds W to T instead (msr-fiddle,
optimizer_graph_hierarchical.py); the papers and this module take the larger.

sync_factor is 2 by default: a ring all-reduce sends 2 (m - 1) / m of the weights' bytes from each
worker and receives as many at the same time. PipeDream's constant is 4, which counts what a worker
of a sharded parameter server sends and what it receives, one after the other; it is right for a
link that carries one direction at a time. The 2 a_i (activation there, gradient back) is
PipeDream's and counts both directions one after the other as well, so with full-duplex links it is
up to twice too long.

Not here: a limit on memory. A profile has the output of a layer, but a worker keeps everything the
backward pass of a layer needs, many times that; a limit would pass plans that do not fit.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from operator import itemgetter
from typing import NamedTuple

from pipedream.errors import UserError
from pipedream.plan.profile import Layer, Number

SYNC_FACTOR = 2


class Stage(NamedTuple):
    """Neighbouring layers, and the workers that each run all of them."""

    first: int
    last: int  # the last layer, inclusive
    replicas: int  # workers; each takes every replicas-th microbatch
    forward_s: Fraction  # of one microbatch on one worker
    backward_s: Fraction  # likewise
    weight_bytes: Fraction  # of one copy of the weights
    sent_bytes: Fraction  # to the next stage for a microbatch, and as many back; 0 after the last
    sync_s: Fraction  # in which the replicas synchronise once: after each has done a microbatch
    link_s: Fraction  # a microbatch that the link to the next stage is busy, both ways together

    @property
    def compute_s(self) -> Fraction:
        return self.forward_s + self.backward_s

    @property
    def period_s(self) -> Fraction:
        """Seconds a microbatch that this stage alone allows, all replicas together."""
        return max(self.compute_s, self.sync_s) / self.replicas


class Plan(NamedTuple):
    """How layers and workers are cut up, and what that is predicted to give."""

    stages: tuple[Stage, ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    @property
    def num_workers(self) -> int:
        return sum(self.replicas)

    @property
    def terms(self) -> dict[str, Fraction]:
        """Seconds a microbatch of all that may set the pace."""
        found = {}
        for place, stage in enumerate(self.stages):
            found[f"compute of stage {place}"] = stage.compute_s / stage.replicas
            found[f"weight sync of stage {place}"] = stage.sync_s / stage.replicas
            found[f"link between stages {place} and {place + 1}"] = stage.link_s
        return found

    @property
    def period_s(self) -> Fraction:
        """Seconds from one finished microbatch to the next, once the pipeline is full."""
        return max(self.terms.values())

    @property
    def bottleneck(self) -> str:
        """The first term that is as long as the period."""
        return max(self.terms, key=self.terms.__getitem__)

    @property
    def throughput(self) -> Fraction:
        """Microbatches a second."""
        return 1 / self.period_s

    @property
    def noam(self) -> int:
        """PipeDream's number of microbatches that an input worker has in flight."""
        return math.ceil(Fraction(self.num_workers, self.replicas[0]))


Cuts = tuple[tuple[int, int], ...]  # (last layer, replicas) of each stage, first stage first


def plan_pipeline(
    layers: Sequence[Layer],
    *,
    num_workers: int,
    bandwidth: Number,
    replication: bool = True,
    use_all_workers: bool = False,
    sync_factor: Number = SYNC_FACTOR,
) -> Plan:
    """The plan with the shortest period; of equally fast ones the one with the fewest workers.

    `bandwidth` is in bytes a second, math.inf if sending takes no time. `replication=False` puts
    one worker on each stage. PipeDream's formula has every worker take part, even where fewer are
    faster (synchronising two can take longer than one computes): `use_all_workers=True`. Takes
    O(layers^2 workers^2) steps. Raises UserError where no plan exists.
    """
    if not any(Fraction(layer.forward_s) + Fraction(layer.backward_s) for layer in layers):
        raise UserError("no layer takes any time", "give a profile with seconds above 0")
    if not replication and use_all_workers and num_workers > len(layers):
        raise UserError(
            f"{num_workers} workers cannot each have a stage of {len(layers)} layers",
            f"give at most {len(layers)} workers, or allow replication or idle workers",
        )
    most = num_workers if replication else 1
    stage = _stages(layers, bandwidth, sync_factor)
    best: dict[tuple[int, int], tuple[Fraction, Cuts]] = {}  # (j, m) -> A(j, m) and its stages
    links: list[Fraction] = []
    for j in range(len(layers)):
        links.append(stage(j, j, 1).link_s)
        period = {(i, r): stage(i, j, r).period_s for i in range(j + 1) for r in range(1, most + 1)}
        for m in range(1, num_workers + 1):
            found: list[tuple[Fraction, Cuts]] = [(period[0, m], ((j, m),))] if m <= most else []
            found += [
                (max(best[i, m - r][0], links[i], period[i + 1, r]), (*best[i, m - r][1], (j, r)))
                for i in range(j)
                for r in range(1, min(m - 1, most) + 1)
                if (i, m - r) in best
            ]
            if found:
                best[j, m] = min(found, key=itemgetter(0))  # of equal ones the first
    final = len(layers) - 1
    counts = [num_workers] if use_all_workers else range(1, num_workers + 1)
    _, cuts = min((best[final, m] for m in counts if (final, m) in best), key=itemgetter(0))
    return make_plan(layers, cuts, bandwidth=bandwidth, sync_factor=sync_factor)


def make_plan(
    layers: Sequence[Layer],
    cuts: Sequence[tuple[int, int]],
    *,
    bandwidth: Number,
    sync_factor: Number = SYNC_FACTOR,
) -> Plan:
    """The plan with the given stages: (last layer, replicas) of each, first stage first."""
    stage = _stages(layers, bandwidth, sync_factor)
    firsts = [0, *(last + 1 for last, _ in cuts)]
    return Plan(stages=tuple(stage(first, *cut) for first, cut in zip(firsts, cuts, strict=False)))


def _stages(
    layers: Sequence[Layer], bandwidth: Number, sync_factor: Number
) -> Callable[[int, int, int], Stage]:
    """What makes a stage of (first layer, last layer, replicas)."""
    s_per_byte = 0 if bandwidth == math.inf else 1 / Fraction(bandwidth)

    def stage(first: int, last: int, replicas: int) -> Stage:
        def total(field: str) -> Fraction:
            own = (Fraction(getattr(layer, field)) for layer in layers[first : last + 1])
            return sum(own, Fraction(0))

        weight_bytes = total("weight_bytes")
        sent_bytes = Fraction(layers[last].activation_bytes if last < len(layers) - 1 else 0)
        synced = Fraction(sync_factor) * Fraction(replicas - 1, replicas) * weight_bytes
        return Stage(
            first=first,
            last=last,
            replicas=replicas,
            forward_s=total("forward_s"),
            backward_s=total("backward_s"),
            weight_bytes=weight_bytes,
            sent_bytes=sent_bytes,
            sync_s=synced * s_per_byte,
            link_s=2 * sent_bytes * s_per_byte,
        )

    return stage
