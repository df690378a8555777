"""Measure six communication operations over every process group of a mesh.

    torchrun --nproc_per_node=4 results/lab/links.py [--tp 2] [--out FOLDER]

Each size is the size of the whole tensor, as in predict/mechanism.py. The algorithm bandwidth is
`size / seconds`. The bus bandwidth is `sent bytes / seconds`. Sent bytes are the bytes that each
process sends in a ring. The fit is `seconds = latency + sent bytes / bandwidth`. The fit minimizes
relative errors, so small messages count as much as large messages. Rank 0 prints the fits and
writes FOLDER/links.json. On several nodes, use --tp with the number of GPUs per node: 8 times the
GB/s of `dp_replicate all_gather` is then the value of the key network_gbit.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import checkout
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.benchmark import Timer

from distributed_training.parallel.agree import gather
from distributed_training.plan.layout import format_axes
from distributed_training.predict.mechanism import RING_TURNS, sent_bytes
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import plural
from distributed_training.settings.keys import at_least
from results.lab.harness import open_group

LARGEST_MIB = {"cuda": 1024, "cpu": 16}


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Fit a line to points of (bytes, seconds) by minimizing the squared relative errors.

    Return (latency in seconds, bandwidth in bytes/s, root mean square of the relative errors).
    Neither the latency nor the seconds per byte can be negative."""
    sizes, seconds = np.array(points, dtype=float).T
    coefficients = np.polynomial.polynomial.polyfit(sizes, seconds, 1, w=1 / seconds)
    columns = np.stack([1 / seconds, sizes / seconds])  # a perfect fit predicts 1 for each point
    if coefficients.min() < 0:
        index = int(coefficients.argmax())
        coefficients = np.zeros(2)
        coefficients[index] = columns[index].sum() / np.square(columns[index]).sum()
    latency_s, s_per_byte = map(float, coefficients)
    error = math.sqrt(np.square(coefficients @ columns - 1).mean())
    return latency_s, 1 / s_per_byte if s_per_byte else math.inf, error


def time_call(call: Callable[[], Any], num_calls: int) -> float:
    """Return the mean time per call in seconds, on the slowest process. All ranks must call this
    function."""
    return max(gather(Timer("call()", globals={"call": call}).timeit(num_calls).mean))


def time_group(
    members: Any, sizes: Sequence[int], device: torch.device, num_calls: int
) -> list[dict[str, Any]]:
    """Time all operations over the torch process group `members`, or over all ranks if it is None.
    `sizes` contains the sizes of the whole tensor in bytes. Return one entry per size, with the
    time of each operation in seconds on the slowest process. All ranks must call this function."""
    ranks = dist.get_process_group_ranks(members or dist.group.WORLD)
    first, second = ranks[:2]
    entries = []
    for num_bytes in sizes:
        tensor = torch.zeros(num_bytes // 4, device=device)
        shard = torch.zeros(num_bytes // 4 // len(ranks), device=device)
        divisible = tensor[: shard.numel() * len(ranks)]
        output = torch.zeros_like(divisible)

        def ping_pong(tensor: torch.Tensor = tensor) -> None:
            if dist.get_rank() == first:
                dist.send(tensor, second, group=members)
                dist.recv(tensor, second, group=members)
            elif dist.get_rank() == second:
                dist.recv(tensor, first, group=members)
                dist.send(tensor, first, group=members)

        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, tensor, group=members),
            "all_gather": partial(dist.all_gather_into_tensor, divisible, shard, group=members),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, shard, divisible, group=members),
            "broadcast": partial(dist.broadcast, tensor, ranks[0], group=members),
            "all_to_all": partial(dist.all_to_all_single, output, divisible, group=members),
        }
        seconds = {name: time_call(call, num_calls) for name, call in calls.items()}
        seconds["send"] = time_call(ping_pong, num_calls) / 2  # the tensor is sent twice
        entries.append({"members": len(ranks), "bytes": num_bytes, "seconds": seconds})
    return entries


