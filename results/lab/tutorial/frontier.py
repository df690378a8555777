"""Search for the shortest order for every memory limit, and bound its makespan with OR-Tools.

python results/lab/tutorial/frontier.py pipedream_tutorial/records/frontier.json
"""

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from pipedream.errors import UserError, main_with_errors
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.search import search
from pipedream.simulate.simulator import Costs, build_costs

RANKS, MICROBATCHES, COMMUNICATION = 4, 8, (0, 1)
PROVE_S = 60.0


def costs_of(communication: int) -> Costs:
    """Return costs with F = I = W = 1 on every rank."""
    return build_costs(build_schedule("1f1b", RANKS, 1), communication=communication)


def frontier(prove_s: float = PROVE_S) -> list[dict[str, Any]]:
    """Return one row per communication time and memory limit. Each row contains the makespan, a
    lower bound, and `words`, which lists the kinds of each rank's operations in order."""
    rows = []
    for communication in COMMUNICATION:
        for memory in range(1, MICROBATCHES + 1):
            result = search(costs_of(communication), MICROBATCHES, memory, prove=prove_s)
            rows.append(
                {
                    "communication": communication,
                    "memory": memory,
                    "makespan": str(result.makespan),
                    "lower_bound": str(result.lower_bound),
                    "words": [
                        "".join(op.kind for item in order for op in item.parts)
                        for order in result.schedule.orders
                    ],
                }
            )
    return rows


def main() -> None:
    """Write the record and print its rows."""
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
    for row in rows:
        proved = "proved" if Fraction(row["makespan"]) == Fraction(row["lower_bound"]) else "open"
        print(f"c = {row['communication']}, memory {row['memory']}: {row['makespan']}, {proved}")


if __name__ == "__main__":
    main_with_errors(main)
