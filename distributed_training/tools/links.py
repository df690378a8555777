"""How fast processes talk: six operations over every group of the mesh, or each link by itself.

Sizes are those of the whole tensor, as in predict/traffic.py: algorithm bandwidth is size /
seconds, bus bandwidth what a process sends in a ring / seconds. The fit, latency + sent bytes /
bandwidth, weighs relative errors, so that small messages count as much as large ones."""

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
from distributed_training.plan.layout import show_axes
from distributed_training.predict.traffic import TURNS, sent_bytes
from distributed_training.records.display import duration, short_path
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.config import RENDEZVOUS_S
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import plural
from distributed_training.start import launch, worker
from distributed_training.start.ranks import current_process, single_process
from distributed_training.supervise.process import Process

BUDGET_S = 0.15  # for one figure
LARGEST_MIB = {"cuda": 1024, "cpu": 16}
MOST_FOR_PAIRS = 8  # processes of which every pair is measured; of more each with the next
ROUNDS = 3  # of which the quickest counts: other programs only make a link slower
SIZES = {"cuda": (8, 2**26), "cpu": (8, 2**22)}  # bytes, for a link's latency and bandwidth
# By how much a link is worse than the best of its kind before it is called slow.
SLOW_LATENCY = 3.0
SLOW_RATE = 2.0
HEADERS = ("operation", "latency us", "GB/s", "fit off by", "algorithm", "bus")
FIX = "leave its host out, or see what else uses it: top, nvidia-smi, ethtool"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The processes that measure, and this one's device."""

    process: Process
    device: torch.device
    budget_s: float = BUDGET_S  # for one figure
    together: bool = True  # all take part in every call, and make equally many

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one call, the mean of as many as the budget allows."""
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        call()
        once = torch.tensor(timer.timeit(1).mean, dtype=torch.float64)  # after two more
        if self.together:
            dist.all_reduce(once, op=dist.ReduceOp.MAX)
        return timer.timeit(max(3, min(200, int(self.budget_s / float(once))))).mean


@contextlib.contextmanager
def open_group(budget_s: float = BUDGET_S) -> Iterator[Group]:
    """Join the process group that the launcher describes, or make one of this process alone."""
    process = current_process() or single_process()
    launch.prepare_environment(process.local_world_size or process.world_size)
    process, device, store = worker.join(process, torch.cuda.device_count(), RENDEZVOUS_S)
    # Three minutes: another rank may have failed.
    with process_group(device, store, minutes=3):
        yield Group(process=process, device=device, budget_s=budget_s)


def time_group(
    group: Group,
    members: Any,
    sizes: Iterable[int],
    kinds: Iterable[str],
    ranks: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Seconds of each operation by the size of its whole tensor, those of the slowest process.
    `ranks`: of `members`; only sends can be between fewer. Collective over all processes."""
    ranks = ranks or dist.get_process_group_ranks(members or dist.group.WORLD)

    def there_and_back(tensor: torch.Tensor) -> None:
        if dist.get_rank() == ranks[0]:
            dist.send(tensor, ranks[1], group=members)
            dist.recv(tensor, ranks[1], group=members)
        elif dist.get_rank() == ranks[1]:
            dist.recv(tensor, ranks[0], group=members)
            dist.send(tensor, ranks[0], group=members)

    found = []
    for num_bytes in sizes:
        whole = torch.zeros(num_bytes // 4, device=group.device)
        part = torch.zeros(num_bytes // 4 // len(ranks), device=group.device)
        within = whole[: part.numel() * len(ranks)]
        other = torch.zeros_like(within)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole, group=members),
            "all_gather": partial(dist.all_gather_into_tensor, within, part, group=members),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, within, group=members),
            "broadcast": partial(dist.broadcast, whole, ranks[0], group=members),
            "all_to_all": partial(dist.all_to_all_single, other, within, group=members),
            "send": partial(there_and_back, whole),
        }
        every = gather({kind: group.seconds(calls[kind]) for kind in kinds})
        seconds = {kind: max(each[kind] for each in every) for kind in kinds}
        if "send" in seconds:
            seconds["send"] /= 2  # there and back
        found.append({"members": len(ranks), "bytes": num_bytes, "seconds": seconds})
    return found


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(latency, bytes a second, root mean square of relative errors) of (bytes, seconds): least
    squares of the relative errors, neither latency nor seconds a byte below 0."""
    sizes, seconds = np.array(points, dtype=float).T
    found = np.polynomial.polynomial.polyfit(sizes, seconds, 1, w=1 / seconds)
    columns = np.stack([1 / seconds, sizes / seconds])  # should add up to 1
    if found.min() < 0:
        only = int(found.argmax())
        found = np.zeros(2)
        found[only] = columns[only].sum() / np.square(columns[only]).sum()
    latency, each = map(float, found)
    error = math.sqrt(np.square(found @ columns - 1).mean())
    return latency, 1 / each if each else math.inf, error


def summarize(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Operation -> fit and points, with both bandwidths and the ring's law: what its messages would
    take at the latency and bandwidth that one message between two processes was found to have."""
    members = entries[0]["members"]
    sizes = [entry["bytes"] for entry in entries]
    lines = {
        kind: [(sent_bytes(kind, e["bytes"], members), e["seconds"][kind]) for e in entries]
        for kind in TURNS
    }
    message_s, message_rate, _ = fit_line(lines["send"])
    found = {}
    for kind, line in lines.items():
        latency, rate, error = fit_line(line)
        ring_s = max(1, TURNS[kind] * (members - 1)) * message_s
        points = [
            {
                "bytes": size,
                "seconds": seconds,
                "fitted_s": latency + sent / rate,
                "ring_s": ring_s + sent / message_rate,
                "algorithm_bytes_per_s": size / seconds,
                "bus_bytes_per_s": sent / seconds,
            }
            for size, (sent, seconds) in zip(sizes, line, strict=True)
        ]
        found[kind] = {
            "points": points, "latency_s": latency, "bytes_per_s": rate, "fit_error": error,
        }  # fmt: skip
    return found


