"""A run goes on under another strategy and number of processes as if nothing had happened."""

from __future__ import annotations

import os
import time

from results.lab.faults.resharding import LOSS_TOLERANCE, WEIGHT_TOLERANCE, draw_pairs, reshard

NUM_PAIRS = 4
# Where state is divided in other ways: ranges of elements, rows, columns, layers; twice the same.
ALWAYS = [("zero2 x 2", "3d-shard-tp x 4"), ("3d-tp-pp x 4", "zero3 x 2")]


def test_another_layout_goes_on_as_one_process_that_was_never_stopped(tmp_path):
    seed = int(os.environ.get("RESHARDING_SEED", time.time()))
    print(f"RESHARDING_SEED={seed}")
    pairs = [*ALWAYS, *(pair for pair in draw_pairs(NUM_PAIRS, seed) if pair not in ALWAYS)]
    for pair, far in reshard(pairs, tmp_path).items():
        assert far["loss"] <= LOSS_TOLERANCE, pair
        assert far["weight"] <= WEIGHT_TOLERANCE, pair
