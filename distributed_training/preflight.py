"""What can be known to fail is refused here, before processes start or weights load.

Each check raises UserError; none imports torch.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from distributed_training.config import RunConfig
from distributed_training.errors import UserError
from distributed_training.files import user_path
from distributed_training.machine import Machine
from distributed_training.sizes import ModelSize
from distributed_training.strategy import Strategy, estimate_state_bytes

GIB, MIB = 2**30, 2**20
STALE_LOCK_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
REDUCE_BUFFER_BYTES = 69_206_024  # sizeof(allreduce_workspace) in DeepSpeed's shm.cpp
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """All that the checks look at."""

    config: RunConfig
    strategy: Strategy
    machine: Machine
    size: ModelSize
    num_parameters_here: int
    """Of the process that holds most: all, or its share where tp or pp divide the model."""
    dp_size: int
    """Processes that hold the same part of the model and see different samples."""
    processes_here: int
    """How many of them run on this machine."""
    offload_dir: Path


def run_checks(situation: Situation) -> None:
    """Run every check, cheapest first."""
    for check in CHECKS:
        check(situation)


def check_packages(situation: Situation) -> None:
    """The packages that this strategy and this CONFIG import are installed."""
    needed = {"torch": "every strategy"}
    if situation.strategy.engine == "deepspeed":
        needed["deepspeed"] = f"strategy={situation.strategy.name!r}"
    if situation.config.log_to is not None:
        needed[situation.config.log_to] = f"log_to={situation.config.log_to!r}"
    for package, reason in needed.items():
        if importlib.util.find_spec(package) is None:
            optional = package in ("tensorboard", "wandb")
            raise UserError(
                f"the package {package} is not installed",
                f"{reason} needs it",
                f"pip install {package if optional else '-r requirements.txt'}",
            )


def check_gpus(situation: Situation) -> None:
    """No more processes on this machine than it has GPUs (any number on a machine without)."""
    machine, here = situation.machine, situation.processes_here
    if machine.num_gpus and here > machine.num_gpus:
        raise UserError(
            f"{here} processes are asked for but this machine has {machine.num_gpus} GPU"
            f"{'s' if machine.num_gpus > 1 else ''}",
            "one process drives one GPU",
            f"use --num_gpus {machine.num_gpus}",
        )


def check_gpu_memory(situation: Situation) -> None:
    """Parameters, gradients and optimizer state alone must fit; activations come on top."""
    machine = situation.machine
    if not machine.num_gpus:
        return
    needed = _device_bytes(situation, situation.strategy)
    if needed > machine.gpu_memory_bytes:
        raise UserError(
            f"{situation.config.model} under {situation.strategy.name} needs "
            f"{needed / GIB:.1f} GiB a GPU for its state alone",
            f"{machine.gpu_name} has {machine.gpu_memory_bytes / GIB:.1f} GiB",
            "use more GPUs with zero3, fsdp, tp or pp, strategy offload or infinity, or a smaller "
            "model",
        )


def check_host_memory(situation: Situation) -> None:
    """Every process builds the model once in fp32; offload adds its share of state."""
    state = estimate_state_bytes(
        situation.strategy,
        num_parameters=situation.num_parameters_here,
        precision=situation.config.precision,
        dp_size=situation.dp_size,
    )
    per_process = 4 * situation.size.num_parameters + state["host"]
    if not situation.machine.num_gpus:
        per_process += _device_bytes(situation, situation.strategy)
    needed = per_process * situation.processes_here
    if needed > situation.machine.ram_bytes:
        raise UserError(
            f"{situation.processes_here} processes need about {needed / GIB:.1f} GiB of RAM",
            f"{situation.machine.ram_bytes / GIB:.1f} GiB can be had; the kernel would kill them",
            "use a smaller model or fewer processes",
        )


def check_shared_memory(situation: Situation) -> None:
    """Without GPUs DeepSpeed's processes reduce through files in memory; Docker gives 64 MiB."""
    if situation.strategy.engine != "deepspeed" or situation.machine.num_gpus:
        return
    if not SHARED_MEMORY.is_dir():
        return  # no Linux: DeepSpeed reduces through gloo
    needed = REDUCE_BUFFER_BYTES * situation.processes_here
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        raise UserError(
            f"{SHARED_MEMORY} has {free / MIB:.0f} MiB free and DeepSpeed needs "
            f"{needed / MIB:.0f} MiB there on a machine without GPUs",
            "the processes would be killed (SIGBUS)",
            "start the container with --shm-size=1g, or take dp or fsdp, which need none",
        )


def check_disk(situation: Situation) -> None:
    """Room for the checkpoints that are kept, the one being written, the export, offload."""
    by_disk: dict[int, list[tuple[Path, int]]] = {}
    for key, path, size in _written(situation):
        folder = _existing(key, path)
        if not os.access(folder, os.W_OK):
            raise UserError(f"{folder} cannot be written to", fix=f"set {key} elsewhere")
        by_disk.setdefault(folder.stat().st_dev, []).append((folder, size))
    for parts in by_disk.values():
        needed = sum(size for _, size in parts)
        free = shutil.disk_usage(parts[0][0]).free
        if needed > free:
            names = " and ".join(dict.fromkeys(str(folder) for folder, _ in parts))
            raise UserError(
                f"the disk of {names} has {free / GIB:.1f} GiB free and the run may write "
                f"{needed / GIB:.1f} GiB",
                "checkpoints, export and offload files",
                "set output_dir or offload_dir to a larger disk, or checkpoint_every to 0",
            )