def draw(groups: dict[str, Any], path: Path) -> None:
    """Seconds by size of each operation, both logarithmic: points, fit, the ring's law."""
    from matplotlib.figure import Figure  # slow

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    panels: Any = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, kind in zip(panels.flat, TURNS, strict=True):
        for index, (axis, found) in enumerate(groups.items()):
            points = found["operations"][kind]["points"]
            curves: list[Any] = []
            for what, style in (("seconds", "o"), ("fitted_s", "-"), ("ring_s", ":")):
                curves += [[p["bytes"] for p in points], [p[what] for p in points], style]
            lines = axes.loglog(*curves, color=f"C{index}", markersize=4, linewidth=1.2)
            lines[0].set_label(f"{axis}, {found['members']} processes")
        axes.set_title(kind.replace("_", "-"), fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("bytes of the tensor (points: measured; line: fit; dotted: the ring's law)")
    figure.supylabel("seconds")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main(options: argparse.Namespace) -> int:
    """This process's part; the exit code. Collective."""
    groups = {}  # axis -> its size and `summarize` of its slowest group
    with open_group(options.seconds) as group:
        process = group.process
        kind = group.device.type
        axes = mesh_of(options, process.world_size)
        used = {axis: size for axis, size in axes.items() if size > 1}
        mesh = init_device_mesh(kind, tuple(used.values()), mesh_dim_names=tuple(used))
        members: dict[str, Any] = {axis: mesh.get_group(axis) for axis in used}
        if len(members) > 1:
            members["all"] = None
        largest = (options.largest or LARGEST_MIB[kind]) * 2**20
        sizes = [4**power for power in range(5, 30) if 4**power <= largest]
        if process.rank == 0:
            num_figures = len(members) * len(sizes) * len(TURNS)
            print(f"{num_figures} figures: {duration(num_figures * group.budget_s)}", flush=True)
        for axis, those in members.items():
            entries = time_group(group, those, sizes, TURNS)
            groups[axis] = {"members": entries[0]["members"], "operations": summarize(entries)}
    if process.rank > 0:
        return 0
    backend = "nccl" if kind == "cuda" else "gloo"
    record = {
        "what": "seconds of operations between processes, the slowest rank's",
        **provenance("python real_model_example.py links"),
        "device": torch.cuda.get_device_name(group.device) if kind == "cuda" else "cpu",
        "backend": backend,
        "world_size": process.world_size,
        "processes_a_node": process.local_world_size,
        "mesh": axes,
        "groups": groups,
    }
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "links.json", record)
    draw(groups, folder / "links.png")
    print(f"{show_axes(axes)} over {backend}, 1 KiB to {largest // 2**20} MiB;")
    print("fit: latency + sent bytes / GB/s; algorithm and bus bandwidth: largest tensor\n")
    for axis, found in groups.items():
        rows = []
        for operation, row in found["operations"].items():
            last = row["points"][-1]
            rates = (row["bytes_per_s"], last["algorithm_bytes_per_s"], last["bus_bytes_per_s"])
            rate, *of_largest = (f"{each / 1e9:.2f}".replace("inf", "-") for each in rates)
            fit = (f"{1e6 * row['latency_s']:.0f}", rate, f"{row['fit_error']:.0%}")
            rows.append([operation, *fit, *of_largest])
        text = tabulate(rows, HEADERS, disable_numparse=True, stralign="right")
        print(f"{axis}, {found['members']} processes\n\n{text}\n")
    if process.world_size > process.local_world_size:
        slowest = min(found["operations"]["all_gather"]["bytes_per_s"] for found in groups.values())
        each = slowest / process.local_world_size
        print(f"between nodes, for plan: --network_gbit {8 * each / 1e9:.3g}")
    print(f"record and picture in {short_path(folder)}")
    return 0


