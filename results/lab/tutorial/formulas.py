"""Compare each formula that the tutorial's pages print with the simulator, on random cases.

    python results/lab/tutorial/formulas.py

The formulas of ADVANCED.md's tables are read from the page and evaluated as they stand there.
"""

import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod

import checkout  # noqa: F401
from pipedream.errors import UserError
from pipedream.schedules.closed_forms import CLOSED_FORMS, Case
from pipedream.schedules.ops import recomputed
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.schedules.policies import POLICIES, weight_use
from pipedream.simulate.measures import peak_activations
from pipedream.simulate.simulator import Timeline, build_costs, simulate

from results.lab.tutorial.pages import FOLDER

CASES = 300
RNG = random.Random(0)


def random_case() -> Case:
    """Return sizes and durations; in a third of the cases F = I, in a sixth F = I = W."""
    p = RNG.randint(1, 8)
    m = RNG.choice([RNG.randint(1, 4 * p), p * RNG.randint(1, 4), 2 * p + RNG.randint(-1, 9)])
    f, i, w = (Fraction(RNG.randint(1, 12), RNG.randint(1, 4)) for _ in range(3))
    equal = RNG.randrange(6)
    i = f if equal < 2 else i
    w = f * RNG.choice([1, 1, 2, 3]) if equal == 0 else w
    return Case(p, max(1, m), RNG.randint(1, 3), f, i, w)


def run(
    name: str,
    c: Case,
    communication: Fraction = Fraction(0),
    stage_scale: list[Fraction] | None = None,
) -> Timeline:
    ticks = prod(time.denominator for time in (c.f, c.i, c.w))
    duration = {"F": int(c.f * ticks), "I": int(c.i * ticks), "W": int(c.w * ticks), "send": 0}
    schedule = build_schedule(name, c.p, c.m, c.v, duration=duration)
    costs = build_costs(
        schedule, forward=c.f, input_gradient=c.i, weight_gradient=c.w,
        communication=communication, stage_scale=stage_scale,
    )  # fmt: skip
    return simulate(schedule, costs)


