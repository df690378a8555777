"""What this machine has, found without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from distributed_training.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The facts that "auto" values and preflight checks depend on."""

    num_gpus: int
    """NVIDIA GPUs this process may use (`CUDA_VISIBLE_DEVICES` respected)."""
    gpu_name: str | None
    gpu_memory_bytes: int
    """Memory of the smallest visible GPU, host memory where it has none of its own; 0 without a
    GPU.
    """
    compute_capability: tuple[int, int]
    """Lowest of the visible GPUs, (0, 0) without one; bf16 needs (8, 0)."""
    ram_bytes: int
    """Memory that may still be used here: the smaller of free RAM and the cgroup's room."""
    num_cpus: int


def detect_machine() -> Machine:
    """Look at this machine: `nvidia-smi`, `/proc/meminfo`, the cgroup's limit."""
    gpus = _visible_gpus()
    return Machine(
        num_gpus=len(gpus),
        gpu_name=gpus[0][0] if gpus else None,
        gpu_memory_bytes=min((memory for _, memory, _ in gpus), default=0),
        compute_capability=min((capability for _, _, capability in gpus), default=(0, 0)),
        ram_bytes=available_ram_bytes(),
        num_cpus=len(os.sched_getaffinity(0)),
    )


def _visible_gpus() -> list[tuple[str, int, tuple[int, int]]]:
    """(name, memory bytes, compute capability) for each GPU that CUDA would show."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=index,uuid,name,memory.total,compute_cap"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip().startswith("MIG-"):
        raise UserError(
            "CUDA_VISIBLE_DEVICES names a part of a GPU (MIG)",
            "this suite looks for whole GPUs",
            "give whole GPUs by index, or unset it",
        )
    try:
        answer = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            "nvidia-smi did not answer for a minute", "the driver hangs", "try nvidia-smi by hand"
        ) from None
    if answer.returncode != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    gpus = {
        row[0]: (row[1], (row[2], _memory_bytes(row[3]), _capability(row[4])))
        for row in rows
        if len(row) == 5
    }
    if visible is None:
        return [gpu for _, gpu in gpus.values()]
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        match = [
            gpu
            for index, (uuid, gpu) in gpus.items()
            if name and (name == index or uuid.startswith(name))
        ]
        if not match:
            break  # CUDA, too, stops at the first entry that it does not know
        chosen += match[:1]
    return chosen


def _memory_bytes(mebibytes: str) -> int:
    """A GPU that shares the host's memory (GB10, Jetson) answers [N/A]: what it can have is what
    the host has left.
    """
    try:
        return int(float(mebibytes)) * 2**20
    except ValueError:
        return available_ram_bytes()


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not major.isdecimal():  # [N/A]: an old driver, whose GPUs lack bf16
        return (0, 0)
    return int(major), int(minor or 0)


def available_ram_bytes() -> int:
    """Bytes that can be allocated before the kernel or the cgroup starts killing."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    available = fields["MemAvailable"]
    for group in _memory_groups():
        limit, used = group / "memory.max", group / "memory.current"
        if limit.exists() and used.exists() and limit.read_text().strip() != "max":
            room = int(limit.read_text()) - int(used.read_text()) + _file_cache_bytes(group)
            available = min(available, max(room, 0))
    return available


def _memory_groups() -> list[Path]:
    """This process's cgroup (version 2) and all above it; a job's limit may be on any of them."""
    root = Path("/sys/fs/cgroup")
    own = Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.exists() else []
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folder = root / path.lstrip("/")
    return [parent for parent in (folder, *folder.parents) if parent.is_relative_to(root)]


def _file_cache_bytes(group: Path) -> int:
    """Counted as used, but given back when it is needed."""
    stat = group / "memory.stat"
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))
