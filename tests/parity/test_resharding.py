"""Test that runs continue with unchanged results under a different strategy and number of
processes."""

import itertools

import pytest

from distributed_training.planner.checks import has_libaio
from tests.parity import test_preference as preference
from tests.parity.support import (
    DEEP,
    MODELS,
    assert_resumes,
    mesh,
    micro_batches,
    reference,
    run_cases,
    small_infinity,
)

# This model is deep enough for two stages on each of four processes, and its embedding has padding.
EIGHT_LAYERS = {**DEEP, "model": str(MODELS / "eight-layers-2050")}
LORA = {
    **DEEP, "model": str(MODELS / "qwen3-eight-wide-layers-2050"), "lora_rank": 4,
    "lora_alpha": 8.0, "learning_rate": 1e-2,
}  # fmt: skip
NUM_STEPS = 4  # each run is saved after half of these steps
LOSS_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-3
LOCAL = {"strategy": "local_sgd", "local_steps": 1, **micro_batches(1)}
ZB_V = {"pipeline_schedule": "zb-v"}
# Name -> CONFIG. A name ends in the number of processes. These layouts shard state in different
# ways: by ranges of elements, rows, columns or layers.
LAYOUTS = {
    "zero2 x 2": {"strategy": "zero2", **micro_batches(1)},
    "zero3 x 2": {"strategy": "zero3", **micro_batches(1)},
    "offload x 2": {"strategy": "offload", **micro_batches(1)},
    "fsdp x 2": {"strategy": "fsdp", **micro_batches(1)},
    "tp x 2": {**mesh(tp=2), **micro_batches(1)},
    "hybrid x 2": {"strategy": "hybrid", **micro_batches(2)},
    "3d-tp-pp x 4": {**mesh(tp=2, pp=2), **micro_batches(4), "pipeline_schedule": "1f1b"},
    "3d-shard-tp x 4": {**mesh(dp_shard=2, tp=2), **micro_batches(1)},
    "3d-shard-pp-zb-v x 4": {**mesh(dp_shard=2, pp=2), **micro_batches(4), **ZB_V},
    "local_sgd x 2": LOCAL,
    "local_sgd x 4": LOCAL,
}
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


def run_layouts(cases, function):
    """Return the results of {name: (layout, CONFIG values)}."""
    results = {}
    ordered = sorted(cases, key=lambda name: cases[name][0][-1])
    for count, names in itertools.groupby(ordered, lambda name: cases[name][0][-1]):
        values = {name: {**cases[name][1], **LAYOUTS[cases[name][0]]} for name in names}
        results |= run_cases(values, int(count), function=function, steps=NUM_STEPS)
    return results


def assert_goes_on(pairs, folder, work):
    """For each pair of layouts, save a run under the first layout and resume it under the second.
    Check that the results match an uninterrupted single-process run."""
    first = {
        name: (name, {**work, "output_dir": str(folder / name.replace(" ", ""))})
        for name, _ in pairs
    }
    runs = run_layouts(first, "save_halfway")
    second = {pair: (pair[1], {**work, "resume": runs[pair[0]]}) for pair in pairs}
    expected = reference(work, steps=NUM_STEPS)
    for pair, found in run_layouts(second, "continue_training").items():
        losses = expected["losses"][NUM_STEPS // 2 :]
        assert found["losses"] == pytest.approx(losses, rel=LOSS_TOLERANCE), pair
        assert found["state"].keys() == expected["state"].keys()
        for name, weight in expected["state"].items():
            error = (found["state"][name] - weight).norm() / weight.norm().clamp(min=1e-9)
            assert error <= WEIGHT_TOLERANCE, (pair, name)


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
    monkeypatch.setitem(LAYOUTS, "infinity x 2", infinity)
    pairs = [("infinity x 2", "fsdp x 2"), ("fsdp x 2", "infinity x 2")]
    assert_goes_on(pairs, tmp_path, wide)
    assert any(files.rglob("rank0/exp_avg_sq-*.swp"))
