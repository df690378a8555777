"""Exercises about time and memory: each answer is put into the simulator."""

import numbers
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from pipedream_simple import number

from pipedream.lecture.verdict import WrongAnswer, graded
from pipedream.schedules.ops import Op, Schedule, repeat, straight
from pipedream.schedules.orders import build_schedule
from pipedream.schedules.policies import POLICIES, weight_use
from pipedream.simulate.measures import idle, peak_activations
from pipedream.simulate.simulator import build_costs, simulate

OrderOf = Callable[[int, int, int], Sequence[str]]
"""(p, m, rank) -> the rank's operations, such as "F0"."""


@graded
def check_microbatches(needed: Callable[[int, int], float]) -> str:
    """Exercise 1: the fewest microbatches with which p ranks idle for at most so many percent."""
    sizes = ((4, 50), (4, 20), (2, 10), (8, 30), (3, 1), (1, 5))
    for p, percent in sizes:
        answer = needed(p, percent)
        if answer is None:
            raise WrongAnswer("microbatches_needed returns nothing")
        if not isinstance(answer, numbers.Real):  # numpy's numbers, too
            raise WrongAnswer(f"microbatches_needed returns {answer!r}, which is no number")
        if answer != int(answer) or answer < 1:
            raise WrongAnswer(f"{answer} microbatches are no whole number from 1 on")
        m = int(answer)
        limit = Fraction(percent, 100)
        at = f"for microbatches_needed({p}, {percent}) you say {m}"
        if _gpipe_idle(p, m) > limit:
            raise WrongAnswer(f"{at}: then {float(_gpipe_idle(p, m)):.1%} is idle, which is more.")
        if m > 1 and _gpipe_idle(p, m - 1) <= limit:
            raise WrongAnswer(f"{at}: that is enough, and so are fewer.")
    return f"the simulator needs as many at {len(sizes)} sizes."


def _gpipe_idle(p: int, m: int) -> Fraction:
    schedule = build_schedule("gpipe", p, m)
    return idle(simulate(schedule, build_costs(schedule))).makespan_fraction


@graded
def check_one_f_one_b(order: OrderOf) -> str:
    """Exercise 4: 1F1B, the order of one rank."""
    for p, m in ((4, 8), (2, 5), (4, 2), (3, 3)):
        schedule = _schedule_of(order, p, m, "FB")
        at = f"with p={p}, m={m}"
        for rank, held in enumerate(peak_activations(schedule)):
            if held > min(m, p - rank):
                raise WrongAnswer(
                    f"{at} rank {rank} holds {held} microbatches at a time, and "
                    f"{min(m, p - rank)} would do. When can it run its first backward pass?"
                )
        best = build_schedule("1f1b", p, m)
        _check_time(schedule, best, at, "A rank waits that has a forward to run.")
    return "as fast as GPipe, with min(m, p - rank) microbatches in memory."


@graded
def check_batches(batches: Callable[[int, int, int], Schedule]) -> str:
    """Exercise 5: several batches under 1F1B, each with the weights that the last one left."""
    for p, m, num_batches in ((4, 4, 2), (3, 5, 3)):
        schedule = batches(p, m, num_batches)
        if not isinstance(schedule, Schedule):
            raise WrongAnswer("batches has to return a Schedule")
        found = sorted({op.microbatch for op in schedule.ops()})
        if found != list(range(m * num_batches)):
            raise WrongAnswer(f"{num_batches} batches of {m} are {m * num_batches} microbatches")
        for stage, use in weight_use(schedule, POLICIES["flush"], m).items():
            for i, version in sorted(use.forward.items()):
                if version != i // m:
                    raise WrongAnswer(
                        f"with p={p}, m={m} stage {stage} runs F{i}, of batch {i // m}, with "
                        f"version {version} of its weights. One GPU would use version {i // m}: "
                        f"the update of batch {i // m - 1} has to come first."
                    )
        at = f"with p={p}, m={m} every batch sees the right weights, but the run"
        best = repeat(build_schedule("1f1b", p, m), num_batches)
        _check_time(schedule, best, at, "Keep 1F1B inside a batch.")
    return "every batch starts from the weights that the batch before it left."


@graded
def check_zero_bubble(order: OrderOf) -> str:
    """Exercise 8: the backward pass as I and W, with W where the rank would idle."""
    for p, m in ((4, 8), (3, 6), (2, 4)):
        schedule = _schedule_of(order, p, m, "FIW")
        at = f"with p={p}, m={m}"
        for rank, held in enumerate(peak_activations(schedule)):
            if held > min(m, p):
                raise WrongAnswer(
                    f"{at} rank {rank} holds {held} microbatches, more than {min(m, p)}: a "
                    f"microbatch stays in memory until its W is done. Put it off for less long."
                )
        hint = "A rank idles while it has a W that nobody waits for."
        _check_time(schedule, build_schedule("zb-h1", p, m), at, hint)
    return "as short as ZB-H1, in 1F1B's memory."


def _check_time(schedule: Schedule, best: Schedule, at: str, hint: str) -> None:
    time, goal = (simulate(s, build_costs(s)).makespan for s in (schedule, best))
    if time > goal:
        raise WrongAnswer(f"{at} takes {number(time)}, and {number(goal)} would do. {hint}")


def _schedule_of(order: OrderOf, p: int, m: int, kinds: str) -> Schedule:
    """The answer's orders of all ranks; WrongAnswer where they are not complete or cannot run."""
    lines = [_line(order(p, m, rank), rank, kinds) for rank in range(p)]
    wanted = {(kind, i) for kind in kinds for i in range(m)}
    for rank, line in enumerate(lines):
        found = {(op.kind, op.microbatch) for op in line}
        for told, ops in (("lacks", wanted - found), ("should not have", found - wanted)):
            for kind, i in sorted(ops):
                raise WrongAnswer(f"with p={p}, m={m} the order of rank {rank} {told} {kind}{i}")
    schedule = straight("yours", lines)
    try:
        simulate(schedule, build_costs(schedule))
    except (RuntimeError, ValueError) as error:
        raise WrongAnswer(f"with p={p}, m={m} this cannot run: {error}") from error
    return schedule


def _line(written: Sequence[str] | None, rank: int, kinds: str) -> list[Op]:
    if written is None:
        raise WrongAnswer(f"the order of rank {rank} is missing: the function returns nothing")
    ops = []
    for one in written:
        op = re.fullmatch(rf"([{kinds}])(\d+)", str(one))
        if op is None:
            raise WrongAnswer(f"{one!r} is no operation; write such as {kinds[0]}0")
        ops.append(Op(op[1], rank, int(op[2])))
    return ops