def summarize(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fit and the points for each operation in the entries from `time_group`.

    Each point contains the algorithm bandwidth, the bus bandwidth and `ring_s`. The value `ring_s`
    is the time that the messages in a ring would take at the measured latency and bandwidth of a
    single send."""
    members = entries[0]["members"]
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
                "bytes": entry["bytes"],
                "seconds": seconds,
                "fitted_s": latency + sent / rate,
                "ring_s": ring_s + sent / message_rate,
                "algorithm_bytes_per_s": entry["bytes"] / seconds,
                "bus_bytes_per_s": sent / seconds,
            }
            for entry, (sent, seconds) in zip(entries, measured_points, strict=True)
        ]
        summary[operation] = {
            "points": points, "latency_s": latency, "bytes_per_s": rate, "fit_error": error,
        }  # fmt: skip
    return summary


def mesh_of(options: Any, world_size: int) -> dict[str, int]:
    """Return the size of each axis of the mesh. The size of dp_replicate is the number of processes
    divided by the product of the other sizes. Raises UserError if the quotient is not a whole
    number or if there is only one process."""
    axes = {"pp": options.pp, "dp_replicate": 1, "dp_shard": options.dp_shard, "tp": options.tp}
    fixed = math.prod(axes.values())
    if world_size % fixed or world_size < 2:
        what = f"mesh {format_axes(axes)} does not fit {plural(world_size, 'process')}"
        fix = "start a multiple of the product of these sizes, at least 2, with torchrun"
        raise UserError(what, fix=fix)
    return {**axes, "dp_replicate": world_size // fixed}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every group of the mesh. Return the exit code. All ranks must call this function."""
    parser = checkout.Parser(
        description=__doc__.splitlines()[0],
        check=lambda options: mesh_of(options, int(os.environ.get("WORLD_SIZE", 1))),
    )
    for axis in ("pp", "dp_shard", "tp"):
        parser.add_argument(f"--{axis}", type=at_least(1), default=1)
    parser.add_argument("--largest", type=at_least(1), help="largest tensor in MiB")
    parser.add_argument("--calls", type=at_least(1), default=20, help="calls per measurement")
    parser.add_argument("--out", type=Path, default=Path("links"))
    options = parser.parse_args(argv)
    groups = {}  # axis -> its size and the `summarize` result of its slowest group
    with open_group() as group:
        process, device = group.process, group.device
        axes = mesh_of(options, process.world_size)
        used_axes = {axis: size for axis, size in axes.items() if size > 1}
        mesh = init_device_mesh(
            device.type, tuple(used_axes.values()), mesh_dim_names=tuple(used_axes)
        )
        members: dict[str, Any] = {axis: mesh.get_group(axis) for axis in used_axes}
        if len(members) > 1:
            members["all"] = None
        largest = (options.largest or LARGEST_MIB[device.type]) * 2**20
        sizes = [4**power for power in range(5, 30) if 4**power <= largest]
        for axis, axis_members in members.items():
            entries = time_group(axis_members, sizes, device, options.calls)
            groups[axis] = {"members": entries[0]["members"], "operations": summarize(entries)}
    if process.rank:
        return 0
    record = {
        "what": "time of each communication operation in seconds, on the slowest rank",
        **provenance(f"torchrun --nproc_per_node={process.world_size} results/lab/links.py"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "world_size": process.world_size,
        "processes_a_node": process.local_world_size,
        "mesh": axes,
        "groups": groups,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "links.json", record)
    for axis, axis_group in groups.items():
        for operation, row in axis_group["operations"].items():
            fit = f"{1e6 * row['latency_s']:.0f} us, {row['bytes_per_s'] / 1e9:.2f} GB/s"
            print(f"{axis} {operation}: {fit}, fit error {row['fit_error']:.0%}")
    return 0


if __name__ == "__main__":
    checkout.run(main)
