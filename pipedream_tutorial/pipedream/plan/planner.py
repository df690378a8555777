"""Partition the layers of a profile into replicated stages with PipeDream's algorithm, predict the
pipeline's period, and build orders for the simulator.

Source: Harlap et al., arXiv 1806.03377; Narayanan et al., SOSP 2019. For m workers on a stage:

    T(i..j, m) = max(sum of T_l, sum of W_l) / m        T_l forward + backward seconds of layer l
    W_l        = sync_factor * (m - 1) / m * w_l / bandwidth           w_l weight bytes of layer l
    A(j, m)    = the smaller of T(0..j, m) and, over i < j and m' < m,
                 max(A(i, m - m'), 2 a_i / bandwidth, T(i+1..j, m'))   a_i output bytes of layer i

A(j, m) is the time in seconds per microbatch of the best pipeline of layers 0..j on m workers. All
sums are exact fractions. Compute, weight synchronization and sending are assumed to overlap fully,
so the slowest of them determines the period. PipeDream's published optimizer adds W to T instead
(msr-fiddle, optimizer_graph_hierarchical.py). The papers and this module use the larger of the two.

sync_factor is 2 by default. In a ring all-reduce, each worker sends 2 (m - 1) / m of the weights'
bytes and receives the same number of bytes at the same time. PipeDream's factor of 4 adds up both
directions of a sharded parameter server. Its term 2 a_i adds the activation in one direction and
the gradient in the other. These factors are right for links that carry one direction at a time. For
full-duplex links, the times are too long by a factor of up to 2.

The planner has no memory limit. A profile contains only the size of a layer's output. A worker
keeps everything that the layer's backward pass needs, which is many times larger. A limit based on
the profile would accept plans that do not fit.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import chain, product
from operator import itemgetter, mul
from typing import NamedTuple

from pipedream_simple import in_turn

from pipedream.errors import UserError
from pipedream.plan.profile import Layer, Number
from pipedream.schedules.ops import Op, Schedule, build_from_orders
from pipedream.simulate.simulator import Costs, Timeline, simulate


class Stage(NamedTuple):
    """Stage of consecutive layers that runs on one or more workers, with its costs."""

    first: int
    last: int  # the last layer, inclusive
    replicas: int  # workers; each takes every replicas-th microbatch
    forward_s: Fraction  # for one microbatch on one worker
    backward_s: Fraction  # for one microbatch on one worker
    weight_bytes: Fraction  # for one copy of the weights
    # Per microbatch and direction, between this stage and the next; 0 for the last stage
    sent_bytes: Fraction
    sync_s: Fraction  # per synchronization, after each replica has run a microbatch
    link_s: Fraction  # per microbatch on the link to the next stage, in both directions

    @property
    def compute_s(self) -> Fraction:
        return self.forward_s + self.backward_s

    @property
    def period_s(self) -> Fraction:
        """Seconds per microbatch for this stage alone, with all its replicas."""
        return max(self.compute_s, self.sync_s) / self.replicas


class Plan(NamedTuple):
    """Partition of the layers among workers, with its predicted speed."""

    stages: tuple[Stage, ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    @property
    def num_workers(self) -> int:
        return sum(self.replicas)

    @property
    def terms(self) -> dict[str, Fraction]:
        """Seconds per microbatch for each stage and link. The largest value is the pipeline's
        period."""
        seconds = {}
        for index, stage in enumerate(self.stages):
            seconds[f"compute of stage {index}"] = stage.compute_s / stage.replicas
            seconds[f"weight sync of stage {index}"] = stage.sync_s / stage.replicas
            seconds[f"link between stages {index} and {index + 1}"] = stage.link_s
        return seconds

    @property
    def period_s(self) -> Fraction:
        """Seconds from one finished microbatch to the next, once the pipeline is full."""
        return max(self.terms.values())

    @property
    def bottleneck(self) -> str:
        """Name of the first term that equals the period."""
        return max(self.terms, key=self.terms.__getitem__)

    @property
    def noam(self) -> int:
        """Number of microbatches that PipeDream keeps in flight on each worker of the input
        stage."""
        return math.ceil(Fraction(self.num_workers, self.replicas[0]))


def plan_pipeline(
    layers: Sequence[Layer],
    *,
    num_workers: int,
    bandwidth: Number,
    replication: bool = True,
    use_all_workers: bool = False,
    sync_factor: Number = 2,
) -> Plan:
    """Return the plan with the shortest period and, among such plans, with the fewest workers.

    `bandwidth` is in bytes per second, or math.inf if sending takes no time. `replication=False`
    gives each stage one worker. With `use_all_workers=True`, every worker is used, as in
    PipeDream's formula, even if fewer workers would be faster. Fewer workers are faster if
    synchronization takes longer than the computation that they save. The search takes
    `O(layers^2 workers^2)` steps. Raises UserError if no plan exists.
    """
    if not any(Fraction(layer.forward_s) + Fraction(layer.backward_s) for layer in layers):
        raise UserError("no layer takes any time", "use a profile with times above 0 s")
    if not replication and use_all_workers and num_workers > len(layers):
        raise UserError(
            f"{len(layers)} layers are too few to give each of {num_workers} workers a stage",
            f"use at most {len(layers)} workers, or allow replication or idle workers",
        )
    max_replicas = num_workers if replication else 1
    stage = partial(_stage, layers, bandwidth, sync_factor)
    # (j, m) -> A(j, m) and its stages. No stages precede the first layer.
    best: dict[tuple[int, int], tuple[Fraction, tuple[Stage, ...]]] = {(-1, 0): (Fraction(0), ())}
    for j in range(len(layers)):
        last_stages = {
            (i, r): stage(i, j, r) for i in range(j + 1) for r in range(1, max_replicas + 1)
        }
        period = {key: last.period_s for key, last in last_stages.items()}
        for m in range(1, num_workers + 1):
            candidates: list[tuple[Fraction, tuple[Stage, ...]]] = []
            for i, r in product(range(-1, j), range(1, min(m, max_replicas) + 1)):
                if (i, m - r) in best:
                    previous_period, stages = best[i, m - r]
                    link_s = stages[-1].link_s if stages else Fraction(0)
                    longest = max(previous_period, link_s, period[i + 1, r])
                    candidates.append((longest, (*stages, last_stages[i + 1, r])))
            if candidates:
                best[j, m] = min(candidates, key=itemgetter(0))  # the first of equal candidates
    last_layer = len(layers) - 1
    worker_counts = [num_workers] if use_all_workers else range(1, num_workers + 1)
    return Plan(
        min(
            (best[last_layer, m] for m in worker_counts if (last_layer, m) in best),
            key=itemgetter(0),
        )[1]
    )


def make_plan(
    layers: Sequence[Layer],
    cuts: Sequence[tuple[int, int]],
    *,
    bandwidth: Number,
    sync_factor: Number,
) -> Plan:
    """Return the plan with the given stages. For each stage, in order, `cuts` contains the last
    layer and the number of replicas."""
    stage = partial(_stage, layers, bandwidth, sync_factor)
    firsts = [0, *(last + 1 for last, _ in cuts)]
    return Plan(tuple(stage(first, *cut) for first, cut in zip(firsts, cuts, strict=False)))


def _stage(
    layers: Sequence[Layer], bandwidth: Number, sync_factor: Number,
    first: int, last: int, replicas: int,
) -> Stage:  # fmt: skip
    def total(field: str) -> Fraction:
        values = (Fraction(getattr(layer, field)) for layer in layers[first : last + 1])
        return sum(values, Fraction(0))

    s_per_byte = 0 if bandwidth == math.inf else 1 / Fraction(bandwidth)
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


def full_speed_in_flight(replicas: Sequence[int]) -> tuple[int, ...]:
    """Return, for each stage, a number n of microbatches in flight per worker that always lets the
    pipeline run at full speed.

    PipeDream gives the input stage NOAM = ceil(workers / input replicas). If the replica counts do
    not divide each other, NOAM can be too small. For example, with 3, 2 and 1 workers on three
    stages and equal work per worker, the period is 5/4 of the predicted period. The following
    numbers, computed from the last stage backward, suffice for all durations:

        n_last = 1,    n_k = 1 + ceil(n_next R_next / R_k)

    Proof: let T_k = F_k + B_k, and let the period be P >= T_k / R_k for all k. Start the forward of
    microbatch i on stage k at f_k + i P, and its backward x_k later, with x_k = F_k + (n_k - 1) R_k
    P. The rank's order is then possible, because its next forward starts n_k R_k P - x_k >= B_k
    after that backward. The data arrives in time if f_k and x_k leave time for both directions
    between neighbors: x_k - x_next >= F_k + B_next. This condition is (n_k - 1) R_k P >=
    (n_next - 1) R_next P + T_next, which follows from n_next R_next <= (n_k - 1) R_k. An earlier
    start never delays an order, so the period is max T_k / R_k. With equal work on every worker, no
    smaller numbers suffice. Without replication, both rules give n_k = p - k.
    """
    in_flight: list[int] = []
    next_in_flight = 0
    for count in reversed(replicas):
        in_flight.append(1 - -next_in_flight // count)
        next_in_flight = in_flight[-1] * count
    return tuple(reversed(in_flight))


def replicated_1f1b(replicas: Sequence[int], m: int, in_flight: Sequence[int]) -> Schedule:
    """Return PipeDream's order, 1F1B-RR. Replica r of a stage with R replicas runs every microbatch
    i for which i mod R == r. Each replica of stage k has at most `in_flight[k]` microbatches in
    flight. Ranks are numbered stage by stage."""
    lines = []
    for stage, (count, ahead) in enumerate(zip(replicas, in_flight, strict=True)):
        for replica in range(count):
            microbatches = range(replica, m, count)
            forwards = [Op("F", stage, i) for i in microbatches]
            backwards = [Op("B", stage, i) for i in microbatches]
            lines.append(in_turn(forwards, backwards, ahead))
    return build_from_orders("1f1b-rr", lines)


class PlanRun(NamedTuple):
    """Result of simulating a plan."""

    timeline: Timeline
    in_flight: tuple[int, ...]  # by stage: maximum number of microbatches in flight per worker
    # Seconds between microbatches in the steady state; None if the run is too short
    period_s: Fraction | None
    utilization: Fraction  # share of all workers' time spent computing, including fill and drain


def simulate_plan(plan: Plan, num_microbatches: int, *, busy_links: bool) -> PlanRun:
    """Simulate a plan's stages with one of two link models.

    `busy_links=True` is the planner's model. A link carries one message at a time and takes link_s
    / 2 in each direction. The link is simulated as a separate stage between its neighbors, and more
    microbatches are in flight to hide the messages. The period equals the planner's period.

    `busy_links=False` is the simulator's model. Every message takes half of the slowest link's
    link_s, regardless of other messages. No additional microbatches are in flight, so workers wait
    for messages that the planner assumes to be hidden.

    The simulator does not model weight synchronization. If the synchronization of a stage takes
    longer than its computation, the stage's passes are lengthened to that time.
    """
    rows: list[tuple[int, Fraction, Fraction]] = []  # workers, forward seconds and backward seconds
    rows_of_stages: list[int] = []
    for stage in plan.stages:
        rows_of_stages.append(len(rows))
        passes_s = stage.replicas * stage.period_s
        forward_s = stage.forward_s / stage.compute_s * passes_s if stage.compute_s else Fraction(0)
        rows.append((stage.replicas, forward_s, passes_s - forward_s))
        if busy_links and stage.link_s:
            rows.append((1, stage.link_s / 2, stage.link_s / 2))
    counts, forwards, backwards = zip(*rows, strict=True)
    in_flight = full_speed_in_flight(counts)
    costs = Costs(
        forward=forwards,
        input_gradient=backwards,
        weight_gradient=(Fraction(0),) * len(rows),
        communication=Fraction(0) if busy_links else max(s.link_s for s in plan.stages) / 2,
    )
    timeline = simulate(replicated_1f1b(counts, num_microbatches, in_flight), costs)
    work = sum(stage.compute_s for stage in plan.stages) * num_microbatches
    return PlanRun(
        timeline=timeline,
        in_flight=tuple(in_flight[row] for row in rows_of_stages),
        period_s=steady_period(timeline, max(map(mul, counts, in_flight))),
        utilization=work / (timeline.makespan * plan.num_workers),
    )


def steady_period(timeline: Timeline, reach: int) -> Fraction | None:
    """Return the number of seconds per microbatch once the run repeats itself, or None if the run
    is too short.

    `reach` is the largest value of replicas * in_flight over all stages. No operation waits for an
    operation whose microbatch is `reach` or more away. Suppose that all operations of `reach`
    consecutive microbatches start a fixed time after the same operations c microbatches earlier.
    Then this holds for all later operations, and the period is that time divided by c. The last
    `reach` microbatches do not count, because the end of the run affects them.
    """
    starts: dict[int, list[Fraction]] = defaultdict(list)  # by microbatch, for each kind and stage
    for op, (start, _) in sorted(timeline.times.items()):
        starts[op.microbatch].append(start)
    rows = [starts[i] for i in range(len(starts) - reach)]
    for distance in range(1, len(rows) - reach + 1):
        later = rows[-reach:]
        earlier = rows[-reach - distance : -distance]
        shift = later[0][0] - earlier[0][0]
        pairs = zip(chain(*later), chain(*earlier), strict=True)
        if all(after - before == shift for after, before in pairs):
            return shift / distance
    return None
