"""Measure communication: six operations over every group of the mesh, or single links.

Each size is the size of the whole tensor, as in predict/mechanism.py. The algorithm bandwidth is
`size / seconds`. The bus bandwidth is `sent bytes / seconds`. Sent bytes are the bytes that each
process sends in a ring. The fit is `seconds = latency + sent bytes / bandwidth`. The fit minimizes
relative errors, so small messages count as much as large messages."""

import argparse
import contextlib
import itertools
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.benchmark import Timer

from distributed_training.parallel.agree import gather
from distributed_training.parallel.mesh import process_group
from distributed_training.plan.layout import format_axes
from distributed_training.predict.mechanism import RING_TURNS, sent_bytes
from distributed_training.records.display import format_duration, short_path
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.config import RENDEZVOUS_S
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import plural
from distributed_training.start import launch, worker
from distributed_training.start.ranks import current_process, single_process
from distributed_training.supervise.process import Process

BUDGET_S = 0.15  # seconds per measurement
LARGEST_MIB = {"cuda": 1024, "cpu": 16}
MAX_RANKS_FOR_PAIRS = 8  # with more processes, each is measured only with the next process
ROUNDS = 3  # the fastest round counts, because other programs can only slow a link down
SIZES = {"cuda": (8, 2**26), "cpu": (8, 2**22)}  # bytes: one size for latency, one for bandwidth
# A link is marked as slow if it is worse than the best of its type by more than this factor.
SLOW_LATENCY = 3.0
SLOW_RATE = 2.0
HEADERS = ("operation", "latency (us)", "GB/s", "fit error", "algorithm", "bus")
SLOW_RANK_FIX = (
    "Exclude its host, or look for other programs there with top, nvidia-smi and ethtool."
)


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
    launch.prepare_environment(process.local_world_size or process.world_size)
    process, device, store = worker.join(process, torch.cuda.device_count(), RENDEZVOUS_S)
    # The limit is only three minutes, because another rank may have failed.
    with process_group(device, store, timeout_minutes=3):
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


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Fit a line to points of (bytes, seconds) by minimizing the squared relative errors.

    Return (latency in seconds, bandwidth in bytes/s, root mean square of the relative errors).
    Neither the latency nor the seconds per byte can be negative."""
    sizes, seconds = np.array(points, dtype=float).T
    coefficients = np.polynomial.polynomial.polyfit(sizes, seconds, 1, w=1 / seconds)
    columns = np.stack([1 / seconds, sizes / seconds])  # a perfect fit predicts 1 for each point
    if coefficients.min() < 0:
        nonzero_index = int(coefficients.argmax())
        coefficients = np.zeros(2)
        coefficients[nonzero_index] = (
            columns[nonzero_index].sum() / np.square(columns[nonzero_index]).sum()
        )
    latency_s, s_per_byte = map(float, coefficients)
    error = math.sqrt(np.square(coefficients @ columns - 1).mean())
    return latency_s, 1 / s_per_byte if s_per_byte else math.inf, error


def summarize(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fit and the points for each operation in the entries from `time_group`.

    Each point contains the algorithm bandwidth, the bus bandwidth and `ring_s`. The value `ring_s`
    is the time that the messages in a ring would take at the measured latency and bandwidth of a
    single send."""
    members = entries[0]["members"]
    sizes = [entry["bytes"] for entry in entries]
    points_by_operation = {
        operation: [
            (sent_bytes(operation, entry["bytes"], members), entry["seconds"][operation])
            for entry in entries
        ]
        for operation in RING_TURNS
    }
    message_s, message_rate, _ = fit_line(points_by_operation["send"])
    summary = {}
    for operation, measured_points in points_by_operation.items():
        latency, rate, error = fit_line(measured_points)
        ring_s = max(1, RING_TURNS[operation] * (members - 1)) * message_s
        points = [
            {
                "bytes": size,
                "seconds": seconds,
                "fitted_s": latency + sent / rate,
                "ring_s": ring_s + sent / message_rate,
                "algorithm_bytes_per_s": size / seconds,
                "bus_bytes_per_s": sent / seconds,
            }
            for size, (sent, seconds) in zip(sizes, measured_points, strict=True)
        ]
        summary[operation] = {
            "points": points, "latency_s": latency, "bytes_per_s": rate, "fit_error": error,
        }  # fmt: skip
    return summary


