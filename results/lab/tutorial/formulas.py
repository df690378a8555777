"""Compare each formula on the tutorial's pages with the simulator, on random cases.

The formulas are read from the tables of ADVANCED.md and COMPARISON.md and evaluated unchanged.
`schedule_checks` adds further formulas. COMPARISON.md's formulas are compared with traffic.py,
whose results the tests compare with counted bytes.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil
from typing import NamedTuple

from pipedream.errors import UserError
from pipedream.schedules.closed_forms import CLOSED_FORMS, ClosedFormInputs
from pipedream.schedules.ops import transfers
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.schedules.policies import POLICIES, weight_use
from pipedream.simulate.measures import idle as measured_idle
from pipedream.simulate.measures import peak_activations
from pipedream.simulate.simulator import Timeline, build_costs, ends_of_repeats, simulate

from results.lab.tutorial.pages import FOLDER
from results.lab.tutorial.traffic import (
    Layout,
    Model,
    block_activations,
    cost,
    ring_share,
    sent_per_step,
)

RNG = random.Random(0)


def random_case() -> ClosedFormInputs:
    """Return random sizes and durations. In a third of the cases, F = I. In half of these cases, W
    is also equal to F or to a multiple of F."""
    p = RNG.randint(1, 8)
    m = RNG.choice([RNG.randint(1, 4 * p), p * RNG.randint(1, 4), 2 * p + RNG.randint(-1, 9)])
    f, i, w = (Fraction(RNG.randint(1, 12), RNG.randint(1, 4)) for _ in range(3))
    equality = RNG.randrange(6)
    i = f if equality < 2 else i
    w = f * RNG.choice([1, 1, 2, 3]) if equality == 0 else w
    return ClosedFormInputs(p, max(1, m), RNG.randint(1, 3), f, i, w)


def run(
    name: str,
    c: ClosedFormInputs,
    communication: Fraction = Fraction(0),
    stage_scale: list[Fraction] | None = None,
) -> Timeline:
    schedule = build_schedule(name, c.p, c.m, c.v)
    costs = build_costs(
        schedule, forward=c.f, input_gradient=c.i, weight_gradient=c.w,
        communication=communication, stage_scale=stage_scale,
    )  # fmt: skip
    return simulate(schedule, costs)


def evaluate(text: str, c: ClosedFormInputs, **extra_symbols: object) -> Fraction:
    """Evaluate a formula in the pages' notation, such as '(p-1) (F+B) / v' or 'p//2 + 1'."""
    text = re.sub(r"(?<=\d)(?=[a-zA-Z(])|(?<=\))(?=\()|(?<=[\w)])\s+(?=[\w(])", "*", text)
    symbols = {
        "p": Fraction(c.p),
        "m": Fraction(c.m),
        "v": c.v,
        "F": c.f,
        "I": c.i,
        "W": c.w,
        "B": c.backward,
    }
    functions = {"min": min, "max": max, "abs": abs, "ceil": ceil}
    exact = re.sub(r"\b\d+\b", r"Fraction(\g<0>)", text)
    return Fraction(eval(exact, {"Fraction": Fraction, **functions}, {**symbols, **extra_symbols}))


def idle(name: str, c: ClosedFormInputs) -> Fraction:
    timeline = run(name, c)
    return timeline.makespan - c.m * c.total


def num_messages(name: str, c: ClosedFormInputs) -> int:
    return len(list(transfers(build_schedule(name, c.p, c.m, c.v))))


def longest_span(name: str, c: ClosedFormInputs) -> Fraction:
    timeline = run(name, c, message(c))
    lines = zip(timeline.starts, timeline.ends, strict=True)
    return max(ends[-1] - starts[0] for starts, ends in lines) * timeline.tick


def time_of_a_later_batch(name: str, c: ClosedFormInputs) -> Fraction:
    timeline = run(name, c, message(c))
    eighth, ninth = (ends_of_repeats(timeline, count)[0] for count in (8, 9))
    return (ninth - eighth) * timeline.tick


def idle_at_end(timeline: Timeline) -> list[Fraction]:
    """Return the time from the end of each rank's last operation to the end of the run."""
    return [timeline.makespan - ends[-1] * timeline.tick for ends in timeline.ends]


