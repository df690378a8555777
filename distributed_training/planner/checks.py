"""Reject runs that are known to fail, before processes start or weights are loaded.

This module does not import torch."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from distributed_training.plan.plan import Draft
from distributed_training.planner.sort import suggest, suggest_settings
from distributed_training.predict.costs.precision import SAVED_BYTES
from distributed_training.predict.predict import Cluster, Prediction
from distributed_training.records.display import format_bytes
from distributed_training.settings.config import AUTO
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import open_probe, plural
from distributed_training.settings.machine import GIB

# Versions with which the private interfaces are tested that the suite uses
TESTED = {"torch": "2.14", "deepspeed": "0.19"}


def check_run(prediction: Prediction, cluster: Cluster, notes: list[str]) -> None:
    """Raise UserError if the run is known to fail, and add possible problems to `notes`. With
    `--cluster`, skip the checks of this machine: installed packages, disks and the compiler."""
    plan = prediction.plan
    if cluster.is_local:
        check_packages(plan, notes)
        check_disk(plan, notes)
        check_extensions(plan)
    check_gpus(plan)
    check_memory(prediction, cluster)


def check_packages(plan: Draft, notes: list[str]) -> None:
    """Raise UserError if a package that the strategy or CONFIG needs is not installed. Add a note
    if its version is untested."""
    tracker = plan.config.log_to
    strategy = f"strategy={plan.strategy.name!r}"
    requirements = {
        "torch": ("every strategy", "-r requirements.txt"),
        plan.strategy.traits.package: (strategy, "-r requirements.txt"),
        tracker: (f"log_to={tracker!r}", tracker),
    }
    if plan.size.has_linear_attention and plan.machine.num_gpus:
        reason = f"{plan.model.label}'s linear attention"
        requirements["fla"] = (reason, "flash-linear-attention")
    if plan.config.base_dtype == "nf4":
        requirements["bitsandbytes"] = ("base_dtype='nf4'", "bitsandbytes")
    for package, (reason, source) in requirements.items():
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(
                f"{reason} needs the package {package}, which is not installed",
                fix=f"run: pip install {source}",
            )
        if package in TESTED:
            installed = importlib.metadata.version(package)
            if not installed.startswith(f"{TESTED[package]}."):
                notes.append(
                    f"{package} {installed} is untested and may fail: use {TESTED[package]}"
                )


def check_gpus(plan: Draft) -> None:
    """Raise UserError if this machine has GPUs, but fewer GPUs than processes."""
    num_gpus = plan.machine.num_gpus
    if num_gpus and plan.processes_here > num_gpus:
        raise UserError(
            f"{plan.processes_here} processes need as many GPUs, but this machine has {num_gpus}",
            "every process needs its own GPU",
            f"use --num_gpus {num_gpus}",
        )


def check_memory(prediction: Prediction, cluster: Cluster) -> None:
    """Raise UserError if a step does not fit into host memory or, without `--force`, into GPU
    memory. The error suggests settings with which the run would fit."""
    plan = prediction.plan
    memory = prediction.memory
    machine = plan.machine
    if prediction.gpu_memory_fit == "no" and not plan.requested.force:
        needed = memory.needed_bytes
        raise UserError(
            f"{plan.config.model} under {plan.strategy.name} needs {needed / GIB:.1f} GiB per GPU",
            f"{machine.gpu_name} has only {machine.gpu_memory_bytes / GIB:.1f} GiB",
            f"{suggest_settings(plan, cluster)}, or add --force to try anyway",
        )
    needed = prediction.ram_bytes
    if needed > machine.ram_bytes and (cluster.is_local or not plan.requested.force):
        raise UserError(
            f"the run needs about {needed / GIB:.1f} GiB of RAM for "
            f"{plural(plan.processes_here, 'process')}",
            cluster.assumption or f"only {machine.ram_bytes / GIB:.1f} GiB is available",
            suggest_settings(plan, cluster),
        )
    if plan.requested.strategy == AUTO and plan.strategy.offloads:
        _, best = suggest(plan, cluster)[0]
        if not best.plan.strategy.offloads:
            raise UserError(
                f"with these settings, {plan.config.model} fits only with {plan.strategy.name}",
                fix=suggest_settings(plan, cluster),
            )


def check_disk(plan: Draft, notes: list[str]) -> None:
    """Raise UserError if a folder of the run cannot be written. Add a note if a disk may have too
    little free space for checkpoints, exports or offloaded state. This is no reason to refuse the
    run, because a resumed run replaces files of its own and a disk may be cleaned meanwhile."""
    config = plan.config
    num_trained = plan.size.num_trained_parameters(config.lora_rank, config.lora_targets)
    num_saved = {0: 0, "signal": 1}.get(config.checkpoint_every, config.keep_checkpoints + 1)
    keeps_best = config.export if config.keep_best == AUTO else config.keep_best
    num_exported = [config.export, keeps_best].count(True)
    output_bytes = (SAVED_BYTES[config.optimizer] * num_saved + 4 * num_exported) * num_trained
    planned_writes = [(plan.output_dir.absolute(), output_bytes)]
    if plan.offload_dir is not None:
        planned_writes.append((plan.offload_dir, 20 * plan.size.num_parameters))
    if config.compile:  # The errors of torch's compiler do not name its cache.
        planned_writes.append((Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")), 2**25))
    for path, needed in planned_writes:
        with open_probe(path) as probe:
            free = shutil.disk_usage(probe.fileno()).free
        if needed > free:
            notes.append(
                f"the disk of {path} has {format_bytes(free)} free, and the run may write "
                f"{format_bytes(needed)}"
            )


def check_extensions(plan: Draft) -> None:
    """Raise UserError if a DeepSpeed extension cannot be built because the compiler or libaio is
    missing, or because torch would not quote its own path for the linker."""
    extensions = plan.strategy.extensions
    compiler = os.environ.get("CXX", "c++")
    strategy = f"strategy={plan.strategy.name!r}"
    if extensions and shutil.which(compiler) is None:
        raise UserError(
            f"{strategy} compiles a C++ extension, but {compiler} was not found",
            fix="set strategy to dp or fsdp, or run: apt-get install g++",
        )
    torch = importlib.util.find_spec("torch")
    if extensions and torch is not None and " " in str(torch.origin):
        what = f"{strategy} compiles a C++ extension, for which torch's path must not have a space"
        fix = "use an environment in another folder, or set strategy to dp or fsdp"
        raise UserError(what, str(torch.origin), fix)
    if "async_io" in extensions and not has_libaio():
        raise UserError(
            f"{strategy} needs libaio, but the compiler does not find it",
            fix="without root, run bash strategies/6_zero_infinity/run.sh; with root, run: "
            "apt-get install libaio-dev",
        )


def has_libaio() -> bool:
    """Return whether the compiler finds libaio. The compiler also searches the folders in CPATH and
    LIBRARY_PATH."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        return False
    probe = "#include <libaio.h>\nint main(void) { return io_setup(1, (io_context_t *)0); }\n"
    command = [compiler, "-x", "c", "-", "-o", os.devnull, "-laio"]
    return subprocess.run(command, input=probe.encode(), capture_output=True).returncode == 0