def plot_times(groups: dict[str, Any], path: Path) -> None:
    """Plot seconds against size for each operation on logarithmic axes: measured points, the fit,
    and the formula for a ring."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    panels: Any = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, operation in zip(panels.flat, RING_TURNS, strict=True):
        for index, (axis, axis_group) in enumerate(groups.items()):
            points = axis_group["operations"][operation]["points"]
            curves: list[Any] = []
            for field, style in (("seconds", "o"), ("fitted_s", "-"), ("ring_s", ":")):
                curves += [[p["bytes"] for p in points], [p[field] for p in points], style]
            lines = axes.loglog(*curves, color=f"C{index}", markersize=4, linewidth=1.2)
            lines[0].set_label(f"{axis}, {axis_group['members']} processes")
        axes.set_title(operation.replace("_", "-"), fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("tensor size in bytes (points: measured; line: fit; dotted: ring formula)")
    figure.supylabel("seconds")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main(options: argparse.Namespace) -> int:
    """Measure every group of the mesh. Rank 0 writes and prints the results. Return the exit code.
    All ranks must call this function."""
    groups = {}  # axis -> its size and the `summarize` result of its slowest group
    with open_group(options.seconds) as group:
        process = group.process
        device_type = group.device.type
        axes = mesh_of(options, process.world_size)
        used_axes = {axis: size for axis, size in axes.items() if size > 1}
        mesh = init_device_mesh(
            device_type, tuple(used_axes.values()), mesh_dim_names=tuple(used_axes)
        )
        members: dict[str, Any] = {axis: mesh.get_group(axis) for axis in used_axes}
        if len(members) > 1:
            members["all"] = None
        largest = (options.largest or LARGEST_MIB[device_type]) * 2**20
        sizes = [4**power for power in range(5, 30) if 4**power <= largest]
        if process.rank == 0:
            num_figures = len(members) * len(sizes) * len(RING_TURNS)
            seconds = num_figures * group.budget_s
            print(f"{num_figures} measurements take {format_duration(seconds)}.", flush=True)
        for axis, axis_members in members.items():
            entries = time_group(group, axis_members, sizes, RING_TURNS)
            groups[axis] = {"members": entries[0]["members"], "operations": summarize(entries)}
    if process.rank > 0:
        return 0
    backend = "nccl" if device_type == "cuda" else "gloo"
    record = {
        "what": "time of each communication operation in seconds, on the slowest rank",
        **provenance("python real_model_example.py links"),
        "device": torch.cuda.get_device_name(group.device) if device_type == "cuda" else "cpu",
        "backend": backend,
        "world_size": process.world_size,
        "processes_a_node": process.local_world_size,
        "mesh": axes,
        "groups": groups,
    }
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "links.json", record)
    plot_times(groups, folder / "links.png")
    print(f"{format_axes(axes)} over {backend}, 1 KiB to {largest // 2**20} MiB.")
    print("Fitted model: time = latency + bytes sent / bandwidth. The last two columns are")
    print("the algorithm bandwidth and the bus bandwidth for the largest tensor, in GB/s.\n")
    for axis, axis_group in groups.items():
        rows = []
        for operation, row in axis_group["operations"].items():
            last = row["points"][-1]
            rates = (row["bytes_per_s"], last["algorithm_bytes_per_s"], last["bus_bytes_per_s"])
            rate, *largest_rates = (f"{value / 1e9:.2f}".replace("inf", "-") for value in rates)
            fit_cells = (f"{1e6 * row['latency_s']:.0f}", rate, f"{row['fit_error']:.0%}")
            rows.append([operation, *fit_cells, *largest_rates])
        text = tabulate(rows, HEADERS, disable_numparse=True, stralign="right")
        print(f"{axis}, {axis_group['members']} processes\n\n{text}\n")
    if process.world_size > process.local_world_size:
        # The processes of a node share its network connection.
        slowest = min(g["operations"]["all_gather"]["bytes_per_s"] for g in groups.values())
        bytes_per_s = slowest / process.local_world_size
        print(f"Network speed between nodes, for plan: --network_gbit {8 * bytes_per_s / 1e9:.3g}")
    print(f"Wrote links.json and links.png in {short_path(folder)}.")
    return 0


def mesh_of(options: argparse.Namespace, world_size: int) -> dict[str, int]:
    """Return the size of each axis of the mesh. The size of dp_replicate is the number of processes
    divided by the product of the other sizes. Raises UserError if the quotient is not a whole
    number, if there is only one process, or if a size is less than 1."""
    axes = {"pp": options.pp, "dp_replicate": 1, "dp_shard": options.dp_shard, "tp": options.tp}
    fixed = math.prod(axes.values())
    if min(axes.values()) < 1 or world_size % fixed or world_size < 2:
        what = f"mesh {format_axes(axes)} does not fit {plural(world_size, 'process')}"
        fix = "set --num_gpus to a multiple of the product of these sizes, at least 2"
        raise UserError(what, fix=fix)
    return {**axes, "dp_replicate": world_size // fixed}


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Measured connection between two processes."""

    ends: dict[int, str]  # rank -> host of the two processes
    latency_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{1e6 * self.latency_s:,.0f} us, {self.bytes_per_s / 1e9:.2f} GB/s"


