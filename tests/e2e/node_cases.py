"""Functions that run on the nodes of the multi-node tests. The process pool of tests/pool.py forks
one process per node, and each process then enters its node."""

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from distributed_training.train.loop import Trainer
from tests.e2e.nodes import Node, unplug
from tests.pool import run_script


def enter_namespaces(node: Node) -> None:
    """Move this process into the node's namespaces. The process must have only one thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptors = [
        os.open(f"/proc/{node.pid}/ns/{name}", os.O_RDONLY) for name in ("net", "uts", "mnt")
    ]
    for descriptor in descriptors:
        assert libc.setns(descriptor, 0) == 0, os.strerror(ctypes.get_errno())
    os.environ.update(TMPDIR=str(node.private_folder), HOME=str(node.private_folder))


def with_torchrun(job: dict[str, Any]) -> None:
    """Run torchrun's agent on the node whose index is this process's rank. The agent starts
    `_run_and_unplug`. If the other agent does not rejoin, this agent continues alone."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    enter_namespaces(job["nodes"][int(os.environ["RANK"])])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name)
    os.environ["UNPLUGS"] = f"{job['nodes'][1].switch} {job['nodes'][1].name}"
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    original = DynamicRendezvousHandler.next_rendezvous

    def next_rendezvous(self: DynamicRendezvousHandler) -> Any:
        result = original(self)
        # Only the first rendezvous waits long for the other agent.
        self.settings.timeout._last_call = timedelta(seconds=1)
        return result

    DynamicRendezvousHandler.next_rendezvous = next_rendezvous
    limits = "join_timeout=120,last_call_timeout=120,keep_alive_interval=2"
    rendezvous = [
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=node0:29500",
        "--rdzv_id=7",
        f"--rdzv_conf={limits}",
    ]
    elastic = ["--nnodes=1:2", "--max_restarts=1", "--nproc_per_node=1"]
    torchrun.main([*rendezvous, *elastic, __file__, *job["arguments"]])


def _run_and_unplug() -> None:
    """Run the script. Rank 1 disconnects the second node in step 5, and then kills its agent and
    itself. The first node learns of it only by the missing messages."""
    original = Trainer._run_step
    switch, name = os.environ["UNPLUGS"].split()

    def update(self: Trainer) -> None:
        if self.step == 4 and self.topology.rank == 1:
            saved = self.plan.run_dir / "checkpoints" / "step-00000003"
            while not saved.is_dir():  # the checkpoint is written while training continues
                time.sleep(0.05)
            unplug(int(switch), name)
            for process in (os.getppid(), os.getpid()):
                os.kill(process, signal.SIGKILL)
        original(self)

    Trainer._run_step = update
    run_script(*sys.argv[1:])


def on_each_node(job: dict[str, Any]) -> None:
    """Run the script on each node as srun would start it. If the job contains `ends_at`, the
    process on the first node receives SIGTERM in this step."""
    rank = int(os.environ["RANK"])
    enter_namespaces(job["nodes"][rank])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    num_nodes = len(job["nodes"])
    os.environ.update(SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS=str(num_nodes))
    os.environ.update(SLURM_LOCALID="0", SLURM_STEP_TASKS_PER_NODE=f"1(x{num_nodes})")
    os.environ["MASTER_ADDR"] = job["nodes"][0].name
    original = Trainer._run_step

    def update(self: Trainer) -> None:
        if rank == 0 and self.step + 1 == job.get("ends_at"):
            os.kill(os.getpid(), signal.SIGTERM)
        original(self)

    Trainer._run_step = update
    run_script(*job["arguments"])


if __name__ == "__main__":
    _run_and_unplug()
