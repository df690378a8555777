"""Functions that processes of the heavy pool call for the tests of the lab."""

from typing import Any

from distributed_training.parallel.agree import gather
from results.lab import traffic
from tests.parity.cases import all_cases


def count_bytes(arguments: dict[str, Any]) -> dict[str, Any]:
    """For each case, return the number of bytes that every rank sent per step on average, and the
    number from the formulas."""
    return all_cases(arguments, lambda run: gather(traffic.count_step(run)))
