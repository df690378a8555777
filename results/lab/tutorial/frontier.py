"""Search for the shortest order for every memory limit, and bound its makespan with OR-Tools, which
`pip install ortools` installs.

python results/lab/tutorial/frontier.py pipedream_tutorial/records/frontier.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from pipedream.errors import UserError, main_with_errors
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.search import Problem, Words, build_problem, score, search
from pipedream.simulate.simulator import Costs, build_costs

RANKS, MICROBATCHES, COMMUNICATION = 4, 8, (0, 1)
PROVE_S = 60.0


def costs_of(communication: int) -> Costs:
    """Return costs with F = I = W = 1 on every rank."""
    return build_costs(build_schedule("1f1b", RANKS, 1), communication=communication)


def frontier() -> list[dict[str, Any]]:
    """Return one row per communication time and memory limit. Each row contains the makespan, a
    lower bound, and `words`, which lists the kinds of each rank's operations in order."""
    rows = []
    for communication in COMMUNICATION:
        for memory in range(1, MICROBATCHES + 1):
            costs = costs_of(communication)
            found = search(costs, MICROBATCHES, memory)
            words = ["".join(op.kind for op in order) for order in found.schedule.flat]
            problem = build_problem(costs, MICROBATCHES, memory)
            makespan = int(found.makespan / problem.tick)
            shorter, bound = solve(problem, makespan, PROVE_S)
            words = min([words, *shorter], key=lambda words: score(problem, words))
            rows.append(
                {
                    "communication": communication,
                    "memory": memory,
                    "makespan": str(int(score(problem, words)[0]) * problem.tick),
                    "lower_bound": str(max(found.lower_bound, bound * problem.tick)),
                    "words": words,
                }
            )
    return rows


def solve(problem: Problem, max_makespan: int, seconds: float) -> tuple[list[Words], int]:
    """Search for the shortest order of at most `max_makespan` ticks with OR-Tools' constraint
    solver (CP-SAT), for at most `seconds`. Return a list with the words of the best order, and a
    lower bound on the makespan in ticks. The list is empty if the solver finds no order."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    p = len(problem.durations)
    m = problem.num_microbatches
    c = problem.communication
    start = {
        (kind, rank): [model.new_int_var(0, max_makespan, f"{rank}{kind}{i}") for i in range(m)]
        for rank in range(p)
        for kind in "FIW"
    }
    end = model.new_int_var(0, max_makespan, "makespan")
    model.minimize(end)
    for rank, durations in enumerate(problem.durations):
        model.add(end >= start["W", rank][-1] + durations["W"])
        model.add_no_overlap(
            model.new_fixed_size_interval_var(begin, durations[kind], "")
            for kind in "FIW"
            for begin in start[kind, rank]
        )
        # Results arrive before they are used, and W number i frees memory for F number i + memory.
        waits = [(kind, start[kind, rank][1:], 0) for kind in "FIW"]
        waits += [("F", start["I", rank], 0), ("I", start["W", rank], 0)]
        waits.append(("W", start["F", rank][problem.memory :], 0))
        if rank > 0:
            waits.append(("I", start["I", rank - 1], c))
        if rank + 1 < p:
            waits.append(("F", start["F", rank + 1], c))
        for kind, later, sending in waits:
            for before, after in zip(start[kind, rank], later, strict=False):
                model.add(after >= before + durations[kind] + sending)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    bound = round(solver.best_objective_bound)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return [], bound
    words = []
    for rank in range(p):
        steps = sorted(
            (solver.value(start_var), kind) for kind in "FIW" for start_var in start[kind, rank]
        )
        words.append("".join(kind for _, kind in steps))
    return [words], bound


def main() -> None:
    """Write the record."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).parent.is_dir():
        raise UserError(
            "give one path in an existing folder",
            "type python results/lab/tutorial/frontier.py pipedream_tutorial/records/frontier.json",
        )
    rows = frontier()
    record = {
        "command": f"python results/lab/tutorial/frontier.py {sys.argv[1]}",
        "num_stages": RANKS,
        "num_microbatches": MICROBATCHES,
        "rows": rows,
    }
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main_with_errors(main)
