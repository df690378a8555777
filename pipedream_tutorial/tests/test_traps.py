"""Test autograd's reaction to each way of changing weights while a graph is in flight."""

import pytest
from pipedream.train.traps import copy_into_data, replace_data, run_trap, step_optimizer


def test_new_memory_is_stashing_by_accident_and_for_linear_layers_only() -> None:
    assert run_trap(replace_data, norm=False) == 0
    assert 0 < run_trap(replace_data, norm=True) < 1


@pytest.mark.parametrize("norm", [False, True])
def test_a_step_is_refused_and_a_copy_is_silently_wrong(norm) -> None:
    assert "modified by an inplace operation" in run_trap(step_optimizer, norm=norm)
    assert 1e-3 < run_trap(copy_into_data, norm=norm) < 1
