"""Check that the nodes of a job reach each other, for `doctor --nodes`. The programs in results/lab
open their process group with this module."""

import contextlib
import platform
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from distributed_training.parallel.agree import gather
from distributed_training.parallel.mesh import process_group
from distributed_training.settings.config import RENDEZVOUS_S
from distributed_training.start import launch, worker
from distributed_training.start.ranks import current_process, single_process
from distributed_training.supervise.process import Process

NUM_BYTES = 2**25  # size of the tensor that each process sends
NUM_CALLS = 10  # number of exchanges that are timed


@contextlib.contextmanager
def open_group() -> Iterator[tuple[Process, torch.device]]:
    """Join the process group that the launcher describes. Without a launcher, create a group that
    contains only this process. Yield this process and its device."""
    process = current_process() or single_process()
    launch.prepare_environment(process.local_world_size)
    device = worker.prepare_device(torch.cuda.device_count(), process)
    store = worker.open_store(process, RENDEZVOUS_S)
    # The limit is only three minutes, because another rank may have failed.
    with process_group(device, store, timeout_s=180):
        yield process, device


def check_nodes() -> int:
    """Send a tensor from each process to its counterpart on the next node, or to the next process
    if there is only one node. All processes send at once, as they do in training, so the processes
    of a node share its network. Rank 0 prints the speed of the slowest link. Return the exit code.
    All ranks must call this function."""
    with open_group() as (process, device):
        rank = process.rank
        world_size = process.world_size
        has_network = world_size > process.local_world_size
        distance = process.local_world_size if has_network else 1
        receiver = (rank + distance) % world_size
        sender = (rank - distance) % world_size
        sent = torch.zeros(NUM_BYTES // 4, device=device)
        received = torch.empty_like(sent)

        def exchange() -> None:
            send = dist.P2POp(dist.isend, sent, receiver)
            receive = dist.P2POp(dist.irecv, received, sender)
            for request in dist.batch_isend_irecv([send, receive]):
                request.wait()

        # `timeit` first makes calls that it does not time. They connect the processes.
        seconds = Timer("call()", globals={"call": exchange}).timeit(NUM_CALLS).mean
        gbit_per_s = 8 * NUM_BYTES / seconds / 1e9
        host = platform.node()
        slowest, link = min(gather((gbit_per_s, f"rank {rank} ({host}) to rank {receiver}")))
    if rank == 0:
        print(f"The slowest of {world_size} links is {link}: {slowest:.3g} Gbit/s")
        if has_network:
            print(f"For plan and --dry-run: --network_gbit {slowest:.3g}")
    return 0
