"""`links`: how fast processes talk to each other: six operations over every group of the mesh.

    python real_model_example.py links [--num_gpus N] [--tp T] [--largest MIB]

Sizes are those of the whole tensor, as in plan/traffic.py: algorithm bandwidth is size / seconds,
bus bandwidth what a process sends in a ring / seconds. The fit, latency + sent bytes / bandwidth,
weighs relative errors, so that small messages count as much as large ones.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from tabulate import tabulate

from distributed_training.parallel.agree import gather
from distributed_training.plan.topology import Topology, show_axes
from distributed_training.predict.traffic import sent_bytes
from distributed_training.records.display import short_path
from distributed_training.records.provenance import provenance
from distributed_training.records.record import write_json
from distributed_training.run import launch
from distributed_training.run.process import current_process
from distributed_training.run.ranks import run_ranks
from distributed_training.settings.errors import UserError
from distributed_training.tools import clock, harness
from distributed_training.tools.clock import Clock

# Operation -> messages that follow each other in a ring of n processes.
STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "send": lambda n: 1,
}
SMALLEST, LARGEST_MIB = 2**10, {"cuda": 1024, "cpu": 16}


def time_group(
    timer: Clock, group: Any, members: int, sizes: Iterable[int], kinds: Iterable[str]
) -> list[dict[str, Any]]:
    """Seconds of each operation by the size of its whole tensor. Collective over `group`, and in
    counting over all processes."""
    found = []
    for num_bytes in sizes:
        calls = _calls(timer.device, group, members, num_bytes)
        seconds = {kind: timer.seconds(calls[kind], together=True) for kind in kinds}
        if "send" in seconds:
            seconds["send"] /= 2  # there and back
        found.append({"members": members, "bytes": num_bytes, "seconds": seconds})
    return found


def _calls(
    device: torch.device, group: Any, members: int, num_bytes: int
) -> dict[str, Callable[[], Any]]:
    whole = torch.zeros(num_bytes // 4, device=device)
    part = torch.zeros(num_bytes // 4 // members, device=device)
    within = whole[: part.numel() * members]
    other = torch.zeros_like(within)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "all_gather": partial(dist.all_gather_into_tensor, within, part, group=group),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, within, group=group),
        "broadcast": partial(dist.broadcast, whole, ranks[0], group=group),
        "all_to_all": partial(dist.all_to_all_single, other, within, group=group),
        "send": partial(_there_and_back, whole, ranks, group),
    }


def _there_and_back(tensor: torch.Tensor, ranks: list[int], group: Any) -> None:
    """Between the first two of the group; the others look on."""
    place = ranks.index(dist.get_rank())
    if place > 1:
        return
    other = ranks[1 - place]
    for sends in (place == 0, place == 1):
        (dist.send if sends else dist.recv)(tensor, other, group=group)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(latency, seconds a byte, root mean square of relative errors) of (bytes, seconds): least
    squares of the relative errors, neither figure below 0."""
    ones = [(1 / t, s / t) for s, t in points]
    uu, uv, vv = (sum(a * b for a, b in pairs) for pairs in (
        [(u, u) for u, _ in ones], [(u, v) for u, v in ones], [(v, v) for _, v in ones],
    ))  # fmt: skip
    u1, v1 = sum(u for u, _ in ones), sum(v for _, v in ones)
    determinant = uu * vv - uv * uv
    latency = (u1 * vv - v1 * uv) / determinant if determinant else -1.0
    each = (v1 * uu - u1 * uv) / determinant if determinant else v1 / vv
    if latency < 0:
        latency, each = 0.0, v1 / vv
    elif each < 0:
        latency, each = u1 / uu, 0.0
    errors = [(latency + each * s) / t - 1 for s, t in points]
    return latency, each, math.sqrt(sum(error**2 for error in errors) / len(errors))