def _written(situation: Situation) -> list[tuple[str, Path, int]]:
    """(CONFIG key, folder, bytes at most) of what the run writes."""
    config, count = situation.config, situation.size.num_parameters
    if situation.strategy.engine == "deepspeed" and situation.strategy.pipelined:
        # Both ends of the pipeline save the tied embedding.
        count += situation.size.vocab_size * situation.size.hidden_size
    output = 0
    if config.checkpoint_every != 0:
        output += 16 * count * (config.keep_checkpoints + 1)
    if config.export:
        output += 4 * count
    written = [("output_dir", user_path("output_dir", config.output_dir), output)]
    if situation.strategy.needs_async_io:
        written.append(("offload_dir", situation.offload_dir, 20 * count))
    return written


def check_extensions(situation: Situation) -> None:
    """A compiler, libaio and no forgotten lock, where DeepSpeed will build an extension."""
    extensions = built_extensions(situation.strategy, situation.machine)
    if not extensions:
        return
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"strategy={situation.strategy.name!r} builds a C++ extension and there is no "
            f"{compiler}",
            fix="install a compiler, apt-get install g++, or take one that needs none: dp, fsdp",
        )
    if "async_io" in extensions and not has_libaio():
        raise UserError(
            f"strategy={situation.strategy.name!r} needs libaio with its header",
            "libaio.h or libaio.so was not found by the compiler",
            "apt-get install libaio-dev (Debian, Ubuntu) or dnf install libaio-devel (Fedora, "
            "RHEL); without root, bash strategies/6_zero_infinity/run.sh fetches a private copy",
        )
    for name in extensions:
        for folder in extension_folders(name):
            check_extension_lock(folder)


def check_swapping(situation: Situation) -> None:
    """On a CPU "device memory" is the swap buffer itself, and DeepSpeed reuses it too early:
    gradients came out wrong. Tensors below its 1 MiB threshold, as in gpt2-tiny, never swap.
    """
    swaps = situation.strategy.offload_device("param") == "nvme"
    model = situation.config.model
    if swaps and not situation.machine.num_gpus and model != "gpt2-tiny":
        raise UserError(
            f"strategy={situation.strategy.name!r} with model={model!r} needs a GPU",
            "without one DeepSpeed overwrites parameters that are in use",
            "set model to gpt2-tiny for a rehearsal",
        )


def needed_extensions(strategy: Strategy) -> list[str]:
    """Names of the DeepSpeed extensions that a worker builds before the run."""
    names = ["cpu_adam"] if strategy.needs_cpu_adam else []
    return [*names, "async_io"] if strategy.needs_async_io else names


def built_extensions(strategy: Strategy, machine: Machine) -> list[str]:
    """Names (of folders, too) of all extensions that are built, DeepSpeed's own choices included:
    page-locked memory for async_io, and shared memory between processes that have no GPU.
    """
    names = needed_extensions(strategy)
    if strategy.needs_async_io:
        names.append("pin_memory")
    if strategy.engine == "deepspeed" and not machine.num_gpus:
        names.append("deepspeed_shm_comm")
    return names


def has_libaio() -> bool:
    """Whether the compiler finds libaio's header and library (CPATH and LIBRARY_PATH count)."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text(
            "#include <libaio.h>\nint main(void) { return io_setup(1, (io_context_t *)0); }\n"
        )
        compiler = os.environ.get("CC", "cc")
        command = [compiler, str(source), "-o", str(Path(folder) / "probe"), "-laio"]
        if shutil.which(compiler) is None:
            return False
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def extension_folders(name: str) -> list[Path]:
    """Build folders of one extension in torch's cache: one per Python and CUDA version."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return [folder for folder in [Path(root) / name] if folder.is_dir()]
    cache = Path.home() / ".cache" / "torch_extensions"
    version = sysconfig.get_python_version().replace(".", "")
    return [folder for folder in cache.glob(f"py{version}_*/{name}") if folder.is_dir()]


def check_extension_lock(folder: Path) -> None:
    """A build that was killed leaves a file `lock` on which every later run waits for ever."""
    lock = folder / "lock"
    try:
        age_s = time.time() - lock.stat().st_mtime
    except FileNotFoundError:  # there is none, or its build has just ended
        return
    if age_s > STALE_LOCK_S and not _someone_builds_in(folder):
        raise UserError(
            f"{lock} is {age_s / 60:.0f} minutes old and no process here builds in that folder",
            "torch would wait for it for ever",
            f"if no other machine is building either: rm {lock}",
        )


def _someone_builds_in(folder: Path) -> bool:
    for process in psutil.process_iter(["name", "cwd"]):
        name, cwd = process.info["name"] or "", process.info["cwd"]
        if cwd == str(folder) and any(tool in name for tool in ("ninja", "c++", "cc1", "nvcc")):
            return True
    return False


def _device_bytes(situation: Situation, strategy: Strategy) -> int:
    state = estimate_state_bytes(
        strategy,
        num_parameters=situation.num_parameters_here,
        precision=situation.config.precision,
        dp_size=situation.dp_size,
    )
    return state["parameters"] + state["gradients"] + state["optimizer"]


def _existing(key: str, path: Path) -> Path:
    """The nearest parent that exists; raise UserError when it is not a folder."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a folder", fix=f"set {key} elsewhere")
    return path


CHECKS: tuple[Callable[[Situation], None], ...] = (
    check_packages,
    check_gpus,
    check_swapping,
    check_gpu_memory,
    check_host_memory,
    check_shared_memory,
    check_disk,
    check_extensions,
)
