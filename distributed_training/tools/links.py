"""`links`: how fast processes talk to each other: six operations over every group of the mesh.

    python real_model_example.py links [--num_gpus N] [--tp T] [--largest MIB]

Sizes are those of the whole tensor, as in predict/traffic.py: algorithm bandwidth is size /
seconds, bus bandwidth what a process sends in a ring / seconds. The fit, latency + sent bytes /
bandwidth, weighs relative errors, so that small messages count as much as large ones.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

from distributed_training.parallel.agree import gather
from distributed_training.plan.topology import show_axes
from distributed_training.predict.traffic import sent_bytes
from distributed_training.records.display import short_path
from distributed_training.records.provenance import provenance
from distributed_training.records.record import plural, write_json
from distributed_training.settings.errors import UserError
from distributed_training.tools.measuring import Clock, Group, open_group

# Operation -> messages that follow each other in a ring of n processes.
STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "send": lambda n: 1,
}
LARGEST_MIB = {"cuda": 1024, "cpu": 16}


def time_group(
    clock: Clock,
    group: Any,
    sizes: Iterable[int],
    kinds: Iterable[str],
    ranks: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Seconds of each operation by the size of its whole tensor, those of the slowest process.
    `ranks`: of `group`, unless only they take part, which but sends cannot. Collective over all
    processes."""
    ranks = ranks or dist.get_process_group_ranks(group or dist.group.WORLD)
    found = []
    for num_bytes in sizes:
        calls = _calls(clock.device, group, ranks, num_bytes)
        own = {kind: clock.seconds(calls[kind], together=True) for kind in kinds}
        every = gather(own)
        seconds = {kind: max(each[kind] for each in every) for kind in own}
        if "send" in seconds:
            seconds["send"] /= 2  # there and back
        found.append({"members": len(ranks), "bytes": num_bytes, "seconds": seconds})
    return found


