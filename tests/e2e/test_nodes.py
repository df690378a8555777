"""Test runs on several nodes, which are simulated by network namespaces. Each node resolves its
host name to loopback."""

import shutil

import numpy as np
import pytest

from tests.conftest import SMALL, assert_ok, only_record, script, train
from tests.e2e.nodes import cluster
from tests.e2e.support import assert_refused, remaining_processes, run_case

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


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_without_a_shared_disk_each_node_saves_its_own_part(nodes, tmp_path, unbroken):
    own, values = nodes[0].private_folder / "runs", {**VALUES, "keep_best": True}
    both = {**values, "output_dir": own, "resume": "auto", "shared_disk": False}
    run_on(nodes, both, ends_at=5)
    folders = [node.outside(own) for node in nodes]
    parts = [sorted(file.name for file in folder.glob("*-*/checkpoints/*/*")) for folder in folders]
    expected = [["meta.json", f"rank-0000{rank}.safetensors"] for rank in range(3)]
    assert parts == expected

    together = tmp_path / "together"
    shutil.copytree(folders[0], together, symlinks=True)
    alone = {**values, "batch_size": 6, "output_dir": together, "resume": "auto"}
    assert_refused(script(alone), "rank-00001.safetensors", "node1, node2", "shared_disk=False")
    for folder in folders[1:]:
        shutil.copytree(folder, together, dirs_exist_ok=True)
    resumed = train(alone)
    assert_ok(resumed)
    assert "num_processes was 3 and is now 1" in " ".join(resumed.stdout.split())
    assert run_on(nodes, both) == ""
    for runs in (folders[0], together):
        record = only_record(runs)
        assert record["resumed_from"].endswith("step-00000005")
        np.testing.assert_allclose(record["loss_curve"], unbroken, rtol=0, atol=1e-4)
    exported = [{file.parent.name for file in runs.glob("*-*/*/config.json")} for runs in folders]
    assert exported == [{"best", "hf"}, set(), set()]


def test_machines_that_share_no_disk_are_refused_before_training(nodes):
    own = nodes[0].private_folder / "runs"
    said = run_on(nodes, {**VALUES, "output_dir": own})
    assert "exit codes [2, 2]" in said
    for word in ("rank 1 on node1", str(own), "output_dir", "shared_disk"):
        assert said.count(word) >= 2
