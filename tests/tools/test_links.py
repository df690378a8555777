"""Test `doctor --nodes`: measurements and slow links."""

import dataclasses
import itertools
import re

import pytest

from distributed_training.tools.links import Link, describe
from tests.conftest import assert_ok, heavy_pool


def test_each_process_measures_the_link_to_the_next():
    result = heavy_pool().script(["doctor", "--nodes"], num_processes=3)
    assert_ok(result)
    summary, *links = result.stdout.splitlines()[:3]
    assert summary.startswith("2 links within a node. The best latency and bandwidth are ")
    found = [re.match(r"  rank (\d) \(\S+\) to (\d) \(\S+\): ([\d,]+) us, ([\d.e+]+) Gbit/s", line)
             for line in links]  # fmt: skip
    assert [(int(match[1]), int(match[2])) for match in found] == [(0, 1), (1, 2)]
    assert all(float(match[4]) > 0.01 for match in found)


FAST = Link(ends={0: "a", 1: "a"}, latency_s=30e-6, gbit_per_s=16.0)


@pytest.mark.parametrize("slower", [{"latency_s": 100e-6}, {"gbit_per_s": 4.0}])
def test_slow_links_are_marked(slower):
    """Links between nodes are compared only with each other."""
    links = [
        dataclasses.replace(FAST, ends=dict.fromkeys(ranks, "a"))
        for ranks in itertools.combinations(range(4), 2)
    ]
    links = [dataclasses.replace(link, **slower) if 2 in link.ends else link for link in links]
    between = Link(ends={0: "a", 1: "b"}, latency_s=90e-6, gbit_per_s=3.2)
    lines = describe([*links, between, between]).splitlines()
    assert [line.startswith("  rank") and "2 (a)" in line for line in lines] == [
        "slow" in line for line in lines
    ]
    assert sum("slow" in line for line in lines) == 3
