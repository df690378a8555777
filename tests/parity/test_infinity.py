"""infinity's state is saved from its files and restored into them as any other's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed_training.advise.checks import has_libaio
from results.lab.faults.resharding import LAYOUTS, LOSS_TOLERANCE, WEIGHT_TOLERANCE, reshard
from tests.parity.support import DEEP, cut, run_cases, small_infinity

WIDE = {**DEEP, "model": "four-wide-layers"}
NAME = "infinity x 2"
pytestmark = pytest.mark.skipif(not has_libaio(), reason="libaio is not installed")


@pytest.fixture
def infinity(tmp_path):
    """Of the three groups of WIDE one lies on the disk; the others are too small for files."""
    small = small_infinity(sub_group_size=2**18)
    return {**small, **cut(1), "offload_dir": str(tmp_path / "files")}


def moments_on_disk(tmp_path: Path) -> int:
    return len(list((tmp_path / "files").rglob("rank0/exp_avg_sq-*.swp")))


def test_a_resumed_run_goes_on_bit_for_bit(infinity, tmp_path):
    both = run_cases({NAME: {**WIDE, **infinity}}, 2, what="resume")[NAME]
    assert moments_on_disk(tmp_path) > 0
    for key, weight in both["straight"].items():
        assert torch.equal(weight, both["resumed"][key]), key


def test_a_run_goes_on_from_files_and_to_files(infinity, tmp_path, monkeypatch):
    monkeypatch.setitem(LAYOUTS, NAME, infinity)
    for pair, far in reshard([(NAME, "fsdp x 2"), ("fsdp x 2", NAME)], tmp_path, WIDE).items():
        assert far["loss"] <= LOSS_TOLERANCE, pair
        assert far["weight"] <= WEIGHT_TOLERANCE, pair
    assert moments_on_disk(tmp_path) > 0
