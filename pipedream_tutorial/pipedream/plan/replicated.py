"""1F1B with replicated stages (PipeDream's 1F1B-RR): a plan as orders that the simulator runs.

Replica r of a stage with R replicas takes the microbatches i with i mod R == r. Each rank first
runs n forwards, then a backward for each forward, so it has at most n microbatches in flight.

How large n has to be. PipeDream gives the input stage NOAM = ceil(workers / input replicas). Where
replicas do not divide each other that can be too small: 3-2-1 workers with equal work a worker run
at 5/4 of the predicted period. Enough for every duration is, from the last stage backwards,

    n_last = 1,    n_k = 1 + ceil(n_next R_next / R_k)

Proof: let the period be P >= T_k / R_k for all k, T_k = F_k + B_k, and start the forward of
microbatch i on stage k at f_k + i P, its backward at x_k later, x_k = F_k + (n_k - 1) R_k P. The
rank's order then holds, because its next forward comes n_k R_k P - x_k >= B_k after that backward
starts. The data is there in time if f_k and x_k leave room for both ways between neighbours,
x_k - x_next >= F_k + B_next, that is (n_k - 1) R_k P >= (n_next - 1) R_next P + T_next, which
n_next R_next <= (n_k - 1) R_k gives. Starting earlier never hurts an order, so the period is
max T_k / R_k. With equal work on every worker no smaller numbers do. Without replication both
rules give n_k = p - k.
"""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from operator import mul
from typing import NamedTuple

from pipedream_simple import in_turn

from pipedream.plan.planner import Plan
from pipedream.schedules.ops import Op, Schedule, straight
from pipedream.simulate.measures import times_of
from pipedream.simulate.simulator import Costs, Timeline, simulate


def full_speed_in_flight(replicas: Sequence[int]) -> tuple[int, ...]:
    """Microbatches in flight on each worker of a stage that never slow the pipeline down."""
    found: list[int] = []
    following = 0
    for own in reversed(replicas):
        found.append(1 - -following // own)
        following = found[-1] * own
    return tuple(reversed(found))


def replicated_1f1b(replicas: Sequence[int], m: int, in_flight: Sequence[int]) -> Schedule:
    """1F1B of m microbatches, `in_flight` of them at most on each worker of a stage.

    Ranks are numbered stage by stage.
    """
    lines = []
    for stage, (count, ahead) in enumerate(zip(replicas, in_flight, strict=True)):
        for replica in range(count):
            mine = range(replica, m, count)
            forwards = [Op("F", stage, i) for i in mine]
            backwards = [Op("B", stage, i) for i in mine]
            lines.append(in_turn(forwards, backwards, ahead - 1))
    return straight("1f1b-rr", lines)


class PlanRun(NamedTuple):
    """A plan's simulation."""

    timeline: Timeline
    in_flight: tuple[int, ...]  # by stage of the plan: microbatches on each of its workers at most
    period_s: Fraction | None  # between microbatches, once they repeat; None: too short a run
    utilisation: Fraction  # share of all workers' time that is compute, fill and drain included


def simulate_plan(plan: Plan, num_microbatches: int, *, busy_links: bool) -> PlanRun:
    """Run a plan's stages, with one of two pictures of a link.

    `busy_links=True`, the planner's: one message at a time, link_s / 2 for each way. The link is
    simulated as a stage of its own between its neighbours, and more microbatches are in flight to
    hide it. The period is the planner's, exactly.
    `busy_links=False`, the simulator's: a message arrives link_s / 2 after it is sent (on every
    link, that of the slowest), however many are under way. Nothing more is in flight for it, so
    workers wait for messages that the planner takes to be hidden.
    The simulator knows no weight synchronisation: where the planner says that it takes longer than
    the compute, the stage's passes are stretched to it.
    """
    counts: list[int] = []
    times: list[tuple[Fraction, Fraction]] = []
    own: list[int] = []
    for stage in plan.stages:
        own.append(len(counts))
        counts.append(stage.replicas)
        both_s = stage.replicas * stage.period_s
        forward_s = stage.forward_s / stage.compute_s * both_s if stage.compute_s else Fraction(0)
        times.append((forward_s, both_s - forward_s))
        if busy_links and stage.link_s:
            counts.append(1)
            times.append((stage.link_s / 2, stage.link_s / 2))
    in_flight = full_speed_in_flight(counts)
    costs = Costs(
        forward=tuple(forward_s for forward_s, _ in times),
        input_gradient=tuple(backward_s for _, backward_s in times),
        weight_gradient=(Fraction(0),) * len(times),
        communication=Fraction(0) if busy_links else max(s.link_s for s in plan.stages) / 2,
    )
    timeline = simulate(replicated_1f1b(counts, num_microbatches, in_flight), costs)
    work = sum(stage.compute_s for stage in plan.stages) * num_microbatches
    return PlanRun(
        timeline=timeline,
        in_flight=tuple(in_flight[place] for place in own),
        period_s=steady_period(timeline, max(map(mul, counts, in_flight))),
        utilisation=work / (timeline.makespan * plan.num_workers),
    )


def steady_period(timeline: Timeline, reach: int) -> Fraction | None:
    """Seconds a microbatch once the run repeats; None if it is too short to be sure that it does.

    `reach` is the largest replicas * in_flight of a stage: an operation waits for none whose
    microbatch is `reach` or more away. So if all operations of `reach` microbatches in a row start
    the same time after those c microbatches earlier, all later ones do, and the period is that
    time / c. The last `reach` microbatches do not count, for the end of the run shows in them.
    """
    starts: dict[int, list[Fraction]] = defaultdict(list)  # by microbatch, and kind and stage
    for op, (start, _) in sorted(times_of(timeline).items()):
        starts[op.microbatch].append(start)
    rows = [starts[i] for i in range(len(starts) - reach)]
    for apart in range(1, len(rows) - reach + 1):
        later = rows[-reach:]
        earlier = rows[-reach - apart : -apart]
        shift = later[0][0] - earlier[0][0]
        pairs = zip(chain(*later), chain(*earlier), strict=True)
        if all(after - before == shift for after, before in pairs):
            return shift / apart
    return None
