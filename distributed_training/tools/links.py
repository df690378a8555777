"""Measure communication between processes. `doctor --nodes` measures single links,
`plan --calibrate` collectives, and results/lab/links.py both."""

import contextlib
import itertools
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True, kw_only=True, slots=True)
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


def time_group(
    group: Group,
    members: Any,
    sizes: Iterable[int],
    operations: Iterable[str],
    ranks: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Time operations over a process group. `sizes` contains the sizes of the whole tensor in
    bytes. Return one entry per size, with the time of each operation in seconds on the slowest
    process.

    `members` is a torch process group. If it is None, all processes are members. `ranks` defaults
    to the ranks of the group. The send operation uses the first two of `ranks`. All ranks must call
    this function."""
    ranks = ranks or dist.get_process_group_ranks(members or dist.group.WORLD)

    def ping_pong(tensor: torch.Tensor) -> None:
        if dist.get_rank() == ranks[0]:
            dist.send(tensor, ranks[1], group=members)
            dist.recv(tensor, ranks[1], group=members)
        elif dist.get_rank() == ranks[1]:
            dist.recv(tensor, ranks[0], group=members)
            dist.send(tensor, ranks[0], group=members)

    entries = []
    for num_bytes in sizes:
        tensor = torch.zeros(num_bytes // 4, device=group.device)
        shard = torch.zeros(num_bytes // 4 // len(ranks), device=group.device)
        divisible = tensor[: shard.numel() * len(ranks)]
        output = torch.zeros_like(divisible)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, tensor, group=members),
            "all_gather": partial(dist.all_gather_into_tensor, divisible, shard, group=members),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, shard, divisible, group=members),
            "broadcast": partial(dist.broadcast, tensor, ranks[0], group=members),
            "all_to_all": partial(dist.all_to_all_single, output, divisible, group=members),
            "send": partial(ping_pong, tensor),
        }
        by_rank = gather({name: group.time_call(calls[name]) for name in operations})
        seconds = {name: max(rank_seconds[name] for rank_seconds in by_rank) for name in operations}
        if "send" in seconds:
            seconds["send"] /= 2  # `ping_pong` sends the tensor twice
        entries.append({"members": len(ranks), "bytes": num_bytes, "seconds": seconds})
    return entries


def check_nodes() -> int:
    """Measure the link between each process and the next, for `doctor --nodes`. Rank 0 prints one
    line per link. Return the exit code. All ranks must call this function."""
    lines = []
    network = []  # Gbit/s of the links between nodes
    with open_group(budget_s=0.02) as group:
        hosts = gather(platform.node())
        small, large = SIZES[group.device.type]
        for ends in itertools.pairwise(range(group.process.world_size)):
            entries = time_group(group, None, (small, large) * ROUNDS, ("send",), ends)
            latency, seconds = (
                min(entry["seconds"]["send"] for entry in entries if entry["bytes"] == size)
                for size in (small, large)
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
