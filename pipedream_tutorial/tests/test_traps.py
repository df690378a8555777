"""The ways of changing weights in flight, and what autograd makes of each."""

import pytest
from pipedream.train.traps import copy_into_data, replace_data, run_trap, stage, step_optimizer


def test_new_memory_is_stashing_by_accident_and_for_linear_layers_only() -> None:
    assert run_trap(stage(norm=False), replace_data) == 0
    assert 0 < run_trap(stage(norm=True), replace_data) < 1


@pytest.mark.parametrize("norm", [False, True])
def test_a_step_is_refused_and_a_copy_is_silently_wrong(norm) -> None:
    assert "modified by an inplace operation" in run_trap(stage(norm=norm), step_optimizer)
    assert 1e-3 < run_trap(stage(norm=norm), copy_into_data) < 1