def _calls(
    device: torch.device, group: Any, ranks: Sequence[int], num_bytes: int
) -> dict[str, Callable[[], Any]]:
    whole = torch.zeros(num_bytes // 4, device=device)
    part = torch.zeros(num_bytes // 4 // len(ranks), device=device)
    within = whole[: part.numel() * len(ranks)]
    other = torch.zeros_like(within)
    return {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "all_gather": partial(dist.all_gather_into_tensor, within, part, group=group),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, within, group=group),
        "broadcast": partial(dist.broadcast, whole, ranks[0], group=group),
        "all_to_all": partial(dist.all_to_all_single, other, within, group=group),
        "send": partial(_there_and_back, whole, ranks, group),
    }


def _there_and_back(tensor: torch.Tensor, ranks: Sequence[int], group: Any) -> None:
    """Between the first two of `ranks`; all others look on."""
    rank = dist.get_rank()
    if rank == ranks[0]:
        dist.send(tensor, ranks[1], group=group)
        dist.recv(tensor, ranks[1], group=group)
    elif rank == ranks[1]:
        dist.recv(tensor, ranks[0], group=group)
        dist.send(tensor, ranks[0], group=group)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(latency, bytes a second, root mean square of relative errors) of (bytes, seconds): least
    squares of the relative errors, neither latency nor seconds a byte below 0."""
    sizes, seconds = np.array(points, dtype=float).T
    columns = np.stack([1 / seconds, sizes / seconds], axis=1)  # should add up to 1
    scale = np.linalg.norm(columns, axis=0)
    found = np.linalg.lstsq(columns / scale, np.ones(len(points)))[0] / scale
    if found.min() < 0:
        only = int(found.argmax())
        found = np.zeros(2)
        found[only] = columns[:, only].sum() / scale[only] ** 2
    errors = columns @ found - 1
    latency, each = map(float, found)
    return latency, 1 / each if each else math.inf, math.sqrt(np.mean(errors**2))


def summarise(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Operation -> fit and points, with both bandwidths and the ring's law: what its messages would
    take at the latency and bandwidth that one message between two processes was found to have."""
    members = entries[0]["members"]
    lines = {
        kind: [(sent_bytes(kind, e["bytes"], members), e["seconds"][kind]) for e in entries]
        for kind in STEPS
    }
    fits = {kind: fit_line(line) for kind, line in lines.items()}
    message_s, message_rate, _ = fits["send"]
    found = {}
    for kind, (latency, rate, error) in fits.items():
        points = [
            {
                "bytes": entry["bytes"],
                "seconds": seconds,
                "fitted_s": latency + sent / rate,
                "ring_s": STEPS[kind](members) * message_s + sent / message_rate,
                "algorithm_bytes_per_s": entry["bytes"] / seconds,
                "bus_bytes_per_s": sent / seconds,
            }
            for entry, (sent, seconds) in zip(entries, lines[kind], strict=True)
        ]
        found[kind] = {
            "points": points, "latency_s": latency, "bytes_per_s": rate, "fit_error": error,
        }  # fmt: skip
    return found


def measure(group: Group, axes: dict[str, int], largest: int, budget_s: float) -> dict[str, Any]:
    """Axis -> its size and `summarise` of its slowest group. Collective."""
    used = {axis: size for axis, size in axes.items() if size > 1}
    mesh = init_device_mesh(group.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
    groups: dict[str, Any] = {axis: mesh.get_group(axis) for axis in used}
    if len(groups) > 1:
        groups["all"] = None
    sizes = [4**power for power in range(5, 30) if 4**power <= largest]
    clock = Clock(group.device, budget_s=budget_s)
    found = {}
    for axis, members in groups.items():
        entries = time_group(clock, members, sizes, STEPS)
        found[axis] = {"members": entries[0]["members"], "operations": summarise(entries)}
    return found


def table(groups: dict[str, Any]) -> str:
    """Of each group a row an operation."""
    headers = ["operation", "latency us", "GB/s", "fit off by", "algorithm", "bus"]
    lines = []
    for axis, found in groups.items():
        rows = []
        for kind, row in found["operations"].items():
            last = row["points"][-1]
            rates = (row["bytes_per_s"], last["algorithm_bytes_per_s"], last["bus_bytes_per_s"])
            rate, algorithm, bus = (f"{each / 1e9:.2f}".replace("inf", "-") for each in rates)
            fit = f"{100 * row['fit_error']:.0f}%"
            rows.append([kind, f"{1e6 * row['latency_s']:.0f}", rate, fit, algorithm, bus])
        lines += [f"{axis}, {found['members']} processes", ""]
        lines += [tabulate(rows, headers, disable_numparse=True, stralign="right"), ""]
    return "\n".join(lines)


def draw(groups: dict[str, Any], path: Path) -> None:
    """Seconds by size of each operation, both logarithmic: points, fit, the ring's law."""
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    panels: Any = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, kind in zip(panels.flat, STEPS, strict=True):
        for index, (axis, found) in enumerate(groups.items()):
            points = found["operations"][kind]["points"]
            label = f"{axis}, {found['members']} processes"
            for what, style in (("seconds", "o"), ("fitted_s", "-"), ("ring_s", ":")):
                axes.loglog(
                    [point["bytes"] for point in points], [point[what] for point in points],
                    style, color=f"C{index}", markersize=4, linewidth=1.2,
                    label=label if what == "seconds" else None,
                )  # fmt: skip
        axes.set_title(kind.replace("_", "-"), fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("bytes of the tensor (points: measured; line: fit; dotted: the ring's law)")
    figure.supylabel("seconds")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main(options: argparse.Namespace) -> int:
    """This process's part; the exit code. Collective."""
    with open_group() as group:
        process = group.process
        axes = mesh_of(options, process.world_size)
        largest = (options.largest or LARGEST_MIB[group.device.type]) * 2**20
        groups = measure(group, axes, largest, options.seconds)
    if process.rank > 0:
        return 0
    backend = "nccl" if group.device.type == "cuda" else "gloo"
    record = {
        "what": "seconds of operations between processes, the slowest rank's",
        **provenance("python real_model_example.py links"),
        "device": group.device_name,
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
    print(f"{show_axes(axes)} over {backend}, 1 KiB to {largest // 2**20} MiB;"
          "\nfit: latency + sent bytes / GB/s; algorithm and bus bandwidth: largest"
          " tensor\n")  # fmt: skip
    print(table(groups))
    if process.world_size > process.local_world_size:
        slowest = min(group["operations"]["all_gather"]["bytes_per_s"] for group in groups.values())
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
