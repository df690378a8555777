"""What this machine has, found without importing torch."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from distributed_training.settings.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The facts that "auto" values and preflight checks depend on."""

    num_gpus: int  # NVIDIA GPUs this process may use (`CUDA_VISIBLE_DEVICES` respected)
    gpu_name: str | None
    gpu_memory_bytes: int  # of the smallest visible GPU, host memory where it has none; 0 without
    compute_capability: tuple[int, int]  # lowest of the visible GPUs, (0, 0) without one
    ram_bytes: int  # that may still be used: the smaller of free RAM and the cgroup's room
    num_cpus: int
    power_w: float | None = None  # that each GPU may draw; None where that is not known


def detect_machine() -> Machine:
    """Look at this machine: `nvidia-smi`, free memory, the cgroup's limit."""
    gpus = _visible_gpus()
    return Machine(
        num_gpus=len(gpus),
        gpu_name=gpus[0].name if gpus else None,
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        compute_capability=min((gpu.capability for gpu in gpus), default=(0, 0)),
        power_w=min((gpu.power_w for gpu in gpus if gpu.power_w), default=None),
        ram_bytes=available_ram_bytes(),
        num_cpus=len(os.sched_getaffinity(0)),
    )


def threads_per_process(processes_here: int) -> int:
    """An equal share of the cores, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // processes_here)


class _Visible(NamedTuple):
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    power_w: float | None


def _visible_gpus() -> list[_Visible]:
    """Each GPU that CUDA would show."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None:
        return []
    if visible is not None and visible.strip().startswith("MIG-"):
        raise UserError("CUDA_VISIBLE_DEVICES names a part of a GPU", fix="give GPUs by index")
    query = "--query-gpu=index,uuid,name,memory.total,compute_cap,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise UserError("nvidia-smi did not answer for a minute", fix="run it yourself") from None
    if answer.returncode != 0:
        return []
    gpus = []
    for line in answer.stdout.splitlines():
        index, uuid, name, mebibytes, version, *watts = line.split(", ")
        # A GPU that shares the host's memory (GB10, Jetson) answers [N/A]: it can use what is left.
        memory = int(mebibytes) * 2**20 if mebibytes.isdecimal() else available_ram_bytes()
        major, _, minor = version.partition(".")
        power_w = float(watts[0]) if watts and watts[0][0].isdecimal() else None
        gpus.append((index, uuid, _Visible(name, memory, (int(major), int(minor)), power_w)))
    if visible is None:
        return [gpu for _, _, gpu in gpus]
    chosen = []
    for entry in map(str.strip, visible.split(",")):
        match = [gpu for i, uuid, gpu in gpus if entry and (entry == i or uuid.startswith(entry))]
        if not match:
            break  # CUDA, too, stops at the first entry that it does not know
        chosen += match[:1]
    return chosen


def available_ram_bytes() -> int:
    """Bytes that can be allocated before the kernel or the cgroup starts killing."""
    available = psutil.virtual_memory().available
    # This process's cgroup (version 2) and all above it: a job's limit may be on any of them.
    root = Path("/sys/fs/cgroup")
    own = Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.exists() else []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::")), "")
    for group in (root / path, *(root / path).parents):
        limit, used, stat = (group / f"memory.{name}" for name in ("max", "current", "stat"))
        if limit.exists() and used.exists() and limit.read_text().strip() != "max":
            fields = dict(line.split() for line in stat.read_text().splitlines())
            # The cache of files is counted as used, but given back when it is needed.
            cache = int(fields["active_file"]) + int(fields["inactive_file"])
            room = int(limit.read_text()) - int(used.read_text()) + cache
            available = min(available, max(room, 0))
    return available
