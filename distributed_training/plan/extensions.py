"""The C++ extensions that DeepSpeed compiles for a strategy. No torch import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path

import psutil

from distributed_training.plan.machine import Machine
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import Strategy

STALE_LOCK_S = 60.0


def needed_extensions(strategy: Strategy) -> list[str]:
    """Names of the DeepSpeed extensions that a worker builds before the run."""
    return ["cpu_adam"] * strategy.steps_on_host + ["async_io"] * strategy.swaps_to_disk


def built_extensions(strategy: Strategy, machine: Machine) -> list[str]:
    """Names (of folders, too) of all extensions that are built, DeepSpeed's own choices included:
    page-locked memory for async_io, and shared memory between processes that have no GPU.
    """
    shared = strategy.traits.reduces_in_shared_memory and not machine.num_gpus
    own = ["pin_memory"] * strategy.swaps_to_disk + ["deepspeed_shm_comm"] * shared
    return needed_extensions(strategy) + own


def has_libaio() -> bool:
    """Whether the compiler finds libaio's header and library (CPATH and LIBRARY_PATH count)."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        return False
    probe = "#include <libaio.h>\nint main(void) { return io_setup(1, (io_context_t *)0); }\n"
    command = [compiler, "-x", "c", "-", "-o", os.devnull, "-laio"]
    return subprocess.run(command, input=probe.encode(), capture_output=True).returncode == 0


def check_extension_lock(name: str) -> None:
    """A build of this extension that was killed leaves a file `lock` that every later run waits
    for, in its folder of torch's cache, one per Python and CUDA version.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    version = sysconfig.get_python_version().replace(".", "")
    cache = Path.home() / ".cache" / "torch_extensions"
    for folder in [Path(root) / name] if root else cache.glob(f"py{version}_*/{name}"):
        lock = folder / "lock"
        age_s = time.time() - lock.stat().st_mtime if lock.exists() else 0
        builds = (process.info["cwd"] == str(folder) for process in psutil.process_iter(["cwd"]))
        if age_s > STALE_LOCK_S and not any(builds):
            what = (
                f"{lock} is {age_s / 60:.0f} minutes old and no process here builds in that folder"
            )
            why = "torch would wait for it forever"
            raise UserError(what, why, f"if no other machine is building either: rm {lock}")
