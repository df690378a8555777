"""Define the cost of an operation in seconds, by the resource that is busy. This module imports no
other package, so that the planner runs wherever Python runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class Cost:
    """Seconds of arithmetic, memory traffic and network traffic."""

    arithmetic_s: float = 0.0
    memory_s: float = 0.0
    network_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.arithmetic_s + other.arithmetic_s,
            self.memory_s + other.memory_s,
            self.network_s + other.network_s,
        )

    def __sub__(self, other: Cost) -> Cost:
        return self + -1 * other

    def __rmul__(self, factor: float) -> Cost:
        return Cost(factor * self.arithmetic_s, factor * self.memory_s, factor * self.network_s)

    @property
    def total_s(self) -> float:
        return self.arithmetic_s + self.memory_s + self.network_s


NO_COST = Cost()


def add_costs(costs: Iterable[Cost]) -> Cost:
    """Add costs from left to right, which gives the same result in every version of Python."""
    arithmetic_s = memory_s = network_s = 0.0
    for cost in costs:
        arithmetic_s += cost.arithmetic_s
        memory_s += cost.memory_s
        network_s += cost.network_s
    return Cost(arithmetic_s, memory_s, network_s)


class PassCosts(NamedTuple):
    """Costs of the forward pass, of the gradients of inputs and of the gradients of weights."""

    forward: Cost = NO_COST
    inputs: Cost = NO_COST
    weights: Cost = NO_COST