def table(name: str) -> dict[str, tuple[str, ...]]:
    """Read a table from ADVANCED.md. Map each schedule to the other cells in its row."""
    page = (FOLDER / "ADVANCED.md").read_text()
    body = page.partition(f"<!-- table: {name} -->")[2].partition("<!-- end -->")[0]
    titles = {entry.title: name for name, entry in SCHEDULES.items()}
    rows: dict[str, tuple[str, ...]] = {}
    for line in body.strip().splitlines()[2:]:
        names, *cells = re.split(r"(?<!\\)\|", line.strip("| "))
        rows |= {titles[one.strip()]: tuple(map(str.strip, cells)) for one in names.split(";")}
    return rows


@dataclass(frozen=True)
class Check:
    """A formula, the condition under which it holds, and the simulator's result."""

    text: str
    holds: Callable[[ClosedFormInputs], bool]
    formula: Callable[[ClosedFormInputs], object]
    simulated: Callable[[ClosedFormInputs], object]


def memory_check(name: str, text: str) -> Check:
    """Return a check of the largest number of microbatches that each rank holds."""
    formula = re.split(r", with q | \(the activations| \(if ", text)[0]
    at_most = formula.startswith("at most ")

    def claimed(c: ClosedFormInputs) -> object:
        q = Fraction(c.m, max(1, c.m // c.p))
        values = [evaluate(formula.removeprefix("at most "), c, r=r, q=q) for r in range(c.p)]
        return values if not at_most else all(map(Fraction.__ge__, values, held(c)))

    def held(c: ClosedFormInputs) -> list[Fraction]:
        return list(peak_activations(run(name, c).schedule))

    margins = {"v-half": 2, "v-min": 1}
    flushes = SCHEDULES[name].policy == "flush"
    return Check(
        f"memory of {name}: {text}",
        lambda c: c.m >= c.p + margins.get(name, 0) if not flushes or name in margins else True,
        claimed,
        (lambda c: True) if at_most else held,
    )


def idle_check(name: str, text: str) -> Check:
    """Return a check that each rank's idle time equals the table's formula for the values of p and
    m that the table covers."""
    formula = re.sub(r"^if .*?: ", "", text)
    formula = re.split(r", (?![^()]*\))|; | if | with d = | without ", formula)[0]

    def holds(c: ClosedFormInputs) -> bool:
        limits = {"interleaved": c.m >= c.p, "v-half": c.p >= 3, "v-min": c.p >= 2 and c.p % 3 > 0}
        return CLOSED_FORMS[name].idle_holds(c) and limits.get(name, True)

    def claimed(c: ClosedFormInputs) -> Fraction:
        return evaluate(formula, c, d=max(Fraction(0), c.f + c.i - 2 * min(c.f, c.w)))

    return Check(f"idle time of {name}: {text}", holds, claimed, lambda c: idle(name, c))


def version_check(name: str, text: str) -> Check:
    """Return a check of the number of weight versions that each stage keeps."""
    formula = text.partition(" (if")[0]
    policy = POLICIES[SCHEDULES[name].policy]

    def claimed(c: ClosedFormInputs) -> list[Fraction]:
        return [evaluate(formula, c, s=s) for s in range(c.p)]

    def kept(c: ClosedFormInputs) -> list[int]:
        schedule = build_schedule(name, c.p, c.m * max(3, ceil(2 * c.p / c.m)))
        return [use.peak_versions for use in weight_use(schedule, policy, c.m).values()]

    return Check(f"versions of {name}: {text}", lambda c: c.m >= max(1, c.p - 1), claimed, kept)


def recomputing_makespan(name: str, c: ClosedFormInputs) -> Fraction:
    return run(name, c._replace(i=c.f + c.i)).makespan


def factors(c: ClosedFormInputs) -> list[Fraction]:
    rng = random.Random(str(c))  # the same numbers for each use of a case
    return [Fraction(rng.randint(1, 9), 3) for _ in range(c.p)]


def message(c: ClosedFormInputs) -> Fraction:
    return min(c.f, c.backward) * Fraction(random.Random(str(c)).randint(0, 8), 8)


def always(c: ClosedFormInputs) -> bool:
    return True


class Step(NamedTuple):
    """A training step: k microbatches of b sequences on each of d copies of the model. Each copy
    has p stages of t devices."""

    model: Model
    d: int
    t: int
    p: int
    k: int
    b: int

    def symbols(self) -> dict[str, object]:
        model, d, t, _, k, b = self
        sizes = {"N": model.parameters, "L": model.layers, "D": model.hidden, "T": model.sequence}
        sizes |= {"d": d, "t": t, "k": k, "b": b}
        return {"r": ring_share} | {name: Fraction(size) for name, size in sizes.items()}

    def cost_of(self, layout: Layout) -> tuple[Fraction, Fraction]:
        """Return the first device's state size and the number of bytes that it sends."""
        sequences = self.b * self.k * layout.data
        costs = cost(self.model, layout, sequences=sequences, microbatch=self.b)
        moved = sent_per_step(self.model, layout, self.k, self.b, 0).values()
        return costs.weights + costs.gradients + costs.optimizer, sum(moved, Fraction(0))


def step_of(c: ClosedFormInputs) -> Step:
    """Return a random step. Equal cases give equal steps."""
    rng = random.Random(str(c))
    t = rng.choice((2, 4, 8))
    p = rng.randint(3, 6)
    model = Model(
        name="random", layers=2 * p * rng.randint(1, 3), hidden=8 * t * rng.randint(1, 9),
        heads=t, vocabulary=t * rng.randint(1, 400), sequence=rng.randint(1, 64),
    )  # fmt: skip
    return Step(model, rng.randint(2, 9), t, p, rng.randint(1, 9), rng.randint(1, 4))


def zero_state(s: Step, zero: int) -> Fraction:
    """Return the size of the state in bytes under ZeRO stage `zero`, without the gathered layer,
    which COMPARISON.md describes in words."""
    gathered = 2 * max(s.model.block_parameters, s.model.embedding_parameters) * (zero == 3)
    return s.cost_of(Layout(title="", data=s.d, zero=zero))[0] - gathered


def zero_sent(s: Step, zero: int) -> Fraction:
    return s.cost_of(Layout(title="", data=s.d, zero=zero))[1]


def tensor_state(s: Step, sequence_parallel: int) -> Fraction:
    """Return the size of the state in bytes. As in COMPARISON.md, assume that the t devices also
    shard the norms, biases and positions."""
    whole = (6 * s.model.layers + s.model.sequence + 2) * s.model.hidden
    layout = Layout(title="", tensor=s.t, sequence_parallel=bool(sequence_parallel))
    return s.cost_of(layout)[0] - 16 * (whole - Fraction(whole, s.t))


def tensor_sent(s: Step, sequence_parallel: int) -> Fraction:
    return s.cost_of(Layout(title="", tensor=s.t, sequence_parallel=bool(sequence_parallel)))[1]


def middle_sent(s: Step, in_v: int) -> Fraction:
    """Return the number of bytes that an inner stage sends. In a V-shaped schedule, each device has
    two stages, so return half of the number of bytes that the device sends."""
    layout = Layout(title="", pipeline=s.p, schedule="zb-v" if in_v else "1f1b")
    return sent_per_step(s.model, layout, s.k, s.b, 1)["pipeline"] / (2 if in_v else 1)


def block_activation_bytes(s: Step, _: int) -> Fraction:
    return block_activations(s.model, Layout(title=""), s.b)


def cost_checks() -> Iterator[Check]:
    """Yield checks that compare the formulas in COMPARISON.md with traffic.py."""
    page = (FOLDER / "COMPARISON.md").read_text().partition("## Formulas")[2]
    rows = {
        title: [cell.split(", ")[0] for cell in cells.split(" | ")]
        for title, cells in re.findall(r"(?m)^\| ([^|]+) \| (.+) \|$", page)
    }
    formulas: list[tuple[str, str, Callable[[Step, int], Fraction], int]] = []
    for stage, title in enumerate(("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP")):
        state, moved = rows[title]
        if moved == "the same":
            moved = rows["data parallel"][1]
        formulas += [(title, state, zero_state, stage), (title, moved, zero_sent, stage)]
    for cut, title in enumerate(("tensor", "tensor, sequence parallel")):
        state, moved = rows[title]
        formulas += [(title, state, tensor_state, cut), (title, moved, tensor_sent, cut)]
    formulas += [("pipeline", rows["pipeline"][1], middle_sent, in_v) for in_v in (0, 1)]
    formulas.append(("a block's activations", "34 b T D", block_activation_bytes, 0))
    for title, text, count, argument in formulas:

        def formula(c: ClosedFormInputs, text: str = text) -> Fraction:
            return evaluate(text, c, **step_of(c).symbols())

        def computed(
            c: ClosedFormInputs,
            count: Callable[[Step, int], Fraction] = count,
            argument: int = argument,
        ) -> Fraction:
            return count(step_of(c), argument)

        yield Check(f"{title}: {text}", always, formula, computed)


def schedule_checks() -> Iterator[Check]:
    for name, (text,) in table("idle time").items():
        yield idle_check(name, text)
    for name, (text,) in table("activations").items():
        yield memory_check(name, text)
    for name, (text, _) in table("weight versions").items():
        yield version_check(name, text)
    for name in ("gpipe", "1f1b"):
        yield Check(
            f"{name}, recomputation inside B: (m+p-1) (2F+B)",
            always,
            lambda c: (c.m + c.p - 1) * (2 * c.f + c.backward),
            partial(recomputing_makespan, name),
        )
    yield Check(
        "interleaved: (v (p-m) + m - 1) (F+B) / v if m < p",
        lambda c: c.m < c.p,
        lambda c: evaluate("(v (p-m) + m - 1) (F+B) / v", c),
        lambda c: idle("interleaved", c),
    )
    yield Check(
        "GPipe: (p-1) / (m+p-1) of all time is idle",
        always,
        lambda c: Fraction(c.p - 1, c.m + c.p - 1),
        lambda c: idle("gpipe", c) / run("gpipe", c).makespan,
    )
    for name, entry in SCHEDULES.items():
        if entry.policy == "flush":
            yield Check(
                f"{name}: from batch to batch, the time of the longest span passes",
                always,
                partial(longest_span, name),
                partial(time_of_a_later_batch, name),
            )
    yield Check(
        "Eager 1F1B ends before 1F1B if m > p > 1, 0 < c <= F and c <= B",
        lambda c: c.m > c.p > 1 and message(c) > 0,
        always,
        lambda c: run("eager-1f1b", c, message(c)).makespan < run("1f1b", c, message(c)).makespan,
    )
    yield Check(
        "ZB-H2, m >= 2p-1: no gap if and only if F + I <= 2 min(F,W)",
        lambda c: c.m >= 2 * c.p - 1 > 1,
        lambda c: c.f + c.i <= 2 * min(c.f, c.w),
        lambda c: not any(measured_idle(run("zb-h2", c)).span),
    )
    yield Check(
        "ZB-V: no gap if F = I = W and m >= 2p-1",
        lambda c: c.m >= 2 * c.p - 1 and c.f == c.i == c.w,
        lambda c: True,
        lambda c: not any(measured_idle(run("zb-v", c)).span),
    )
    yield Check(
        "interleaved: (pv-1) / (p-1) times as many messages as 1F1B",
        lambda c: c.p > 1,
        lambda c: Fraction(c.p * c.v - 1, c.p - 1),
        lambda c: Fraction(*(num_messages(name, c) for name in ("interleaved", "1f1b"))),
    )
    yield Check(
        "1F1B: rank r ends r B before rank 0",
        always,
        lambda c: [r * c.backward for r in range(c.p)],
        lambda c: idle_at_end(run("1f1b", c)),
    )
    yield Check(
        "GPipe on uneven stages: sum F + (m-1) max F, and the same for B",
        always,
        lambda c: (sum(factors(c)) + (c.m - 1) * max(factors(c))) * c.total,
        lambda c: run("gpipe", c, stage_scale=factors(c)).makespan,
    )
    yield Check(
        "GPipe with messages: 2 (p-1) c more",
        always,
        lambda c: (c.m + c.p - 1) * c.total + 2 * (c.p - 1) * message(c),
        lambda c: run("gpipe", c, message(c)).makespan,
    )
    yield Check(
        "1F1B with messages: 2c (p + m - 2 - ceil((m-1)/p)) more if c <= F and c <= B",
        always,
        lambda c: (
            (c.m + c.p - 1) * c.total
            + 2 * message(c) * (c.p + c.m - 2 - ceil(Fraction(c.m - 1, c.p)))
        ),
        lambda c: run("1f1b", c, message(c)).makespan,
    )


def try_cases(check: Check, count: int) -> tuple[int, list[str]]:
    """Check up to `count` random cases. Return how many there were, and descriptions of the cases
    in which the formula is wrong."""
    num_tested, wrong = 0, []
    for _ in range(200 * count):
        c = random_case()
        try:
            if num_tested == count or not check.holds(c):
                continue
            simulated = check.simulated(c)
        except UserError:  # sizes that the schedule does not allow
            continue
        if check.formula(c) != simulated:
            wrong.append(f"{c}: formula {check.formula(c)}, simulated {simulated}")
        num_tested += 1
    return num_tested, wrong
