"""Compute the errors of a record's predictions, and define the largest accepted errors."""

from collections.abc import Callable
from typing import NamedTuple

import checkout  # noqa: F401
from pipedream.runtime.record import Record, makespan_error


def points_error(case: Record) -> float:
    """Return the simulated utilization minus the measured utilization, in percentage points."""
    return 100 * (case["predicted"]["utilisation"] - case["measured"]["utilisation"])


class Goal(NamedTuple):
    """The largest accepted error of a record's predictions, and the function that computes the
    error."""

    limit: float
    error: Callable[[Record], float]
    text: str


CPU_GOAL = Goal(10, makespan_error, "10% of the makespan")
GPU_GOAL = Goal(3, points_error, "3 percentage points of utilization")


def goal_of(record: Record) -> Goal:
    return GPU_GOAL if record["machine"]["gpus"] else CPU_GOAL


def validation_cases(record: Record) -> list[Record]:
    """Return the cases that the simulator predicted without using their measurements."""
    return [case for case in record["cases"] if case["predicted"] and not case["calibrated_on"]]


def is_met(record: Record) -> bool:
    goal = goal_of(record)
    return all(abs(goal.error(case)) <= goal.limit for case in validation_cases(record))
