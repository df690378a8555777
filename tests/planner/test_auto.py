"""Test the choice of strategy "auto"."""

import pytest

from distributed_training.settings.config import AUTO
from tests.planner.helpers import plan_for
from tests.support import GPU_MACHINE


@pytest.mark.parametrize(
    "config", [{"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}, {"dp_replicate": 2}, {"num_microbatches": 2}]
)
def test_values_set_by_the_user_are_kept(config, tmp_path):
    planned = plan_for(tmp_path, GPU_MACHINE, 4, checked=False, model="gpt2", **config)
    assert planned.requested.strategy == AUTO
    given = {**planned.mesh, "num_microbatches": planned.batch.num_microbatches}
    assert {key: given[key] for key in config} == config
