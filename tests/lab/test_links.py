"""Test results/lab/links.py: the fit of latency and bandwidth, the ring formula, and the
measurement."""

import json

import pytest

from distributed_training.predict.mechanism import RING_TURNS, sent_bytes
from results.lab.links import summarize
from tests.conftest import ROOT, assert_ok, heavy_pool


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
    arguments = ["--largest", "1", "--tp", "2", "--calls", "1", "--out", tmp_path]
    shown = heavy_pool().script(arguments, num_processes=4, script=ROOT / "results/lab/links.py")
    assert_ok(shown)
    record = json.loads((tmp_path / "links.json").read_text())
    assert record["mesh"] == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "tp": 2}
    assert list(record["groups"]) == ["dp_replicate", "tp", "all"]
    for group in record["groups"].values():
        assert set(group["operations"]) == set(RING_TURNS)
        for row in group["operations"].values():
            assert all(point["seconds"] > 0 for point in row["points"])
