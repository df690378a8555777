"""`doctor --nodes`: latency and bandwidth between processes, and which link is slow.

    python real_model_example.py doctor --nodes --num_gpus 4
    torchrun --nnodes=2 --nproc_per_node=8 ... real_model_example.py doctor --nodes

Two processes at a time send each other a tensor while the others wait: every pair of up to
MOST_FOR_PAIRS processes, of more each with the next.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from distributed_training.parallel.agree import gather
from distributed_training.plan.machine import detect_machine
from distributed_training.run.launch import requested_processes
from distributed_training.run.process import current_process
from distributed_training.run.ranks import run_ranks
from distributed_training.settings.errors import UserError
from distributed_training.tools.clock import Clock
from distributed_training.tools.doctor import Finding, ok, show, warn
from distributed_training.tools.group import open_group
from distributed_training.tools.links import there_and_back

MOST_FOR_PAIRS = 8
ROUNDS = 3  # of which the quickest counts: other programs only make it slower
ROUND_S = 0.02
SMALL_BYTES = 8
LARGE_BYTES = {"cuda": 2**26, "cpu": 2**22}
# By how much a link is worse than the best of its kind before it is called slow.
SLOW_LATENCY = 3.0
SLOW_RATE = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What lies between two processes."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_s: float
    bytes_per_s: float

    @property
    def kind(self) -> str:
        return "in a node" if self.hosts[0] == self.hosts[1] else "between nodes"

    def describe(self) -> str:
        ends = zip(self.ranks, self.hosts, strict=True)
        both = " - ".join(f"{rank} ({host})" for rank, host in ends)
        return f"rank {both}: {1e6 * self.latency_s:,.0f} us, {self.bytes_per_s / 1e9:.2f} GB/s"


def pairs(world_size: int) -> list[tuple[int, int]]:
    """The ranks whose link is measured."""
    if world_size <= MOST_FOR_PAIRS:
        return list(itertools.combinations(range(world_size), 2))
    return list(itertools.pairwise(range(world_size)))


def measure_links(world_size: int, device: torch.device) -> list[Link]:
    """All links, on every rank. Collective."""
    hosts = gather(platform.node())
    timer = Clock(device, budget_s=ROUND_S)
    small = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    large = torch.zeros(LARGE_BYTES[device.type], dtype=torch.uint8, device=device)
    found = []
    for ranks in pairs(world_size):
        mine = [
            min(timer.seconds(call, together=True) for _ in range(ROUNDS)) / 2
            for call in (partial(there_and_back, tensor, ranks) for tensor in (small, large))
        ]
        latency, seconds = gather(mine)[ranks[0]]  # the others looked on
        found.append(
            Link(
                ranks=ranks,
                hosts=(hosts[ranks[0]], hosts[ranks[1]]),
                latency_s=latency,
                bytes_per_s=large.numel() / seconds,
            )
        )
    return found


def judge(links: Sequence[Link]) -> list[Finding]:
    """A line for each kind of link, and one for each that is slow among its kind."""
    found: list[Finding] = []
    slow: list[Link] = []
    fix = "leave that process's host out, or see what else uses it: top, nvidia-smi, ethtool"
    for kind in dict.fromkeys(link.kind for link in links):
        alike = [link for link in links if link.kind == kind]
        latency = min(link.latency_s for link in alike)
        rate = max(link.bytes_per_s for link in alike)
        text = f"{len(alike)} {kind}, at best {1e6 * latency:,.0f} us, {rate / 1e9:.2f} GB/s"
        found.append(ok("links", text))
        for link in alike:
            late = link.latency_s / latency
            thin = rate / link.bytes_per_s
            if late > SLOW_LATENCY or thin > SLOW_RATE:
                slow.append(link)
                what = f"{thin:.1f} times slower" if thin > SLOW_RATE else f"{late:.1f} times later"
                found.append(warn("slow", f"{link.describe()}, {what} than the best {kind}", fix))
    if len(slow) > 1:
        for rank in set.intersection(*(set(link.ranks) for link in slow)):
            found.append(warn("rank", f"{rank} is at one end of all that are slow", fix))
    return found


def run(num_gpus: str | None, script: Path) -> int:
    """Measure as one of a launcher's processes, else start some here; the exit code."""
    process = current_process(os.environ)
    if process is None:
        count = requested_processes(num_gpus or "all", detect_machine(), {})
        if count == 1:
            what = "one process has no links"
            raise UserError(what, fix="type --num_gpus 2, or start with torchrun on the nodes")
        return run_ranks([str(script), "doctor", "--nodes"], count).exit_code
    with open_group() as group:
        links = measure_links(group.process.world_size, group.device)
    if process.rank == 0:
        print("\n".join(link.describe() for link in links))
        print(show(judge(links)))
    return 0