def summarise(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Operation -> points with both bandwidths, fit, and the ring's law: what its messages would
    take at the latency and bandwidth that one message between two processes was found to have."""
    found: dict[str, Any] = {}
    members = entries[0]["members"]
    lines: dict[str, tuple[float, float, float]] = {}
    for kind in entries[0]["seconds"]:
        points = [
            (sent_bytes(kind, entry["bytes"], members), entry["seconds"][kind]) for entry in entries
        ]
        lines[kind] = fit_line(points)
        found[kind] = {
            "points": [
                {
                    "bytes": entry["bytes"],
                    "seconds": seconds,
                    "algorithm_bytes_per_s": entry["bytes"] / seconds,
                    "bus_bytes_per_s": sent / seconds,
                }
                for entry, (sent, seconds) in zip(entries, points, strict=True)
            ],
            "latency_s": lines[kind][0],
            "bytes_per_s": 1 / lines[kind][1] if lines[kind][1] else None,
            "fit_error": lines[kind][2],
        }
    latency, each, _ = lines["send"]
    for kind, row in found.items():
        row["ring_s"] = [
            STEPS[kind](members) * latency + each * sent_bytes(kind, point["bytes"], members)
            for point in row["points"]
        ]
    return found


def measure(group: harness.Group, axes: dict[str, int], largest: int) -> dict[str, Any]:
    """Axis -> its size and `summarise` of its slowest group. Collective."""
    process = group.process
    topology = Topology(
        world_size=process.world_size, rank=process.rank, local_rank=process.local_rank,
        device_type=group.device.type, **axes,
    )  # fmt: skip
    used = [axis for axis, size in axes.items() if size > 1]
    groups: dict[str, tuple[Any, int]]
    mesh = topology.build_mesh()
    groups = {axis: (mesh.get_group(axis), axes[axis]) for axis in used}
    if len(used) > 1:
        groups["all"] = (None, process.world_size)
    sizes = [4**power for power in range(5, 30) if 4**power <= largest]
    found = {}
    for axis, (members_group, members) in groups.items():
        mine = time_group(Clock(group.device), members_group, members, sizes, STEPS)
        ranks = gather([entry["seconds"] for entry in mine])
        for place, entry in enumerate(mine):
            entry["seconds"] = {kind: max(rank[place][kind] for rank in ranks) for kind in STEPS}
        found[axis] = {"members": members, "operations": summarise(mine)}
    return found


def table(groups: dict[str, Any]) -> str:
    """Of each group a row an operation."""
    headers = ["operation", "latency us", "GB/s", "fit off by", "algorithm", "bus"]
    lines = []
    for axis, found in groups.items():
        rows = []
        for kind, row in found["operations"].items():
            last, rate = row["points"][-1], row["bytes_per_s"]
            bandwidths = [last[f"{what}_bytes_per_s"] / 1e9 for what in ("algorithm", "bus")]
            rows.append([
                kind, f"{1e6 * row['latency_s']:.0f}",
                "-" if rate is None else f"{rate / 1e9:.2f}", f"{100 * row['fit_error']:.0f}%",
                *(f"{bandwidth:.2f}" for bandwidth in bandwidths),
            ])  # fmt: skip
        lines += [f"{axis}, {found['members']} processes", ""]
        lines += [tabulate(rows, headers, disable_numparse=True, stralign="right"), ""]
    return "\n".join(lines)


def draw(record: dict[str, Any], path: Path) -> None:
    """Seconds by size of each operation, both logarithmic: points, fit, the ring's law."""
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    panels: Any = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, kind in zip(panels.flat, STEPS, strict=True):
        for index, (axis, found) in enumerate(record["groups"].items()):
            row, colour = found["operations"][kind], f"C{index}"
            sizes = [point["bytes"] for point in row["points"]]
            each = 1 / row["bytes_per_s"] if row["bytes_per_s"] else 0.0
            fitted = [
                row["latency_s"] + each * sent_bytes(kind, size, found["members"]) for size in sizes
            ]
            name = f"{axis}, {found['members']} processes"
            seconds = [point["seconds"] for point in row["points"]]
            axes.loglog(sizes, seconds, "o", color=colour, markersize=4, label=name)
            axes.loglog(sizes, fitted, "-", color=colour, linewidth=1.2)
            axes.loglog(sizes, row["ring_s"], ":", color=colour, linewidth=1.2)
        axes.set_title(kind.replace("_", "-"), fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("bytes of the tensor (points: measured; line: fit; dotted: the ring's law)")
    figure.supylabel("seconds")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def work(options: argparse.Namespace) -> int:
    """This process's part. Collective."""
    with harness.open_group() as group:
        process = group.process
        axes = mesh_of(options, process.world_size)
        clock.BUDGET_S = options.seconds
        largest = (options.largest or LARGEST_MIB[group.device.type]) * 2**20
        groups = measure(group, axes, largest)
        if process.rank == 0:
            on_gpu = group.device.type == "cuda"
            record = {
                "what": "seconds of operations between processes, the slowest rank's",
                **provenance("python real_model_example.py links"),
                "device": torch.cuda.get_device_name(group.device) if on_gpu else "cpu",
                "backend": "nccl" if on_gpu else "gloo",
                "world_size": process.world_size,
                "processes_a_node": process.local_world_size,
                "mesh": axes,
                "groups": groups,
            }
            folder: Path = options.out
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "links.json", record)
            draw(record, folder / "links.png")
            print(f"{show_axes(axes)} over {record['backend']}, 1 KiB to {largest // 2**20} MiB;"
                  "\nfit: latency + sent bytes / GB/s; algorithm and bus bandwidth: largest"
                  " tensor\n")  # fmt: skip
            print(table(groups))
            print(f"record and picture in {short_path(folder)}")
    return 0


def mesh_of(options: argparse.Namespace, world_size: int) -> dict[str, int]:
    """Axis -> size, dp_replicate being what is left."""
    axes = {"pp": options.pp, "dp_replicate": 1, "dp_shard": options.dp_shard, "tp": options.tp}
    fixed = math.prod(axes.values())
    if min(axes.values()) < 1 or world_size % fixed or world_size < 2:
        what = f"{show_axes(axes)} does not divide {world_size} process{'es' * (world_size != 1)}"
        raise UserError(what, "links measures between two or more", "set --num_gpus 2 or more")
    return {**axes, "dp_replicate": world_size // fixed}


def start(
    argv: Sequence[str], script: Path, output_dir: Path, parser: argparse.ArgumentParser
) -> int:
    """Start the processes where no launcher did, or be one of them."""
    add = parser.add_argument
    add("--num_gpus", default="all", help="processes; all: one a GPU, or 2 without GPUs")
    for axis in ("pp", "dp_shard", "tp"):
        add(f"--{axis}", type=int, default=1, help="size of that axis; the rest is dp_replicate")
    add("--largest", type=int, help="MiB of the largest tensor; 1024 on GPUs, 16 without")
    add("--seconds", type=float, default=clock.BUDGET_S, help="to repeat a figure for")
    add("--out", type=Path, default=output_dir / "links", help="folder of the record and picture")
    options = parser.parse_args(argv)
    if options.largest is not None and options.largest < 1:
        raise UserError("--largest is at least 1 (MiB)")
    if current_process(os.environ) is not None:
        return work(options)
    machine = launch.detect_machine()
    count = launch.requested_processes(options.num_gpus, machine, {})
    mesh_of(options, count)  # refused here rather than by every process
    return run_ranks([str(script), "links", *argv], count).exit_code
