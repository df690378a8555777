"""Detect this machine's hardware without importing torch. Read the GPU data in gpus.json, from
which rates are estimated.

The values come from NVIDIA's datasheets, with three exceptions:
- RTX 3090, 4090 and 5090: the whitepapers for GA102, AD102 and GB202
- RTX 3060: the rates follow from 3,584 cores at 1.78 GHz as in the whitepaper for GA102
- A10G, an AWS variant of the A10: the values that CUDA reports

Rates are for dense matrices, without sparsity. Memory sizes are as reported by nvidia-smi. Link
bandwidths are in GB/s per direction:
- NVLink: 900 for version 5, 450 for 4, 300 for 3, 150 for 2, and 200 for the H800 and A800
- PCIe x16: about 63 for version 5, 31.5 for 4, and 15.75 for 3

`host` names a typical machine with the GPU: a cloud instance, or a workstation. `ram_gib` and
`disk_gb` are its RAM and local disks per GPU.

An entry whose name contains another entry's name comes before that entry. A plain name such as V100
denotes the model's first entry whose form factor is not PCIe or NVL."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
from pydantic import BaseModel, Field

from distributed_training.settings.config import Positive
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json, parse_as, shown

GIB = 2**30
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CPU_INFO = Path("/proc/cpuinfo")
NIC_BYTES_PER_S = 50e9  # bandwidth between nodes: one 400 Gbit/s network card per GPU
GPU_EXAMPLE = '{"memory_gib": 48, "tflops": 150, "memory_gb_s": 700}'


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware properties on which "auto" values and preflight checks depend."""

    num_gpus: int  # NVIDIA GPUs that this process may use, according to `CUDA_VISIBLE_DEVICES`
    gpu_name: str | None
    # Smallest memory of any visible GPU, or the available RAM if GPUs share it; 0 without GPUs
    gpu_memory_bytes: int
    compute_capability: tuple[int, int]  # lowest of the visible GPUs; (0, 0) without GPUs
    ram_bytes: int  # available bytes, limited by free RAM and by the cgroup
    num_cpus: int
    disk_bytes: int = sys.maxsize  # free space in the current folder
    power_w: float | None = None  # lowest power limit of the visible GPUs; None if unknown
    cpu_has_bf16: bool = False  # whether the CPU has instructions for bf16 matrix multiplications


def detect_machine() -> Machine:
    """Detect this machine's GPUs (with `nvidia-smi`), available memory and CPUs."""
    gpus = _visible_gpus()
    return Machine(
        num_gpus=len(gpus),
        gpu_name=gpus[0].name if gpus else None,
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        compute_capability=min((gpu.capability for gpu in gpus), default=(0, 0)),
        power_w=min((gpu.power_w for gpu in gpus if gpu.power_w), default=None),
        ram_bytes=available_ram_bytes(),
        num_cpus=available_cpus(),
        disk_bytes=shutil.disk_usage(".").free,
        cpu_has_bf16=has_bf16(_CPU_INFO),
    )


def has_bf16(info: Path) -> bool:
    """Return whether the CPU has bf16 instructions: AVX-512 BF16 or AMX BF16 on x86, or BF16 on
    Arm. `info` is the path to Linux's /proc/cpuinfo. Return False if the file does not exist."""
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    return (
        re.search(r"^(flags|Features)\b.*\b(avx512_bf16|amx_bf16|bf16)\b", text, re.M) is not None
    )


