"""Test autograd's reaction to each way of changing weights while a graph is in flight."""

import pytest
from pipedream.train.traps import copy_into_data, replace_data, run_trap, step_optimizer


def test_replacing_data_acts_as_stashing_for_linear_layers_only() -> None:
    assert run_trap(replace_data, norm=False) == 0
    assert 0 < run_trap(replace_data, norm=True) < 1


@pytest.mark.parametrize("norm", [False, True])
def test_optimizer_step_raises_and_copying_into_data_is_silently_wrong(norm) -> None:
    assert "modified by an inplace operation" in run_trap(step_optimizer, norm=norm)
    assert 1e-3 < run_trap(copy_into_data, norm=norm) < 1
