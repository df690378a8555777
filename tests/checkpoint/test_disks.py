"""Test checkpointing on two nodes without a shared disk. Two processes with separate run folders
simulate the nodes."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from distributed_training.checkpoint import saver
from distributed_training.parallel.agree import gather
from distributed_training.parallel.mesh import Topology
from distributed_training.records.folder import list_checkpoints
from distributed_training.records.record import OWNER_FILE, write_json
from distributed_training.settings.errors import UserError
from distributed_training.start import rendezvous
from distributed_training.supervise.process import Process
from tests.checkpoint.test_checkpoint import FakeEngine, plan_of
from tests.conftest import heavy_pool
from tests.support import save_now

FILES = ["rank-00000.safetensors", "rank-00001.safetensors"]


def on_two_nodes(folder):
    """Save four checkpoints, with a failure during the third. Then check the disks in several
    cases, such as a missing or damaged file. Return one dictionary per rank. Each dictionary maps
    the cases to the steps of the rank's checkpoints, or to error messages."""
    dist.init_process_group("gloo")
    rank, steps_by_case = dist.get_rank(), {}
    topology = Topology(
        world_size=2, rank=rank, local_rank=0, dp_replicate=2, dp_shard=1, device_type="cpu"
    )
    plan = plan_of(folder / f"node{rank}", keep=1)
    plan.has_node_local_files = True

    def save(step):
        engine = FakeEngine(step)
        save_now(engine, plan, topology, step=step, data_fingerprint="tokens")

    def steps(case):
        steps_by_case[case] = [
            int(checkpoint.name[-1]) for checkpoint in list_checkpoints(plan.run_dir)
        ]

    def refusal(case, **changes):
        changed = SimpleNamespace(**{**vars(plan), **changes})
        steps_by_case[case] = None
        process = Process(rank=rank, world_size=2, local_rank=0, local_world_size=1)
        try:
            rendezvous.check_disks(changed, process, gather)
        except UserError as error:
            steps_by_case[case] = str(error)

    save(1)
    save(2)
    steps("saved")
    right = saver.publish

    def publish(*arguments):
        if rank == 0:
            raise OSError("No space left on device")
        right(*arguments)

    saver.publish = publish
    with pytest.raises(OSError, match="No space left"):
        save(3)
    saver.publish = right
    steps("one failed")
    save(4)
    steps("saved again")
    plan.checkpoint = list_checkpoints(plan.run_dir)[-1]
    rendezvous.run_dir.write_plan = lambda plan: None
    rendezvous.claims.claim = lambda *_: None  # each case would claim the folder again
    refusal("nothing")
    shared = folder / "shared"
    shared.mkdir(exist_ok=True)
    write_json(shared / OWNER_FILE, {"host": "node0", "run_id": plan.run_id})
    refusal("one folder", run_dir=shared, checkpoint=None)
    file = plan.checkpoint / FILES[rank]
    content = file.read_bytes()
    if rank == 1:
        file.unlink()
    refusal("missing")
    file.write_bytes(content[:-1] + b"?" if rank == 1 else content)
    refusal("damaged")
    file.write_bytes(content)
    steps_by_case = gather(steps_by_case)
    dist.destroy_process_group()
    return steps_by_case


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    return heavy_pool().call(f"{__name__}:on_two_nodes", folder, num_processes=2)


def test_the_first_node_publishes_a_checkpoint_last(two_nodes):
    """The first node is the last to publish a checkpoint. Only then do other nodes delete old
    checkpoints."""
    first, second = two_nodes
    assert first["saved"] == second["saved"] == [2]
    assert (first["one failed"], second["one failed"]) == ([2], [2, 3])
    assert first["saved again"] == second["saved again"] == [4]


def test_errors_on_one_node_are_reported_to_every_rank(two_nodes):
    first, second = two_nodes
    assert first["nothing"] is None
    for case, words in {
        "one folder": "with another node",
        "missing": "such as rank-00001.safetensors, of the nodes",
        "damaged": "is damaged. rank-00001.safetensors has changed",
    }.items():
        assert words in first[case] == second[case]