def mesh_of(options: argparse.Namespace, world_size: int) -> dict[str, int]:
    """Axis -> size, dp_replicate being what is left."""
    axes = {"pp": options.pp, "dp_replicate": 1, "dp_shard": options.dp_shard, "tp": options.tp}
    fixed = math.prod(axes.values())
    if min(axes.values()) < 1 or world_size % fixed or world_size < 2:
        what = f"{show_axes(axes)} does not divide {plural(world_size, 'process')}"
        raise UserError(what, fix="set --num_gpus to a multiple of their product, 2 or more")
    return {**axes, "dp_replicate": world_size // fixed}


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What lies between two processes."""

    ends: dict[int, str]  # their ranks -> hosts
    latency_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{1e6 * self.latency_s:,.0f} us, {self.bytes_per_s / 1e9:.2f} GB/s"


def pairs(world_size: int) -> list[tuple[int, int]]:
    """The ranks whose link is measured."""
    if world_size <= MOST_FOR_PAIRS:
        return list(itertools.combinations(range(world_size), 2))
    return list(itertools.pairwise(range(world_size)))


def check_nodes() -> int:
    """`doctor --nodes`: two processes at a time send each other tensors; exit code. Collective."""
    links = []
    with open_group(budget_s=0.02) as group:
        hosts = gather(platform.node())
        small, large = SIZES[group.device.type]
        for ends in pairs(group.process.world_size):
            entries = time_group(group, None, (small, large) * ROUNDS, ("send",), ends)
            latency, seconds = (
                min(entry["seconds"]["send"] for entry in entries if entry["bytes"] == size)
                for size in (small, large)
            )
            where = {rank: hosts[rank] for rank in ends}
            links.append(Link(ends=where, latency_s=latency, bytes_per_s=large / seconds))
    if group.process.rank == 0:
        print(describe(links))
    return 0


def describe(links: Sequence[Link]) -> str:
    """The links by kind, and what is slow among its kind."""
    kinds: dict[str, list[Link]] = {}
    for link in links:
        kind = "in a node" if len(set(link.ends.values())) == 1 else "between nodes"
        kinds.setdefault(kind, []).append(link)
    lines = []
    slow = []
    for kind, alike in kinds.items():
        latency = min(link.latency_s for link in alike)
        rate = max(link.bytes_per_s for link in alike)
        best = Link(ends={}, latency_s=latency, bytes_per_s=rate)
        lines.append(f"{plural(len(alike), 'link')} {kind}, at best {best}")
        for link in alike:
            ends = " - ".join(f"{rank} ({host})" for rank, host in link.ends.items())
            text = f"  rank {ends}: {link}"
            late = link.latency_s / latency
            thin = rate / link.bytes_per_s
            if thin > SLOW_RATE or late > SLOW_LATENCY:
                slow.append(set(link.ends))
                less = f"{thin:.1f} times less" if thin > SLOW_RATE else f"{late:.1f} times later"
                text += f", slow: {less} than the best"
            lines.append(text)
    if common := slow and set.intersection(*slow):
        ranks = " and ".join(map(str, sorted(common)))
        lines.append(f"all slow links end at rank {ranks}: {FIX}")
    return "\n".join(lines)