def threads_per_process(processes_here: int) -> int:
    """Return the number of threads for each of `processes_here` processes on this machine: an equal
    share of the available cores, at least 1."""
    return max(1, available_cpus() // processes_here)


class _VisibleGpu(NamedTuple):
    number: str  # its index, as in CUDA_VISIBLE_DEVICES
    uuid: str
    name: str
    memory_bytes: int
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
        memory = int(mebibytes) * 2**20 if mebibytes.isdecimal() else available_ram_bytes()
        major, _, minor = version.partition(".")
        capability = int(major), int(minor)
        power_w = float(watts) if watts[0].isdecimal() else None
        gpus.append(_VisibleGpu(number, uuid, name, memory, capability, power_w))
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


class Gpu(BaseModel, strict=True, extra="forbid", frozen=True):
    """GPU model, described by an entry in gpus.json or by JSON passed to `--gpu`."""

    name: str = "own GPU"
    memory_gib: Positive
    tflops: Positive  # rate of 16-bit matrix multiplications with fp32 accumulation
    # Rate of fp32 matrix multiplications without TF32
    fp32_tflops: Positive = Field(default_factory=lambda values: values.get("tflops", 0) / 4)
    memory_gb_s: Positive
    link_gb_s: Positive = 31.5  # bandwidth to another GPU in the node, per direction
    # Streaming multiprocessors. Each computes one tile of a matrix multiplication at a time.
    num_sms: Annotated[int, Field(ge=1)] = 100
    compute_capability: Annotated[tuple[int, int], Field(strict=False)] = (8, 0)
    power_w: Positive = 1000  # power limit, which bounds the rate of long matrix multiplications
    host: str = "a workstation"  # typical machine with this GPU
    ram_gib: Positive = 64  # RAM of `host` per GPU
    disk_gb: Positive = 1000  # local disk space of `host` per GPU

    @property
    def flops(self) -> float:
        return self.tflops * 1e12


_TABLE = load_json(Path(__file__).with_name("gpus.json"), "the table of GPUs")
GPUS = {entry["name"]: Gpu(**entry) for entry in _TABLE}


def find_gpu(device_name: str | None) -> Gpu | None:
    """Return the entry in gpus.json for a device name from nvidia-smi or CUDA. Return None for a
    device without an entry, for a partial GPU (MIG) and for a laptop GPU."""
    name_parts = (device_name or "").upper().replace("-", " ").split()
    if "MIG" in name_parts or "LAPTOP" in name_parts:
        return None
    for gpu in GPUS.values():
        if set(gpu.name.upper().split("-")) <= set(name_parts):
            return gpu
    # If no entry matches completely, for example because the memory differs, use the first entry of
    # the same model and form factor (PCIe, NVL).
    form_factors = {"PCIE", "NVL"}
    for gpu in GPUS.values():
        model, *suffixes = gpu.name.upper().removeprefix("RTX-").split("-")
        numbered = model.isdecimal()  # "6000" alone may be part of another name
        if (
            model in name_parts
            and not numbered
            and form_factors & set(suffixes) == form_factors & set(name_parts)
        ):
            return gpu
    return None


def parse_gpu(name: str) -> Gpu:
    """Return the GPU that a user specifies by name or as JSON. Names are not case-sensitive. A
    suffix such as "@500W" lowers the power limit. Raises UserError for an unknown GPU."""
    if name.lstrip().startswith("{"):
        try:
            document = json.loads(name)
        except ValueError as error:
            raise UserError(f"--gpu {shown(name)} is not valid JSON", str(error)) from None
        return parse_as(Gpu, document, "--gpu", f"write {GPU_EXAMPLE}")
    if match := re.fullmatch(
        r"(.+)@(\d+) ?W",
        name.strip(),
        re.IGNORECASE,
    ):
        return with_power_limit(parse_gpu(match[1]), float(match[2]))
    text = name.strip().replace(" ", "-").replace("_", "-")
    text = re.sub(r"(?i)^(?:RTX-?)?(\d{4})", r"RTX-\1", text)
    gpu = find_gpu(text)
    if gpu is not None:
        return gpu
    if re.match(r"(?i)MI\d|INSTINCT|RX-|GAUDI|TPU|TRN|ARC-", text):
        what = f"GPU {shown(name)} is not supported"
        raise UserError(what, "the suite needs CUDA", "name a GPU by NVIDIA, such as H100-80GB")
    fix = f"to describe another GPU, write --cluster 1x8 --gpu '{GPU_EXAMPLE}', for example"
    raise UserError(f"GPU {shown(name)} is not known", f"the known GPUs are {', '.join(GPUS)}", fix)


def with_power_limit(gpu: Gpu, power_w: float | None) -> Gpu:
    """Return `gpu` with its power limit lowered to `power_w` watts. If `power_w` is None, the limit
    is unknown, and `gpu` is returned unchanged."""
    return gpu if power_w is None else gpu.model_copy(update={"power_w": min(power_w, gpu.power_w)})
