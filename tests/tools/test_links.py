"""Test `links` and `doctor --nodes`: the fit of latency and bandwidth, the ring formula,
measurements and slow links."""

import argparse
import dataclasses
import itertools
import json
import re

import pytest

from distributed_training.predict.mechanism import RING_TURNS, sent_bytes
from distributed_training.tools.links import (
    Link,
    choose_pairs,
    describe,
    fit_line,
    mesh_of,
    summarize,
)
from tests.conftest import assert_ok, heavy_pool, light_pool
from tests.support import refused


@pytest.mark.parametrize(
    ("points", "latency"),
    [
        ([(10, 1.0), (1000, 1.0)], 1.0),  # no slope
        ([(10, 2.0), (1000, 1.0)], 1.2),  # the larger message is faster
        ([(10, 1e-3), (1000, 1.0)], 0.0),  # the smaller message is far faster
    ],
)
def test_neither_latency_nor_rate_is_below_zero(points, latency):
    fitted_latency, rate, _ = fit_line(points)
    assert fitted_latency == pytest.approx(latency)
    assert rate > 0


def test_fitted_links_reproduce_the_times_of_the_ring_formula():
    """Simulate four processes whose links have a latency of 1e-5 s and a bandwidth of 1 GB/s."""
    messages = dict.fromkeys(RING_TURNS, 3) | {"all_reduce": 6, "send": 1}
    entries = []
    for size in (2**12, 2**20, 2**26):
        seconds = {
            kind: 1e-5 * steps + sent_bytes(kind, size, 4) / 1e9 for kind, steps in messages.items()
        }
        entries.append({"members": 4, "bytes": size, "seconds": seconds})
    summary = summarize(entries)
    for kind, row in summary.items():
        for point in row["points"]:
            assert point["seconds"] == pytest.approx(point["ring_s"])
            assert point["seconds"] == pytest.approx(point["fitted_s"])
        assert row["bytes_per_s"] == pytest.approx(1e9)
        assert row["latency_s"] == pytest.approx(1e-5 * messages[kind])
    last = summary["all_reduce"]["points"][-1]
    assert last["bus_bytes_per_s"] == pytest.approx(1.5 * last["algorithm_bytes_per_s"])


def test_four_processes_measure_every_group_of_their_mesh(tmp_path):
    arguments = ["links", "--largest", "1", "--tp", "2", "--seconds", "0", "--out", tmp_path]
    shown = heavy_pool().script(arguments, num_processes=4)
    assert shown.returncode == 0, shown.stderr
    record = json.loads((tmp_path / "links.json").read_text())
    assert record["mesh"] == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "tp": 2}
    assert {axis: row["members"] for axis, row in record["groups"].items()} == {
        "dp_replicate": 2, "tp": 2, "all": 4,
    }  # fmt: skip
    for group in record["groups"].values():
        assert set(group["operations"]) == set(RING_TURNS)
        for row in group["operations"].values():
            assert [point["bytes"] for point in row["points"]] == [4**n for n in range(5, 11)]
            assert all(point["seconds"] > 0 for point in row["points"])
    *lines, _path = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert (tmp_path / "links.png").stat().st_size > 10_000


def test_invalid_arguments_are_refused():
    for typed in (("--num_gpus", "1"), ("--largest", "0")):
        shown = light_pool().script(["links", *typed])
        assert (shown.returncode, shown.stderr.count("\n")) == (2, 1), shown.stderr
    with refused("does not fit 3 processes"):
        mesh_of(argparse.Namespace(pp=1, dp_shard=1, tp=2), 3)


def test_few_processes_measure_every_pair_and_many_measure_a_chain():
    result = heavy_pool().script(["doctor", "--nodes"], num_processes=3)
    assert_ok(result)
    summary, *links = result.stdout.splitlines()[:4]
    assert summary.startswith("3 links within a node. The best latency and bandwidth are ")
    found = [re.match(r"  rank (\d) \(\S+\) to (\d) \(\S+\): ([\d,]+) us, ([\d.]+) GB/s", line)
             for line in links]  # fmt: skip
    assert [(int(match[1]), int(match[2])) for match in found] == [(0, 1), (0, 2), (1, 2)]
    assert all(float(match[4]) > 0.01 for match in found)
    assert choose_pairs(16) == list(itertools.pairwise(range(16)))


FAST = Link(ends={0: "a", 1: "a"}, latency_s=30e-6, bytes_per_s=2e9)


@pytest.mark.parametrize(
    ("slower", "words"),
    [
        ({"latency_s": 100e-6}, "3.3 times the latency"),
        ({"bytes_per_s": 0.5e9}, "slow: the best link has 4.0 times the bandwidth"),
    ],
)
def test_the_slow_rank_is_named(slower, words):
    """A rank whose links are all slow is named. Links between nodes are compared only with each
    other. They are not reported as slow just because links within a node are faster."""
    links = [dataclasses.replace(FAST, ends=dict.fromkeys(ranks, "a")) for ranks in choose_pairs(4)]
    links = [dataclasses.replace(link, **slower) if 2 in link.ends else link for link in links]
    between = Link(ends={0: "a", 1: "b"}, latency_s=90e-6, bytes_per_s=0.4e9)
    *lines, named = describe([*links, between, between]).splitlines()
    assert [line.startswith("  rank") and "2 (a)" in line for line in lines] == [
        words in line for line in lines
    ]
    assert sum("slow" in line for line in lines) == 3
    assert named.startswith("All slow links end at rank 2. ")
