"""Cases that processes of the heavy pool run for tests of the lab."""

from typing import Any

from distributed_training.parallel.agree import gather
from results.lab import traffic
from tests.parity.cases import all_cases


def count_bytes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes that every rank sent per step on average, and those of the formulas."""
    return all_cases(arguments, lambda run: gather(traffic.count_step(run)))
