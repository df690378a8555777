"""`doctor`: what this machine has and lacks for training. No torch in this process."""

import contextlib
import itertools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import psutil

from distributed_training.planner import checks
from distributed_training.records.display import WIDTH
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT
from distributed_training.settings.machine import (
    GIB,
    Machine,
    available_cpus,
    available_ram_bytes,
    detect_machine,
    find_gpu,
)

MIB = 2**20
PROBE_BYTES = 64 * MIB  # written to see how fast a disk is
SLOW_DISK = 100 * MIB  # bytes a second, below which checkpoints take long
SHARED_MEMORY = Path("/dev/shm")  # NCCL sends through it between GPUs that have no better way
HUB = ("huggingface.co", 443)
PORT = 29500  # torchrun's
# What only torch knows, asked of another process: importing it takes seconds, and may fail.
ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "available": cuda,
    "nccl": cuda and ".".join(map(str, torch.cuda.nccl.version())),
    "bf16": cuda and torch.cuda.is_bf16_supported(),
}))
"""


class Finding(NamedTuple):
    """One line of the screen."""

    level: str  # ok, warn, fail
    what: str
    text: str
    fix: str = ""  # what to type


ok = partial(Finding, "ok")
warn = partial(Finding, "warn")
fail = partial(Finding, "fail")


def check(good: bool, what: str, text: str, fix: str = "") -> Finding:
    """ok, or a warning with what to type."""
    return ok(what, text) if good else warn(what, text, fix)


def answer(*command: str, seconds: float = 10) -> str:
    """What a program prints; nothing where it is missing, fails or does not answer."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=True,
            cwd=ROOT,  # Python's -c imports what is in the folder where one stands before all else
        )  # fmt: skip
        return done.stdout
    return ""


def gpus(machine: Machine) -> Iterator[Finding]:
    """GPUs, what is free of them and how they are linked."""
    if not machine.num_gpus:
        seen = shutil.which("nvidia-smi") is not None
        fix = "check `nvidia-smi` and CUDA_VISIBLE_DEVICES" if seen else ""
        yield warn("GPUs", "none: gpt2-tiny trains on the CPU, as a smoke test", fix)
        return
    size = f"{machine.gpu_memory_bytes / GIB:.0f} GiB"
    yield ok("GPUs", f"{machine.num_gpus} x {machine.gpu_name}, {size} each")
    if find_gpu(machine.gpu_name) is None:
        yield warn("rates", "this GPU is not in the planner's table", "plan --gpu '{...}'")
    query = "--query-gpu=memory.used", "--format=csv,noheader,nounits"
    used = [int(word) for word in answer("nvidia-smi", *query).split() if word.isdecimal()]
    busy = ", ".join(str(index) for index, mebibytes in enumerate(used) if mebibytes > 1024)
    if used:
        text = f"GPUs {busy} hold others' memory" if busy else "by nobody else"
        yield check(not busy, "in use", text, "nvidia-smi")
    topology = answer("nvidia-smi", "topo", "-m").splitlines()
    rows = [line.split() for line in topology if line.startswith("GPU")]
    if links := {word for row in rows for word in row[1 : 1 + machine.num_gpus]} - {"X"}:
        text = f"between GPUs: {', '.join(sorted(links))}"
        if slow := links & {"SYS", "NODE", "PHB"}:
            text += ": no NVLink, so prefer dp or pp to tp"
        yield check(not slow, "links", text)


def torch_and_driver(machine: Machine) -> Iterator[Finding]:
    """torch against the driver, NCCL, bf16."""
    if not machine.num_gpus:  # importing it takes seconds
        with contextlib.suppress(PackageNotFoundError):
            yield ok("torch", version("torch"))
            return
    said = answer(sys.executable, "-c", ASK_TORCH, seconds=60)
    if not said:
        fix = "pip install -r requirements.txt"
        yield fail("torch", "cannot be imported, or did not answer for a minute", fix)
        return
    found = json.loads(said.splitlines()[-1])
    text = f"{found['torch']}, CUDA {found['cuda'] or 'none'}"
    if found["available"]:
        yield ok("torch", f"{text}, NCCL {found['nccl']}")
        text = "supported" if found["bf16"] else "not supported by this GPU: precision is fp16"
        yield check(found["bf16"], "bf16", text)
    else:
        fix = "install the torch that the driver of nvidia-smi supports: pytorch.org/get-started"
        yield fail("torch", f"{text}: sees no GPU, though nvidia-smi does", fix)


def memory_and_files() -> Iterator[Finding]:
    """Cores, RAM, shared memory, open files."""
    cores = available_cpus()
    present = os.cpu_count() or cores
    text = f"{cores} may be used (affinity and the container's quota count) of {present}"
    yield ok("cores", text)
    ram = available_ram_bytes()
    text = f"{ram / GIB:.1f} GiB may be used (the container's limit counts)"
    yield check(ram > 4 * GIB, "RAM", text, "end other programs")
    free = shutil.disk_usage(SHARED_MEMORY).free
    text = f"{SHARED_MEMORY} has {free / MIB:,.0f} MiB free"
    enough = free > 128 * MIB  # twice what Docker gives
    yield check(enough, "shared", text, "docker run --shm-size=1g ...")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = f"{files:,} may be open at a time"
    yield check(files >= 4096, "files", text, "ulimit -n 65536")


