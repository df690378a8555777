"""Measure the links between processes, for `doctor --nodes`. `plan --calibrate` and the programs in
results/lab/ measure in the groups of this module."""

import contextlib
import itertools
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from distributed_training.parallel.agree import gather
from distributed_training.parallel.mesh import process_group
from distributed_training.settings.config import RENDEZVOUS_S
from distributed_training.start import launch, worker
from distributed_training.start.ranks import current_process, single_process
from distributed_training.supervise.process import Process

BUDGET_S = 0.15  # seconds per measurement
ROUNDS = 3  # the fastest round counts, because other programs can only slow a link down
SIZES = {"cuda": (8, 2**26), "cpu": (8, 2**22)}  # bytes: one size for latency, one for bandwidth


@dataclass(frozen=True, kw_only=True)
class Group:
    """Process group for measurements, and this process's rank in the group."""

    process: Process
    device: torch.device
    budget_s: float = BUDGET_S  # seconds per measurement
    synchronized: bool = True  # whether all processes make the same calls the same number of times

    def time_call(self, call: Callable[[], Any]) -> float:
        """Return the mean time per call in seconds, over as many calls as the budget allows (3 to
        200)."""
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        call()
        # `timeit` makes an extra call before the one that it times.
        single_call_s = torch.tensor(timer.timeit(1).mean, dtype=torch.float64)
        if self.synchronized:
            dist.all_reduce(single_call_s, op=dist.ReduceOp.MAX)
        return timer.timeit(max(3, min(200, int(self.budget_s / float(single_call_s))))).mean


@contextlib.contextmanager
def open_group(budget_s: float = BUDGET_S) -> Iterator[Group]:
    """Join the process group that the launcher describes. Without a launcher, create a group that
    contains only this process."""
    process = current_process() or single_process()
    launch.prepare_environment(process.local_world_size)
    device = worker.prepare_device(torch.cuda.device_count(), process)
    store = worker.open_store(process, RENDEZVOUS_S)
    # The limit is only three minutes, because another rank may have failed.
    with process_group(device, store, timeout_s=180):
        yield Group(process=process, device=device, budget_s=budget_s)


def time_send(group: Group, ends: Sequence[int], num_bytes: int, members: Any = None) -> float:
    """Return the time in seconds to send a tensor of `num_bytes` from one of the ranks `ends` to
    the other, on the slowest process. `members` is the process group that connects them. All ranks
    must call this function."""
    tensor = torch.zeros(num_bytes // 4, device=group.device)
    first, second = ends

    def ping_pong() -> None:
        if dist.get_rank() == first:
            dist.send(tensor, second, group=members)
            dist.recv(tensor, second, group=members)
        elif dist.get_rank() == second:
            dist.recv(tensor, first, group=members)
            dist.send(tensor, first, group=members)

    return max(gather(group.time_call(ping_pong))) / 2  # the tensor is sent twice


def check_nodes() -> int:
    """Measure the link between each process and the next, for `doctor --nodes`. Rank 0 prints one
    line per link. Return the exit code. All ranks must call this function."""
    lines = []
    network = []  # Gbit/s of the links between nodes
    with open_group(budget_s=0.02) as group:
        hosts = gather(platform.node())
        small, large = SIZES[group.device.type]
        for ends in itertools.pairwise(range(group.process.world_size)):
            latency, seconds = (
                min(time_send(group, ends, size) for _ in range(ROUNDS)) for size in (small, large)
            )
            gbit_per_s = 8 * large / seconds / 1e9
            first, second = (f"{rank} ({hosts[rank]})" for rank in ends)
            speed = f"{1e6 * latency:,.0f} us, {gbit_per_s:.3g} Gbit/s"
            lines.append(f"rank {first} to {second}: {speed}")
            if len({hosts[rank] for rank in ends}) > 1:
                network.append(gbit_per_s)
    if group.process.rank == 0:
        print("\n".join(lines))
        if network:  # The processes of a node may share its network connection.
            per_process = min(network) / max(Counter(hosts).values())
            print(f"For plan and --dry-run: --network_gbit {per_process:.3g}")
    return 0
