"""A run goes on under another strategy and number of processes as if nothing had happened."""

from __future__ import annotations

from results.lab.faults.resharding import LOSS_TOLERANCE, WEIGHT_TOLERANCE, reshard

# Where state is divided in other ways: ranges of elements, rows, columns, layers.
PAIRS = [
    ("zero2 x 2", "3d-shard-tp x 4"),
    ("3d-tp-pp x 4", "zero3 x 2"),
    ("hybrid x 2", "3d-shard-pp-zb-v x 4"),
    ("3d-tp-pp x 4", "offload x 2"),
    ("local_sgd x 2", "local_sgd x 4"),
]


def test_another_layout_goes_on_as_one_process_that_was_never_stopped(tmp_path):
    for pair, far in reshard(PAIRS, tmp_path).items():
        assert far["loss"] <= LOSS_TOLERANCE, pair
        assert far["weight"] <= WEIGHT_TOLERANCE, pair