def disk(output_dir: Path) -> Iterator[Finding]:
    """Room and speed where runs are written."""
    folder = next(path for path in (output_dir, *output_dir.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {free / GIB:,.0f} GiB free"
    fix = "--output_dir on another disk"
    if not os.access(folder, os.W_OK):
        yield fail("disk", f"{folder} cannot be written to", fix)
    elif free < 8 * PROBE_BYTES:
        yield fail("disk", text, fix)
    else:
        data = os.urandom(MIB) * (PROBE_BYTES // MIB)  # random bytes take long
        start = time.perf_counter()
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        speed = PROBE_BYTES / (time.perf_counter() - start)
        text += f", writes {speed / MIB:,.0f} MiB/s"
        yield check(free >= 20 * GIB and speed >= SLOW_DISK, "disk", text, fix)


def building(machine: Machine) -> Iterator[Finding]:
    """What DeepSpeed's extensions are built with."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    ninja = shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists()
    for what, there, lack, package in (
        ("compiler", compiler, "offload and infinity cannot build", "apt-get install g++"),
        ("ninja", ninja, "extensions cannot be built", "pip install ninja"),
        ("libaio", checks.has_libaio(), "infinity needs it", "apt-get install libaio-dev"),
    ):  # fmt: skip
        yield check(bool(there), what, "there" if there else f"missing: {lack}", package)
    if machine.num_gpus and shutil.which("nvcc") is None and not os.environ.get("CUDA_HOME"):
        yield warn("toolkit", "no nvcc: infinity's extension needs the CUDA toolkit's headers")
    for name in ("cpu_adam", "async_io", "pin_memory"):
        try:
            checks.refuse_stale_lock(name)
        except UserError as error:
            what, _, fix = str(error).rpartition("rm ")
            yield fail("lock", what.split(". ")[0], f"rm {fix}")


def launching() -> Iterator[Finding]:
    """Port, host name and network."""
    with socket.socket() as probe:
        free = probe.connect_ex(("127.0.0.1", PORT)) != 0
    text = f"{PORT} is free" if free else f"{PORT}, which several nodes meet at, is taken"
    yield check(free, "port", text, "give --rdzv_endpoint another port")
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        reachable = not address.startswith("127.")
        text = f"{name} is {address}" + ("" if reachable else ": other nodes could not reach it")
        yield check(reachable, "host", text, "on several nodes give --rdzv_endpoint an address")
    except OSError:
        yield warn("host", f"the name {name} does not resolve", f"add {name} to /etc/hosts")
    up = [n for n, stats in psutil.net_if_stats().items() if stats.isup and n != "lo"]
    text = f"interfaces {', '.join(sorted(up)) or 'none'}"
    if set_to := os.environ.get("NCCL_SOCKET_IFNAME"):
        text += f"; NCCL_SOCKET_IFNAME={set_to}"
    yield ok("network", text)
    store = "torchrun's store, which runs what it is sent, on every interface"
    yield ok("listening", f"--num_gpus: on loopback alone; several nodes: {store}")


def hub() -> Iterator[Finding]:
    """Whether pretrained weights and data sets can be fetched."""
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    there = f"cache {cache}" + ("" if cache.exists() else " (empty)")
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        yield warn("Hub", f"HF_HUB_OFFLINE=1; {there}", "unset HF_HUB_OFFLINE")
        return
    try:
        socket.create_connection(HUB, timeout=3).close()
        yield ok("Hub", f"{HUB[0]} answers; {there}")
    except OSError as error:
        text = f"{HUB[0]} cannot be reached ({error}): random weights; {there}"
        yield warn("Hub", text, "HF_ENDPOINT=<a mirror>, or copy the cache of another machine")


def main(output_dir: Path) -> int:
    """Print the screen, a line each and what to type below; 1 where something fails."""
    machine = detect_machine()
    looks: list[Iterator[Finding]] = [
        gpus(machine), torch_and_driver(machine), memory_and_files(), disk(output_dir),
        building(machine), launching(), hub(),
    ]  # fmt: skip
    with ThreadPoolExecutor() as pool:  # several of them wait
        findings: list[Finding] = list(itertools.chain(*pool.map(list, looks)))
    width = max(len(finding.what) for finding in findings)
    indent = " " * (7 + width)
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent=indent)
    for level, what, text, fix in findings:
        print(wrap.fill(f"{level:<4} {what:<{width}}  {text}"))
        if fix:
            print(wrap.fill(f"{indent}type: {fix}"))
    levels = Counter(finding.level for finding in findings)
    print(f"\n{levels['fail']} failed, {levels['warn']} to look at, {levels['ok']} ok")
    return int(levels["fail"] > 0)
