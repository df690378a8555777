"""Check whether this machine is ready for training."""

import os
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from distributed_training.records.display import fold
from distributed_training.settings.detect import available_cpus, available_ram_bytes, detect_machine
from distributed_training.settings.errors import UserError, first_line
from distributed_training.settings.files import open_probe, plural
from distributed_training.settings.machine import GIB, GPU_EXAMPLE, Machine, find_gpu

MIB = 2**20
SHARED_MEMORY = Path("/dev/shm")  # NCCL uses it between GPUs without peer access
HUB = ("huggingface.co", 443)


class Finding(NamedTuple):
    """One line of the report."""

    level: str  # ok, warn or fail
    topic: str
    text: str
    fix: str = ""  # advice, printed below; a command follows after a line break


ok = partial(Finding, "ok")
warn = partial(Finding, "warn")
fail = partial(Finding, "fail")


def check(is_good: bool, topic: str, text: str, fix: str) -> Finding:
    """Return an `ok` line if the result is good. Otherwise, return a warning with the fix."""
    return ok(topic, text) if is_good else warn(topic, text, fix)


def check_gpus(machine: Machine) -> Iterator[Finding]:
    """Check the GPUs and their free memory."""
    if not machine.num_gpus:
        has_driver = shutil.which("nvidia-smi") is not None
        fix = "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES." if has_driver else ""
        yield warn(
            "GPUs",
            "No GPU found. By default, runs train the small model gpt2-tiny on the CPU.",
            fix,
        )
        return
    size = f"{machine.gpu_memory_bytes / GIB:.0f} GiB"
    yield ok("GPUs", f"{machine.num_gpus} x {machine.gpu_name}, {size} each")
    if find_gpu(machine.gpu_name) is None:
        fix = f"Describe it, for example:\nplan --gpu '{GPU_EXAMPLE}'"
        yield warn("rates", "This GPU is not in the planner's table.", fix)
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    output = subprocess.run(query, capture_output=True, text=True).stdout
    busy = []
    for index, used_mebibytes in enumerate(output.split()):
        if used_mebibytes.isdecimal() and int(used_mebibytes) > 1024:
            busy.append(str(index))
    if output:
        text = "No GPU is in use."
        if busy:
            text = f"Other programs use memory on GPU {', '.join(busy)}."
        yield check(not busy, "in use", text, "Find the programs with `nvidia-smi`.")


def check_torch_and_driver(machine: Machine) -> Iterator[Finding]:
    """Check torch, the driver and NCCL."""
    fix = "Install it:\npip install 'trainplan[train]'"
    if not machine.num_gpus:  # without GPUs, only the version matters
        try:
            yield ok("torch", version("torch"))
        except PackageNotFoundError:
            yield fail("torch", "torch is not installed. Only planning works without it.", fix)
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield fail("torch", f"torch cannot be imported: {first_line(error)}", fix)
        return
    text = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if not torch.cuda.is_available():
        fix = "Install a torch build that the driver supports: pytorch.org/get-started"
        yield fail("torch", f"{text}. torch sees no GPU, but nvidia-smi does.", fix)
        return
    yield ok("torch", f"{text}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    text = "Linear attention, as in Qwen3.5, needs flash-linear-attention."
    fix = "Install it:\npip install flash-linear-attention"
    yield check(find_spec("fla") is not None, "fla", text, fix)


def check_memory() -> Iterator[Finding]:
    """Check cores, RAM and shared memory."""
    cores = available_cpus()
    yield ok("cores", f"{cores} of {os.cpu_count()} cores are available to this process")
    ram = available_ram_bytes()
    text = f"{ram / GIB:.1f} GiB is available to this process"
    yield check(ram > 4 * GIB, "RAM", text, "End other programs.")
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    text = f"{SHARED_MEMORY} has {free_bytes / MIB:,.0f} MiB free"
    is_enough = free_bytes > 128 * MIB  # twice Docker's default
    fix = "Start the container with:\ndocker run --shm-size=1g ..."
    yield check(is_enough, "shared", text, fix)


def check_disk(output_dir: Path) -> Iterator[Finding]:
    """Check the disk that stores runs."""
    fix = "Set --output_dir to a folder on another disk."
    try:
        with open_probe(output_dir) as probe:
            free_bytes = shutil.disk_usage(probe.fileno()).free
    except UserError as error:
        yield fail("disk", str(error), fix)
        return
    text = f"{output_dir} has {free_bytes / GIB:,.0f} GiB free"
    yield check(free_bytes >= 20 * GIB, "disk", text, fix)


def check_hub() -> Iterator[Finding]:
    """Check whether pretrained weights and datasets can be downloaded."""
    from huggingface_hub import constants  # slow to import

    cache_text = f"The cache is {constants.HF_HOME}."
    if constants.HF_HUB_OFFLINE:
        text = f"HF_HUB_OFFLINE=1 prevents downloads. {cache_text}"
        yield warn("Hub", text, "To allow downloads, run:\nunset HF_HUB_OFFLINE")
        return
    try:
        socket.create_connection(HUB, timeout=3).close()
        yield ok("Hub", f"{HUB[0]} is reachable. {cache_text}")
    except OSError as error:
        text = f"{HUB[0]} cannot be reached ({error}). Only cached models can be loaded. "
        fix = "Set HF_ENDPOINT to a mirror, or copy the cache from another machine."
        yield warn("Hub", text + cache_text, fix)


def main(output_dir: Path) -> int:
    """Print one line per check, with the fix below each problem. Return 1 if a check fails,
    otherwise 0."""
    machine = detect_machine()
    findings = [
        *check_gpus(machine),
        *check_torch_and_driver(machine),
        *check_memory(),
        *check_disk(output_dir),
        *check_hub(),
    ]
    width = max(len(finding.topic) for finding in findings)
    indent = 7 + width
    for level, topic, text, fix in findings:
        print(fold(f"{level:<4} {topic:<{width}}  {text}", indent=indent))
        advice, *commands = fix.split("\n")
        if advice:
            print(fold(f"{' ' * indent}{advice}", indent=indent))
        for command in commands:
            print(f"{' ' * indent}  {command}")
    levels = Counter(finding.level for finding in findings)
    counts = f"{levels['fail']} failed, {plural(levels['warn'], 'warning')}, {levels['ok']} ok"
    print(f"\n{counts}" if levels["fail"] else f"\n{counts}. This machine can train.")
    return 1 if levels["fail"] else 0
