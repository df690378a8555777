"""Run a soak test with one fault. tests/faults/soak.py injects hundreds of faults."""

from tests.faults.soak import soak


def test_random_faults_cost_no_more_than_the_steps_since_a_checkpoint():
    record = soak(seed=3, num_faults=1, strategies=("dp",), kinds=("not finite",), warm=True)
    assert record["failures"] == []
    assert record["num_faults"] >= 1
    assert 0 < record["goodput"] <= 1
    assert all(mission["bit_identical"] for mission in record["missions"])
