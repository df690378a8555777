"""Search for the shortest order for given durations and a limit on activations.

Each rank has one stage, and backward passes are split. Microbatches are alike, so a rank runs the
operations of each kind in the order of microbatches 0, 1, 2, ... The order of a rank is a word of m
letters F, m letters I and m letters W. Every prefix of a word contains at least as many F as I, at
least as many I as W, and at most `memory` more F than W.

The search minimizes the makespan of one batch. Among equally short orders, it prefers the order
whose longest span is shorter. The span of a rank is the time from its first start to its last end.
A rank is free again one span after it started the previous batch. Therefore consecutive batches
need not be further apart than the longest span.

First, a rule builds words (`greedy`). Then letters are moved (`improve`). A change is kept if the
makespan does not grow, and sometimes even if it grows (simulated annealing). If the makespan equals
`lower_bound`, no order is shorter.
"""

import math
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import NamedTuple

from pipedream_simple import from_words, zero_bubble

from pipedream.schedules.ops import Schedule, build_from_orders
from pipedream.simulate.simulator import Costs, run_until_stuck

Words = list[str]  # by rank


class Problem(NamedTuple):
    """Sizes of a pipeline, and its durations in ticks."""

    num_microbatches: int
    memory: int  # microbatches, 1 or more, whose activations a rank may hold, from F to W
    durations: tuple[dict[str, int], ...]  # by rank: F, I and W
    communication: int
    tick: Fraction


class SearchResult(NamedTuple):
    """Best order found, and a lower bound on the makespans of all orders."""

    schedule: Schedule
    makespan: Fraction
    lower_bound: Fraction


def build_problem(costs: Costs, num_microbatches: int, memory: int) -> Problem:
    """Convert `costs` to a Problem, whose durations are whole numbers of ticks."""
    times = list(zip(costs.forward, costs.input_gradient, costs.weight_gradient, strict=True))
    scale = math.lcm(costs.communication.denominator, *(t.denominator for t in chain(*times)))
    sending = int(costs.communication * scale)
    ticks = [[int(time * scale) for time in rank_times] for rank_times in times]
    durations = tuple(dict(zip("FIW", rank_times, strict=True)) for rank_times in ticks)
    return Problem(num_microbatches, memory, durations, sending, Fraction(1, scale))


