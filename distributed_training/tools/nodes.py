"""`doctor --nodes`: latency and bandwidth between processes, and which link is slow.

    python real_model_example.py doctor --nodes --num_gpus 4
    torchrun --nnodes=2 --nproc_per_node=8 ... real_model_example.py doctor --nodes

Two processes at a time send each other a tensor while the others wait: every pair of up to
MOST_FOR_PAIRS processes, of more each with the next.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from distributed_training.parallel.agree import gather
from distributed_training.records.record import plural
from distributed_training.tools.links import time_group
from distributed_training.tools.measuring import Clock, Group, open_group

MOST_FOR_PAIRS = 8
ROUNDS = 3  # of which the quickest counts: other programs only make it slower
ROUND_S = 0.02
SIZES = {"cuda": (8, 2**26), "cpu": (8, 2**22)}  # bytes, for latency and for bandwidth
# By how much a link is worse than the best of its kind before it is called slow.
SLOW_LATENCY = 3.0
SLOW_RATE = 2.0
FIX = "leave its host out, or see what else uses it: top, nvidia-smi, ethtool"


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


def pairs(world_size: int) -> list[tuple[int, int]]:
    """The ranks whose link is measured."""
    if world_size <= MOST_FOR_PAIRS:
        return list(itertools.combinations(range(world_size), 2))
    return list(itertools.pairwise(range(world_size)))


def measure_links(group: Group) -> list[Link]:
    """All links, on every rank. Collective."""
    hosts = gather(platform.node())
    clock = Clock(group.device, budget_s=ROUND_S)
    sizes = SIZES[group.device.type]
    found = []
    for ranks in pairs(group.process.world_size):
        rounds = [time_group(clock, None, sizes, ("send",), ranks) for _ in range(ROUNDS)]
        latency, seconds = (
            min(entry["seconds"]["send"] for entry in entries)
            for entries in zip(*rounds, strict=True)
        )
        ends = (hosts[ranks[0]], hosts[ranks[1]])
        rate = sizes[1] / seconds
        found.append(Link(ranks=ranks, hosts=ends, latency_s=latency, bytes_per_s=rate))
    return found


def describe(links: Sequence[Link]) -> str:
    """The links by kind, and what is slow among its kind."""
    lines = []
    slow = []
    for kind in dict.fromkeys(link.kind for link in links):
        alike = [link for link in links if link.kind == kind]
        latency = min(link.latency_s for link in alike)
        rate = max(link.bytes_per_s for link in alike)
        best = f"{1e6 * latency:,.0f} us, {rate / 1e9:.2f} GB/s"
        lines.append(f"{plural(len(alike), 'link')} {kind}, at best {best}")
        for link in alike:
            ends = zip(link.ranks, link.hosts, strict=True)
            both = " - ".join(f"{rank} ({host})" for rank, host in ends)
            found = f"{1e6 * link.latency_s:,.0f} us, {link.bytes_per_s / 1e9:.2f} GB/s"
            late = link.latency_s / latency
            thin = rate / link.bytes_per_s
            if thin > SLOW_RATE:
                found += f", slow: {thin:.1f} times less than the best"
            elif late > SLOW_LATENCY:
                found += f", slow: {late:.1f} times later than the best"
            if "slow" in found:
                slow.append(set(link.ranks))
            lines.append(f"  rank {both}: {found}")
    common = set.intersection(*slow) if slow else ()
    if common:
        ranks = " and ".join(map(str, sorted(common)))
        lines.append(f"all slow links end at rank {ranks}: {FIX}")
    return "\n".join(lines)


def main() -> int:
    """This process's part; the exit code."""
    with open_group() as group:
        links = measure_links(group)
    if group.process.rank == 0:
        print(describe(links))
    return 0
