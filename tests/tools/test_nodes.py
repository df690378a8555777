"""`doctor --nodes`: measured links, and which of them is called slow."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from distributed_training.tools.nodes import Link, describe, pairs
from tests.conftest import assert_ok, heavy_pool

QUICK = Link(ranks=(0, 1), hosts=("a", "a"), latency_s=30e-6, bytes_per_s=2e9)


def test_every_pair_of_three_processes_is_measured():
    result = heavy_pool().script(["doctor", "--nodes"], num_processes=3)
    assert_ok(result)
    summary, *links = result.stdout.splitlines()[:4]
    assert summary.startswith("3 links in a node, at best ")
    found = [re.match(r"  rank (\d) \(\S+\) - (\d) \(\S+\): ([\d,]+) us, ([\d.]+) GB/s", line)
             for line in links]  # fmt: skip
    assert [(int(match[1]), int(match[2])) for match in found] == [(0, 1), (0, 2), (1, 2)]
    assert all(float(match[4]) > 0.01 for match in found)


def test_many_processes_are_measured_in_a_chain():
    assert pairs(3) == [(0, 1), (0, 2), (1, 2)]
    assert pairs(16) == list(itertools.pairwise(range(16)))


@pytest.mark.parametrize(
    ("slower", "words"),
    [({"latency_s": 100e-6}, "3.3 times later"), ({"bytes_per_s": 0.5e9}, "4.0 times less")],
)
def test_the_slow_rank_is_named(slower, words):
    """Links between nodes are compared with each other."""
    links = [dataclasses.replace(QUICK, ranks=ranks) for ranks in pairs(4)]
    links = [dataclasses.replace(each, **slower) if 2 in each.ranks else each for each in links]
    between = dataclasses.replace(QUICK, hosts=("a", "b"), latency_s=90e-6, bytes_per_s=0.4e9)
    *lines, named = describe([*links, between, between]).splitlines()
    assert [line.startswith("  rank") and "2 (a)" in line for line in lines] == [
        words in line for line in lines
    ]
    assert sum("slow" in line for line in lines) == 3
    assert named.startswith("all slow links end at rank 2: ")
