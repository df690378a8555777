"""Detect this machine's hardware without importing torch."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil

from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import Machine

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def detect_machine() -> Machine:
    """Detect this machine's GPUs (with `nvidia-smi`), available memory and CPUs."""
    gpus = _visible_gpus()
    return Machine(
        num_gpus=len(gpus),
        gpu_name=gpus[0].name if gpus else None,
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        compute_capability=min((gpu.capability for gpu in gpus), default=(0, 0)),
        shares_memory=any(gpu.shares_memory for gpu in gpus),
        power_w=min((gpu.power_w for gpu in gpus if gpu.power_w), default=None),
        ram_bytes=available_ram_bytes(),
        num_cpus=available_cpus(),
        disk_bytes=shutil.disk_usage(".").free,
        torch_has_cuda=torch_has_cuda(),
    )


def torch_has_cuda() -> bool:
    """Return whether the installed torch is a build for CUDA, without importing torch."""
    torch = find_spec("torch")
    if torch is None:
        return False
    library = Path(str(torch.origin)).parent / "lib" / "libtorch_cuda.so"
    return library.exists()


def threads_per_process(processes_here: int) -> int:
    """Return the number of threads for each of `processes_here` processes on this machine: an equal
    share of the available cores, at least 1."""
    return max(1, available_cpus() // processes_here)


class _VisibleGpu(NamedTuple):
    number: str  # its index, as in CUDA_VISIBLE_DEVICES
    uuid: str
    name: str
    memory_bytes: int
    shares_memory: bool
    capability: tuple[int, int]
    power_w: float | None


def _visible_gpus() -> list[_VisibleGpu]:
    """Return the GPUs that CUDA would list. Return [] if nvidia-smi is missing or fails."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None:
        return []
    if visible is not None and visible.strip().startswith("MIG-"):
        raise UserError(
            "CUDA_VISIBLE_DEVICES names a MIG instance",
            "MIG instances are not supported",
            "list whole GPUs by index",
        )
    query = "--query-gpu=index,uuid,name,memory.total,compute_cap,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        return []
    gpus = []
    for line in result.stdout.splitlines():
        number, uuid, name, mebibytes, version, watts = line.split(", ")
        # For a GPU that shares the host's memory (GB10, Jetson), nvidia-smi reports [N/A]. Such a
        # GPU can use the available RAM.
        shares_memory = not mebibytes.isdecimal()
        memory = available_ram_bytes() if shares_memory else int(mebibytes) * 2**20
        major, _, minor = version.partition(".")
        capability = int(major), int(minor)
        power_w = float(watts) if watts[0].isdecimal() else None
        gpus.append(_VisibleGpu(number, uuid, name, memory, shares_memory, capability, power_w))
    if visible is None:
        return gpus
    visible_gpus = []
    for entry in map(str.strip, visible.split(",")):
        matches = [
            gpu for gpu in gpus if entry and (entry == gpu.number or gpu.uuid.startswith(entry))
        ]
        if not matches:
            break  # CUDA also stops at the first unknown entry
        visible_gpus += matches[:1]
    return visible_gpus


def available_ram_bytes() -> int:
    """Return the number of bytes that can be allocated before the kernel or a cgroup kills
    processes."""
    available = psutil.virtual_memory().available
    for group in _control_groups():
        limit = _read_numbers(group / "memory.max")
        used = _read_numbers(group / "memory.current")
        if limit and used:
            # The page cache counts as used, but the kernel frees it on demand.
            statistics = group / "memory.stat"  # missing in gVisor
            text = statistics.read_text() if statistics.exists() else ""
            cache = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", text, re.M)))
            available = min(available, max(limit[0] - used[0] + cache, 0))
    return available


def available_cpus() -> int:
    """Return the number of cores that this process may use, at least 1. CPU affinity and the CPU
    quota of a container limit the number."""
    cpus = len(os.sched_getaffinity(0))
    for group in _control_groups():
        quota = _read_numbers(group / "cpu.max")
        if len(quota) == 2 and min(quota) > 0:
            cpus = min(cpus, max(1, quota[0] // quota[1]))
    return cpus


def _control_groups() -> Iterator[Path]:
    """Yield the folder of each cgroup (version 2) that contains this process, including parent
    groups, because any of them may limit a job. In a container, the process's cgroup path may be
    valid only on the host. The root of the cgroup file system then stands for the container's
    group."""
    text = _OWN_CGROUPS.read_text() if _OWN_CGROUPS.exists() else ""
    if match := re.search(r"^0::/(.*)$", text, re.M):
        folder = _CGROUPS / match[1]
        while True:
            yield folder
            if folder in (_CGROUPS, folder.parent):
                break
            folder = folder.parent


def _read_numbers(file: Path) -> list[int]:
    """Return the numbers in a cgroup file, or [] if the file is missing or sets no limit
    ("max")."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