def search(
    costs: Costs, num_microbatches: int, memory: int, *, tries: int | None = None
) -> SearchResult:
    """Return the best order found in `tries` simulations. By default, the simulations take a second
    or two. Equal arguments give equal orders."""
    problem = build_problem(costs, num_microbatches, memory)
    p = len(problem.durations)
    m = num_microbatches
    tries = tries or max(200, min(20_000, 4_000_000 // (3 * p * m)))
    limits = _limits(problem)
    starts = [greedy(problem, limit) for limit in limits]
    for rank_limits in limits:  # words like those of ZB-H1 and ZB-H2, and words between them
        starts.append([zero_bubble(m, ahead, memory - ahead) for ahead in rank_limits])
    for times in (1, 2):  # ZB-H1 and ZB-H2 themselves
        if memory > times * (p - 1):
            starts.append([zero_bubble(m, times * (p - 1 - r) + 1, times * r) for r in range(p)])
    score_of = partial(score, problem)
    starts.sort(key=score_of)
    bound = lower_bound(problem)
    goal = bound, max(m * sum(rank_limits.values()) for rank_limits in problem.durations)
    scores = [
        improve(problem, words, tries // 3, seed=number, goal=goal)
        for number, words in enumerate(starts[:3])
    ]
    best = min(scores, key=score_of)
    schedule = build_from_orders(f"search-p{p}-m{m}-memory{memory}", from_words(best))
    makespan = int(score_of(best)[0])
    return SearchResult(schedule, makespan * problem.tick, bound * problem.tick)


def score(problem: Problem, words: Words) -> tuple[float, float]:
    """Return the makespan and the longest span, in ticks. Both are infinite if the words would
    deadlock."""
    ends: list[dict[str, list[int]]] = [{"F": [], "I": [], "W": []} for _ in words]

    def run(rank: int) -> Iterator[None]:
        """Run one rank's word, and yield whenever the rank must wait."""
        rank_ends = ends[rank]
        durations = problem.durations[rank]
        sources = {}
        if rank > 0:
            sources["F"] = ends[rank - 1]["F"]
        if rank + 1 < len(problem.durations):
            sources["I"] = ends[rank + 1]["I"]
        now = 0
        for kind in words[rank]:
            done = rank_ends[kind]
            if kind in sources:
                source = sources[kind]
                while len(done) == len(source):
                    yield
                now = max(now, source[len(done)] + problem.communication)
            now += durations[kind]
            done.append(now)

    ranks = list(map(run, range(len(words))))
    if run_until_stuck(
        ranks, [line for ends_of_rank in ends for line in ends_of_rank.values()]
    ) < sum(map(len, words)):
        return math.inf, math.inf
    lines = zip(ends, problem.durations, strict=True)
    spans = [
        ends_of_rank["W"][-1] - ends_of_rank["F"][0] + durations["F"]
        for ends_of_rank, durations in lines
    ]
    return max(ends_of_rank["W"][-1] for ends_of_rank in ends), max(spans)


def lower_bound(problem: Problem) -> int:
    """Return a lower bound on the makespans of all orders, in ticks. Rank r cannot start before its
    first microbatch has passed the earlier ranks. Its first gradient arrives a round trip after its
    first forward. Before this gradient, the rank runs at most `min(m, memory)` forwards, and all
    its other work follows. In addition, each F waits for the W that is `memory` microbatches
    earlier, which forms a chain of round trips. When rank r has finished, the ranks before it still
    run the last I."""
    m = problem.num_microbatches
    c = problem.communication
    times = problem.durations
    best = 0
    for rank, rank_times in enumerate(times):
        head = sum(t["F"] + c for t in times[:rank])
        trip = sum(t["F"] + t["I"] + 2 * c for t in times[rank + 1 :])  # from F's end to I's start
        held = min(m, problem.memory)
        work = sum(rank_times.values())
        waits = head + rank_times["F"] + trip + m * work - held * rank_times["F"]
        rounds, rest = divmod(m - 1, problem.memory)
        cycle = rank_times["F"] + trip + rank_times["I"] + rank_times["W"]
        chain = (
            head
            + rounds * cycle
            + rest * rank_times["F"]
            + rank_times["F"]
            + trip
            + rank_times["I"]
        )
        tail = sum(c + t["I"] for t in times[:rank])
        best = max(best, waits, head + m * work, chain + max(rank_times["W"], tail))
    return best


def _limits(problem: Problem) -> list[tuple[int, ...]]:
    """Return candidate limits for `greedy`. Each candidate contains one number per rank: the number
    of microbatches by which F may lead I. This number is equal on all ranks, or decreases by 1 or 2
    from rank to rank."""
    p = len(problem.durations)
    memory = problem.memory
    candidates: dict[tuple[int, ...], None] = {}
    for step in (0, 1, 2):
        for ahead in range(1, memory + step * p + 1):
            candidates[tuple(max(1, min(memory, ahead - step * rank)) for rank in range(p))] = None
    all_limits = list(candidates)
    max_limits = max(4, min(40, 4_000_000 // (3 * problem.num_microbatches * p * p)))
    # If there are many limits or sizes are large, return a few, evenly spaced.
    return all_limits[:: 1 + len(all_limits) // max_limits]


def greedy(problem: Problem, limits: Sequence[int]) -> Words:
    """Build words, operation by operation. The operation that can start first runs next. Among
    equal starts, I comes before F, and F before W. F runs only if the limits allow."""
    p = len(problem.durations)
    m = problem.num_microbatches
    words = [""] * p
    free = [0] * p
    done = [dict.fromkeys("FIW", 0) for _ in range(p)]
    # By rank and kind: arrival times of the inputs of the rank's operations
    arrived: list[dict[str, list[int]]] = [{"F": [], "I": [], "W": []} for _ in range(p)]
    arrived[0]["F"] = [0] * m
    for _ in range(3 * m * p):
        choices = []
        for rank, counts in enumerate(done):
            full = (
                counts["F"] - counts["W"] == problem.memory
                or counts["F"] - counts["I"] == limits[rank]
            )
            for priority, kind in enumerate("IFW"):
                if counts[kind] < len(arrived[rank][kind]) and not (kind == "F" and full):
                    start = max(arrived[rank][kind][counts[kind]], free[rank])
                    choices.append((start, priority, rank, kind))
        start, _, rank, kind = min(choices)
        words[rank] += kind
        done[rank][kind] += 1
        end = free[rank] = start + problem.durations[rank][kind]
        if kind == "F" and rank == p - 1:
            arrived[rank]["I"].append(end)
        elif kind == "F":
            arrived[rank + 1]["F"].append(end + problem.communication)
        elif kind == "I":
            arrived[rank]["W"].append(end)
            if rank > 0:
                arrived[rank - 1]["I"].append(end + problem.communication)
    return words


def improve(
    problem: Problem, words: Words, tries: int, *, seed: int, goal: tuple[float, float]
) -> Words:
    """Improve words by moving single letters, and return the best words found. Stop early if the
    makespan and the span reach `goal`."""
    rng = random.Random(seed)
    current = best = words
    best_score = score(problem, words)
    current_makespan = best_score[0]
    unit = min(time for rank_times in problem.durations for time in rank_times.values() if time)
    for turn in range(tries):
        if best_score <= goal:
            break
        rank = rng.randrange(len(current))
        old = current[rank]
        source = rng.randrange(len(old))
        target = max(0, source + rng.choice((-1, 1)) * rng.randint(1, 6))
        shortened_word = old[:source] + old[source + 1 :]
        new = shortened_word[:target] + old[source] + shortened_word[target:]
        if new == old or not _allowed(new, problem.memory):
            continue
        changed = [*current[:rank], new, *current[rank + 1 :]]
        new_score = score(problem, changed)
        temperature = unit * (1 - turn / tries)
        makespan_increase = new_score[0] - current_makespan
        if makespan_increase <= 0 or rng.random() < math.exp(
            -makespan_increase / (temperature / 3 + 1e-9)
        ):
            current = changed
            current_makespan = new_score[0]
        if new_score < best_score:
            best = changed
            best_score = new_score
    return best


def _allowed(word: str, memory: int) -> bool:
    done = dict.fromkeys("FIW", 0)
    for kind in word:
        done[kind] += 1
        if not done["W"] <= done["I"] <= done["F"] <= done["W"] + memory:
            return False
    return True
