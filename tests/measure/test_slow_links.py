"""Times over slow links: which of them are published, and that the published table is the runs'."""

from __future__ import annotations

import pytest

from distributed_training.measure.slow_links import summarise


def test_only_steps_that_the_link_takes_most_of_are_told():
    """8 Mbit/s are 1 MB/s."""
    full = {"round_s": [1.5, 1.25, 3.0], "counted_bytes": 1_000_000}
    busy = {"round_s": [1.5, 1.25, 3.0], "counted_bytes": 100_000}
    rows = summarise({"8": {"much": full, "little": busy}, "0.8": {"much": full, "little": busy}})
    assert rows["much"]["KiB a step"] == pytest.approx(976.5625)
    assert (rows["much"]["s at 8 Mbit/s"], rows["much"]["link's share at 8"]) == (1.25, 0.8)
    assert rows["little"]["s at 8 Mbit/s"] is rows["little"]["link's share at 8"] is None
    assert rows["little"]["link's share at 0.8"] == pytest.approx(0.8)