def choose_pairs(world_size: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks whose links are measured."""
    if world_size <= MAX_RANKS_FOR_PAIRS:
        return list(itertools.combinations(range(world_size), 2))
    return list(itertools.pairwise(range(world_size)))


def check_nodes() -> int:
    """Measure the links between processes one by one, for `doctor --nodes`. Rank 0 prints the
    results. Return the exit code. All ranks must call this function."""
    links = []
    with open_group(budget_s=0.02) as group:
        hosts = gather(platform.node())
        small, large = SIZES[group.device.type]
        for ends in choose_pairs(group.process.world_size):
            entries = time_group(group, None, (small, large) * ROUNDS, ("send",), ends)
            latency, seconds = (
                min(entry["seconds"]["send"] for entry in entries if entry["bytes"] == size)
                for size in (small, large)
            )
            host_by_rank = {rank: hosts[rank] for rank in ends}
            links.append(Link(ends=host_by_rank, latency_s=latency, bytes_per_s=large / seconds))
    if group.process.rank == 0:
        print(describe(links))
    return 0


def describe(links: Sequence[Link]) -> str:
    """Return a report with one line per link. Links within a node and links between nodes are
    listed separately. For a slow link, the line says how much worse the link is than the best link
    in the same list."""
    by_location: dict[str, list[Link]] = {}
    for link in links:
        location = "within a node" if len(set(link.ends.values())) == 1 else "between nodes"
        by_location.setdefault(location, []).append(link)
    lines = []
    slow_pairs = []
    for location, similar_links in by_location.items():
        latency = min(link.latency_s for link in similar_links)
        rate = max(link.bytes_per_s for link in similar_links)
        best = Link(ends={}, latency_s=latency, bytes_per_s=rate)
        lines.append(
            f"{plural(len(similar_links), 'link')} {location}. "
            f"The best latency and bandwidth are {best}."
        )
        for link in similar_links:
            ends = " to ".join(f"{rank} ({host})" for rank, host in link.ends.items())
            text = f"  rank {ends}: {link}"
            latency_ratio = link.latency_s / latency
            rate_ratio = rate / link.bytes_per_s
            if rate_ratio > SLOW_RATE or latency_ratio > SLOW_LATENCY:
                slow_pairs.append(set(link.ends))
                text += ", slow: "
                if rate_ratio > SLOW_RATE:
                    text += f"the best link has {rate_ratio:.1f} times the bandwidth"
                else:
                    text += f"{latency_ratio:.1f} times the latency of the best link"
            lines.append(text)
    if common_ranks := slow_pairs and set.intersection(*slow_pairs):
        ranks = " and ".join(map(str, sorted(common_ranks)))
        lines.append(f"All slow links end at rank {ranks}. {SLOW_RANK_FIX}")
    return "\n".join(lines)
