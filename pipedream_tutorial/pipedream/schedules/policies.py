"""Define when a stage's weights change, and which version of the weights a microbatch uses.

Version 0 is the initial weights, and each update of a stage creates the next version. The rules use
version numbers, so the simulator can count versions and the trainers can compute with them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pipedream.errors import UserError
from pipedream.schedules.ops import Op, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Rules by which a pipeline training method updates and versions weights."""

    text: str
    per_microbatch: bool = False  # update after each backward pass, not after a batch's last one
    forward_version: Callable[[int, int, int, int], int] = lambda updates, i, m, p: updates
    """(updates of this stage so far, microbatch, microbatches per batch, p) -> version to use. By
    default, a pass uses the newest version."""
    stashed: bool = True  # a backward pass uses its forward pass's version, not the newest


POLICIES: dict[str, Policy] = {
    "flush": Policy(text="one update per batch, when the stage has no microbatch in flight"),
    "stash": Policy(
        text="one update per microbatch; the backward pass uses its forward pass's weights",
        per_microbatch=True,
    ),
    "vertical": Policy(
        text="one update per microbatch; a microbatch uses the same weight version on every stage",
        per_microbatch=True,
        forward_version=lambda updates, i, m, p: max(0, i - (p - 1)),
    ),
    "in-place": Policy(
        text="one update per microbatch in the same memory; a backward pass may see newer "
        "weights than its forward pass",
        per_microbatch=True,
        stashed=False,
    ),
    "2bw": Policy(
        text="one update per batch without a flush; a batch uses weights that are one version old",
        forward_version=lambda updates, i, m, p: max(0, i // m - 1),
    ),
}


class WeightUse(NamedTuple):
    """Weight versions of one stage, counted in the order of its rank's operations."""

    forward: dict[int, int]  # microbatch -> version that its forward pass ran with
    backward: dict[int, int]  # microbatch -> version that its backward pass ran with
    staleness: dict[int, int]  # microbatch -> updates between its version and its own update
    peak_versions: int  # maximum number of versions kept

    def version(self, op: Op) -> int:
        """Return the version that one of the stage's forward or backward passes used."""
        return (self.forward if op.kind == "F" else self.backward)[op.microbatch]


ONE_VERSION = WeightUse(forward={}, backward={}, staleness={0: 0}, peak_versions=1)
"""Weight use on a stage that flushes. It has no values per microbatch."""


def weight_use(schedule: Schedule, policy: Policy, batch_size: int) -> dict[int, WeightUse]:
    """Return the weight use of each stage: the versions that the passes use, the staleness of these
    versions, and the number of versions kept. The result depends only on the orders, not on times.
    `batch_size` is the number of microbatches between two updates if the policy updates once per
    batch."""
    p = schedule.num_stages
    return {
        stage: _stage_use(ops, policy, batch_size, p)
        for stage, ops in sorted(schedule.ops_by_stage.items())
    }


def _stage_use(ops: list[Op], policy: Policy, m: int, p: int) -> WeightUse:
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    staleness: dict[int, int] = {}
    in_use: dict[int, int] = {}  # version -> microbatches in flight that run with it
    updates = 0
    peak_versions = 1
    forward_microbatches = [op.microbatch for op in ops if op.kind == "F"]
    remaining = Counter(i // m for i in forward_microbatches)
    for kind, _, i in ops:
        if kind == "F":
            version = forward[i] = policy.forward_version(updates, i, m, p)
            if version > updates:
                raise UserError(
                    f"microbatch {i} would run with version {version}, which does not exist yet",
                    f"use {p - 1} microbatches per batch or more",
                )
            in_use[version] = in_use.get(version, 0) + 1
            continue
        if kind != "W":
            backward[i] = forward[i] if policy.stashed else updates
        if kind == "I":
            continue
        version = forward[i]
        in_use[version] -= 1
        if not in_use[version]:
            del in_use[version]
        batch = i // m
        staleness[i] = (i if policy.per_microbatch else batch) - version
        remaining[batch] -= 1
        if remaining[batch] and not policy.per_microbatch:
            continue
        updates += 1
        if policy.stashed:  # the newest version, and versions in use or to be read later
            oldest = updates
            if len(forward) < len(forward_microbatches):
                oldest = policy.forward_version(updates, forward_microbatches[len(forward)], m, p)
            older = len(in_use) - (oldest in in_use)  # versions are read in order
            peak_versions = max(peak_versions, updates + 1 - oldest + older)
    return WeightUse(forward, backward, staleness, peak_versions)
