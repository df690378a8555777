"""Functions that run on the nodes of the multi-node tests. The process pool of tests/pool.py forks
one process per node, and each process then enters its node."""

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from distributed_training.start import rendezvous
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
    if os.environ["RANK"] == "1":  # without its network, this agent would wait for minutes
        signal.alarm(120)
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
    """Run the script. Rank 1 disconnects the second node in step 5."""
    original = Trainer._run_step
    switch, name = os.environ["UNPLUGS"].split()

    def update(self: Trainer) -> None:
        if self.step == 4 and self.topology.rank == 1:
            saved = self.plan.run_dir / "checkpoints" / "step-00000003"
            while not saved.is_dir():  # the checkpoint is written while training continues
                time.sleep(0.05)
            unplug(int(switch), name)
        original(self)

    Trainer._run_step = update
    run_script(*sys.argv[1:])


def launched_by(launcher: str, rank: str, world_size: str) -> dict[str, str]:
    """Return the environment variables that `launcher` sets for the process with this rank. There
    is one process per node."""
    torch_variables = {"RANK": rank, "WORLD_SIZE": world_size}
    return {
        "torchrun": {**torch_variables, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        "deepspeed": {**torch_variables, "LOCAL_RANK": "0", "LOCAL_SIZE": "1"},
        "srun": {
            "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": world_size, "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{world_size})",
        },
    }[launcher]  # fmt: skip


def on_each_node(job: dict[str, Any]) -> None:
    """Run the script on each node as the launcher job["launcher"] would start it.

    The job may contain these optional keys:

    - `missing`: the index of a node that does not start
    - `ends_at`: the step in which the process on the first node receives SIGTERM"""
    rendezvous.SHARED_FOLDER_TIMEOUT_S = 1.0
    rank = int(os.environ["RANK"])
    if rank == job.get("missing"):
        return
    enter_namespaces(job["nodes"][rank])
    launcher_variables = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(launched_by(job.get("launcher", "torchrun"), *launcher_variables.values()))
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
