"""The shortest order within a memory limit, proved: OR-Tools' constraint solver (CP-SAT).

The same problem as search.py's: each operation has a start, operations of a rank do not overlap,
results arrive before they are used, and a rank's F number i + memory starts after its W number i.
"""

from __future__ import annotations

from typing import Any

from pipedream.errors import UserError
from pipedream.simulate.search import Problem, Words

WORKERS = 2


def solve(problem: Problem, longest: int, seconds: float) -> tuple[Words | None, int]:
    """(words, a bound that no words beat), in ticks. The words are the shortest possible if they
    are as long as the bound; None where none shorter than `longest` came up in the time given.

    Raises UserError where OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError:
        raise UserError(
            "OR-Tools is not installed in this Python",
            "type python -m pip install -r requirements.txt in the tutorial's folder, or leave "
            "prove at 0",
        ) from None
    model = cp_model.CpModel()
    start = _add_operations(model, problem, longest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = WORKERS
    found = solver.solve(model)
    bound = round(solver.best_objective_bound)
    if found not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, bound
    at = {operation: solver.value(variable) for operation, variable in start.items()}
    words = []
    for rank in range(problem.num_ranks):
        own = [(time, "FIW".index(kind), kind) for (kind, r, _), time in at.items() if r == rank]
        words.append("".join(kind for _, _, kind in sorted(own)))
    return words, bound


def _add_operations(model: Any, problem: Problem, longest: int) -> dict[tuple[str, int, int], Any]:
    """Put the problem into the model; (kind, rank, microbatch) -> when it starts."""
    p, m, c = problem.num_ranks, problem.num_microbatches, problem.communication
    start = {
        (kind, rank, i): model.new_int_var(0, longest, f"{rank}{kind}{i}")
        for rank in range(p)
        for kind in "FIW"
        for i in range(m)
    }
    for rank, lasts in enumerate(problem.durations):
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start[kind, rank, i], lasts[kind], "")
            for kind in "FIW"
            for i in range(m)
        )
        for i in range(m):
            waits = [("F", rank, "I", rank, i, 0), ("I", rank, "W", rank, i, 0)]
            if rank > 0:
                waits.append(("F", rank - 1, "F", rank, i, c))
                waits.append(("I", rank, "I", rank - 1, i, c))
            for kind, one, then, other, number, later in waits:
                end = start[kind, one, number] + problem.durations[one][kind]
                model.add(start[then, other, number] >= end + later)
            for kind in "FIW" if i else "":
                model.add(start[kind, rank, i] >= start[kind, rank, i - 1] + lasts[kind])
            if i >= problem.memory:
                freed = start["W", rank, i - problem.memory] + lasts["W"]
                model.add(start["F", rank, i] >= freed)
    end = model.new_int_var(0, longest, "makespan")
    for rank, lasts in enumerate(problem.durations):
        model.add(end >= start["W", rank, m - 1] + lasts["W"])
    model.minimize(end)
    return start
