"""Functions that the processes of the shared test pool call for the lab tests."""

from typing import Any

from distributed_training.parallel.agree import gather
from results.lab import traffic
from tests.parity.cases import all_cases


def count_bytes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return, for each case, the average number of bytes that each rank sent per step, and the
    number that the formulas give."""
    return all_cases(arguments, lambda run: gather(traffic.count_step(run)))