def evaluate(text: str, c: Case, **more: Fraction | int) -> Fraction:
    """Evaluate a formula as a page writes it: '(p-1) (F+B) / v', '2p-1', 'p//2 + 1'."""
    text = re.sub(r"\|(F-B)\|", r"abs(\1)", text.replace("\\", ""))
    text = re.sub(r"(?<=\d)(?=[a-zA-Z(])|(?<=\))(?=\()|(?<=[\w)])\s+(?=[\w(])", "*", text)
    known = {
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
    return Fraction(eval(exact, {"Fraction": Fraction, **functions}, {**known, **more}))


def idle(name: str, c: Case) -> Fraction:
    timeline = run(name, c)
    return timeline.makespan - c.m * c.total


def earlier_ends(found: Timeline) -> list[Fraction]:
    """Return by how much each rank ends before the last one."""
    return [found.makespan - ends[-1] * found.tick for ends in found.ends]


def table(name: str) -> dict[str, tuple[str, ...]]:
    """Return a table of ADVANCED.md: schedule -> its other cells."""
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
    """A formula, when it holds, and what the simulator finds."""

    text: str
    holds: Callable[[Case], bool]
    formula: Callable[[Case], object]
    simulated: Callable[[Case], object]


def of_a_rank(name: str, text: str) -> Check:
    """Memory: most microbatches that each rank holds."""
    formula = re.split(r", a round| \(2p\+1| \(if", text)[0]
    at_most = formula.startswith("at most ")

    def claimed(c: Case) -> object:
        q = Fraction(c.m, max(1, c.m // c.p))
        values = [evaluate(formula.removeprefix("at most "), c, r=r, q=q) for r in range(c.p)]
        return values if not at_most else all(map(Fraction.__ge__, values, held(c)))

    def held(c: Case) -> list[Fraction]:
        return list(peak_activations(run(name, c).schedule))

    limits = {"v-half": 2, "v-min": 1}
    flushes = SCHEDULES[name].policy == "flush"
    return Check(
        f"memory of {name}: {text}",
        lambda c: c.m >= c.p + limits.get(name, 0) if not flushes or name in limits else True,
        claimed,
        (lambda c: True) if at_most else held,
    )


def idle_check(name: str, text: str) -> Check:
    """The idle time of each rank, in the range that the table states."""
    formula = re.split(r", (?![^()]*\))|; | \(if ", text)[0]

    def holds(c: Case) -> bool:
        limits = {"interleaved": c.m >= c.p, "v-half": c.p >= 3, "v-min": c.p >= 2 and c.p % 3 > 0}
        return CLOSED_FORMS[name].idle_holds(c) and limits.get(name, True)

    def claimed(c: Case) -> Fraction:
        return evaluate(formula, c, d=max(Fraction(0), c.f + c.i - 2 * min(c.f, c.w)))

    return Check(f"idle time of {name}: {text}", holds, claimed, lambda c: idle(name, c))


def version_check(name: str, text: str) -> Check:
    """The weight versions that each stage keeps."""
    formula = text.partition(" (a")[0]
    policy = POLICIES[SCHEDULES[name].policy]

    def claimed(c: Case) -> list[Fraction]:
        return [evaluate(formula, c, s=s) for s in range(c.p)]

    def kept(c: Case) -> list[int]:
        schedule = build_schedule(name, c.p, c.m * max(3, ceil(2 * c.p / c.m)))
        return [use.peak_versions for use in weight_use(schedule, policy, c.m).values()]

    return Check(f"versions of {name}: {text}", lambda c: c.m >= max(1, c.p - 1), claimed, kept)


def recomputing_checks(name: str) -> Iterator[Check]:
    def earlier(c: Case) -> Fraction:
        schedule = recomputed(build_schedule(name, c.p, c.m), Fraction(1, 20))
        costs = build_costs(schedule, forward=c.f, input_gradient=c.i, weight_gradient=c.w)
        return simulate(schedule, costs).makespan

    yield Check(
        f"{name}, recomputation inside B: (m+p-1) (2F+B)",
        always,
        lambda c: (c.m + c.p - 1) * (2 * c.f + c.backward),
        lambda c: run(name, c._replace(i=c.f + c.i)).makespan,
    )
    yield Check(
        f"{name}, recomputation before the gradient arrives: m F more",
        lambda c: c.p > 1,
        lambda c: (c.m + c.p - 1) * c.total + c.m * c.f,
        earlier,
    )


def factors(c: Case) -> list[Fraction]:
    chance = random.Random(str(c))  # the same ones each time that a case is looked at
    return [Fraction(chance.randint(1, 9), 3) for _ in range(c.p)]


def message(c: Case) -> Fraction:
    return min(c.f, c.backward) * Fraction(random.Random(str(c)).randint(0, 8), 8)


def always(c: Case) -> bool:
    return True


def checks() -> Iterator[Check]:
    for name, (text,) in table("idle time").items():
        yield idle_check(name, text)
    for name, (text,) in table("activations").items():
        yield of_a_rank(name, text)
    for name, (text, _) in table("weight versions").items():
        yield version_check(name, text)
    for name in ("gpipe", "1f1b"):
        yield from recomputing_checks(name)
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
    yield Check(
        "1F1B: (p-1) / m, idle over useful time",
        always,
        lambda c: Fraction(c.p - 1, c.m),
        lambda c: idle("1f1b", c) / (c.m * c.total),
    )
    yield Check(
        "ZB-H1: (p-1) (F + I - min(F,I,W)) if m >= p",
        lambda c: c.m >= c.p,
        lambda c: evaluate("(p-1) (F + I - min(F,I,W))", c),
        lambda c: idle("zb-h1", c),
    )
    yield Check(
        "1F1B: rank r ends r B before rank 0",
        always,
        lambda c: [r * c.backward for r in range(c.p)],
        lambda c: earlier_ends(run("1f1b", c)),
    )
    yield Check(
        "GPipe on uneven stages: sum F + (m-1) max F, and the same of B",
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


def main() -> int:
    wrong = 0
    for check in checks():
        seen, failed = 0, []
        for _ in range(200 * CASES):
            c = random_case()
            try:
                if not check.holds(c):
                    continue
                simulated = check.simulated(c)
            except UserError:  # sizes that the schedule does not allow
                continue
            if check.formula(c) != simulated:
                failed.append(f"{c}: formula {check.formula(c)}, simulated {simulated}")
            seen += 1
            if seen == CASES:
                break
        wrong += bool(failed)
        print(
            f"{seen - len(failed)} of {seen}  {check.text}", *failed[:2], sep="\n    ", flush=True
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
