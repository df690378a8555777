"""Test runs on several nodes, which are simulated by network namespaces. Each node resolves its
host name to loopback."""

import numpy as np
import pytest

from tests.conftest import SMALL, assert_ok, only_record, train
from tests.e2e.nodes import cluster
from tests.e2e.support import remaining_processes, run_case

VALUES = {**SMALL, "strategy": "dp", "num_samples": 48}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the loss curve of an uninterrupted single-process run with the same global batch size
    as the multi-node runs."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert_ok(train({**VALUES, "batch_size": 6, "output_dir": folder}))
    return only_record(folder)["loss_curve"]


@pytest.fixture
def nodes(tmp_path, request):
    with cluster(tmp_path, getattr(request, "param", 2)) as found:
        yield found


def run_on(nodes, values, case="on_each_node", **job):
    return run_case(f"node_cases:{case}", values, len(nodes), nodes=nodes, **job)


def test_one_of_two_nodes_continues_after_the_other_was_lost(nodes, tmp_path, unbroken):
    """The remaining node automatically continues from the last checkpoint with the same global
    batch."""
    values = {**VALUES, "batch_size": 3, "checkpoint_every": 3, "output_dir": tmp_path / "runs"}
    values["hang_timeout_s"] = 15
    said = run_on(nodes, values, "with_torchrun")
    assert "exit codes [0, -9]" in said
    for note in ("the run was restarted from step-00000003", "the global batch stays 6: "):
        assert f"note: {note}" in " ".join(said.split())
    assert remaining_processes(str(tmp_path / "runs")) == []
    record = only_record(tmp_path / "runs")
    assert (record["status"], record["world_size"]) == ("ok", 1)
    assert record["resumed_from"].endswith("step-00000003")
    np.testing.assert_allclose(record["loss_curve"], unbroken, rtol=0, atol=1e-4)


def test_machines_that_share_no_disk_are_refused_before_training(nodes):
    own = nodes[0].private_folder / "runs"
    said = run_on(nodes, {**VALUES, "output_dir": own})
    assert "exit codes [2, 2]" in said
    for word in ("rank 1 on node1", str(own), "output_dir"):
        assert said.count(word) >= 2
