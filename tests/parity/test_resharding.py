"""Test that runs continue with unchanged results under a different strategy and number of
processes."""

import pytest

from distributed_training.planner.checks import has_libaio
from tests.faults import resharding
from tests.faults.resharding import EIGHT_LAYERS, LORA, LOSS_TOLERANCE, WEIGHT_TOLERANCE, reshard
from tests.parity import test_preference as preference
from tests.parity.support import DEEP, MODELS, assert_resumes, micro_batches, small_infinity

# These layouts shard state in different ways: by ranges of elements, rows, columns or layers.
# `python -m tests.faults.resharding` resumes every pair of layouts.
PAIRS = [
    ("zero2 x 2", "3d-shard-tp x 4"),
    ("3d-tp-pp x 4", "zero3 x 2"),
    ("hybrid x 2", "3d-shard-pp-zb-v x 4"),
    ("3d-shard-tp x 4", "offload x 2"),
    ("local_sgd x 2", "local_sgd x 4"),
]
# The resumed run computes the reference again, under its own layout and with its initial weights.
ANSWERS = {**EIGHT_LAYERS, **preference.PAIRS, "pack": True}
ANSWERS_PAIRS = [("3d-tp-pp x 4", "offload x 2")]


def assert_goes_on(pairs, folder, work):
    """For each pair of layouts, save a run under the first layout and resume it under the second.
    Check that the results match an uninterrupted single-process run."""
    for pair, far in reshard(pairs, folder, work).items():
        assert far["loss"] <= LOSS_TOLERANCE, pair
        assert far["weight"] <= WEIGHT_TOLERANCE, pair


@pytest.mark.parametrize(
    ("pairs", "work"),
    [(PAIRS, EIGHT_LAYERS), (PAIRS[:1], LORA), (ANSWERS_PAIRS, ANSWERS)],
    ids=["all", "lora", "answers"],
)
def test_a_run_resumed_under_another_layout_equals_one_process(pairs, work, tmp_path):
    assert_goes_on(pairs, tmp_path, work)


@pytest.mark.skipif(not has_libaio(), reason="libaio is not installed")
def test_infinitys_state_is_saved_from_its_files_and_restored_into_them(tmp_path, monkeypatch):
    """One of the model's three parameter groups is kept on disk. The other two groups are too small
    to be kept there."""
    files = tmp_path / "files"
    infinity = {
        **small_infinity(sub_group_size=2**18),
        **micro_batches(1),
        "offload_dir": str(files),
    }
    wide = {**DEEP, "model": str(MODELS / "four-wide-layers")}
    assert_resumes({"infinity": {**wide, **infinity}}, 2)
    assert any(files.rglob("rank0/exp_avg_sq-*.swp"))
    files = tmp_path / "of others"
    infinity["offload_dir"] = str(files)
    monkeypatch.setitem(resharding.LAYOUTS, "infinity x 2", infinity)
    pairs = [("infinity x 2", "fsdp x 2"), ("fsdp x 2", "infinity x 2")]
    assert_goes_on(pairs, tmp_path, wide)
    assert any(files.rglob("rank0/exp_avg_sq-*.swp"))
