import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed_training import preflight
from distributed_training.config import build_config
from distributed_training.preflight import (
    Situation,
    built_extensions,
    check_disk,
    check_extension_lock,
    check_extensions,
    check_gpu_memory,
    check_gpus,
    check_host_memory,
    check_packages,
    check_shared_memory,
    check_swapping,
    extension_folders,
    has_libaio,
    needed_extensions,
    run_checks,
)
from distributed_training.sizes import SIZES
from tests.unit.conftest import CPU_MACHINE, GPU_MACHINE, named_strategy, refused

GIB = 2**30


@pytest.fixture(autouse=True)
def _no_extensions_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


def situation(tmp_path, strategy="zero2", machine=CPU_MACHINE, num_processes=2, **config):
    built = build_config(
        {
            "model": "gpt2-tiny",
            "precision": "fp32",
            "output_dir": str(tmp_path / "runs"),
            "strategy": strategy,
            **config,
        }
    )
    return Situation(
        config=built,
        strategy=named_strategy(strategy),
        machine=machine,
        size=SIZES[built.model],
        num_parameters_here=SIZES[built.model].num_parameters,
        dp_size=num_processes,
        processes_here=num_processes,
        offload_dir=tmp_path / "offload",
    )


def with_gpus(**changes):
    return dataclasses.replace(GPU_MACHINE, **changes)


def hide_package(monkeypatch, name):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda package: None if package == name else find_spec(package)
    )


def hide_libaio(monkeypatch, tmp_path):
    """CPATH comes before the system's folders: this header stops the compiler."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "libaio.h").write_text("#error hidden by the test\n")
    monkeypatch.setenv("CPATH", str(tmp_path / "hidden"))


@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_rehearsal_on_this_machine_passes(strategy, tmp_path):
    run_checks(situation(tmp_path, strategy))


def test_a_rehearsal_of_infinity_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "has_libaio", lambda: True)
    run_checks(situation(tmp_path, "infinity"))
    with refused("strategy='infinity' with model='gpt2' needs a GPU"):
        run_checks(situation(tmp_path, "infinity", model="gpt2"))


def test_only_tensors_too_small_to_swap_are_right_without_a_gpu(tmp_path):
    for strategy in ("dp", "zero3", "offload"):  # which swap no parameters
        check_swapping(situation(tmp_path, strategy, model="gpt2-xl"))
    check_swapping(situation(tmp_path, "infinity", model="gpt2-tiny"))
    check_swapping(situation(tmp_path, "infinity", GPU_MACHINE, model="gpt2-xl"))
    with refused("model='gpt2-medium' needs a GPU", "overwrites", "set model to gpt2-tiny"):
        check_swapping(situation(tmp_path, "infinity", model="gpt2-medium"))


@pytest.mark.parametrize("name", ["torch", "deepspeed"])
def test_missing_package(name, tmp_path, monkeypatch):
    hide_package(monkeypatch, name)
    with refused(f"the package {name} is not installed", "pip install -r requirements.txt"):
        check_packages(situation(tmp_path, "zero2"))


def test_native_strategies_do_not_need_deepspeed(tmp_path, monkeypatch):
    hide_package(monkeypatch, "deepspeed")
    check_packages(situation(tmp_path, "fsdp"))
    with refused("strategy='zero1' needs it"):
        check_packages(situation(tmp_path, "zero1"))


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_trackers_are_needed_when_asked_for(name, tmp_path, monkeypatch):
    hide_package(monkeypatch, name)
    check_packages(situation(tmp_path))
    with refused(f"log_to='{name}' needs it", f"pip install {name}"):
        check_packages(situation(tmp_path, log_to=name))


def test_no_more_processes_than_gpus(tmp_path):
    check_gpus(situation(tmp_path, machine=with_gpus(num_gpus=4), num_processes=4))
    check_gpus(situation(tmp_path, machine=CPU_MACHINE, num_processes=64))
    with refused("5 processes", "has 4 GPUs", "--num_gpus 4"):
        check_gpus(situation(tmp_path, machine=with_gpus(num_gpus=4), num_processes=5))
    with refused("has 1 GPU;"):
        check_gpus(situation(tmp_path, machine=with_gpus(num_gpus=1), num_processes=2))


def test_processes_on_other_machines_do_not_count(tmp_path):
    far = dataclasses.replace(
        situation(tmp_path, machine=with_gpus(num_gpus=4), num_processes=8), processes_here=4
    )
    check_gpus(far)


def test_state_must_fit_the_gpu(tmp_path):
    """gpt2-xl: 1.5576e9 parameters at 16 bytes are 23.2 GiB; over 4 GPUs zero3 needs 5.8."""
    small = with_gpus(gpu_memory_bytes=16 * GIB, gpu_name="Small")
    xl = {"model": "gpt2-xl", "precision": "bf16", "machine": small, "num_processes": 4}
    with refused("gpt2-xl under dp needs 23.2 GiB", "Small has 16.0 GiB", "zero3, fsdp, tp or pp"):
        check_gpu_memory(situation(tmp_path, "dp", **xl))
    check_gpu_memory(situation(tmp_path, "zero3", **xl))
    check_gpu_memory(situation(tmp_path, "offload", **xl))
    check_gpu_memory(situation(tmp_path, "dp", **{**xl, "machine": CPU_MACHINE}))


def test_gpu_memory_boundary_is_the_estimate(tmp_path):
    needed = 16 * SIZES["gpt2"].num_parameters
    for room, fits in ((needed, True), (needed - 1, False)):
        here = situation(tmp_path, "dp", with_gpus(gpu_memory_bytes=room), model="gpt2")
        if fits:
            check_gpu_memory(here)
        else:
            with refused("GiB a GPU"):
                check_gpu_memory(here)


@pytest.mark.parametrize(
    ("strategy", "machine", "per_parameter"),
    [
        # each of 2 processes builds the model (4 bytes) and holds, a parameter:
        ("dp", CPU_MACHINE, 4 + 16),
        ("fsdp", CPU_MACHINE, 4 + 8),
        ("zero2", CPU_MACHINE, 4 + 4 + 2 + 6),
        ("dp", GPU_MACHINE, 4),
        ("offload", GPU_MACHINE, 4 + 6 + 2),
    ],
)
def test_host_memory_boundary_by_hand(strategy, machine, per_parameter, tmp_path):
    needed = 2 * per_parameter * SIZES["gpt2"].num_parameters
    machine = dataclasses.replace(machine, ram_bytes=needed)
    check_host_memory(situation(tmp_path, strategy, machine, model="gpt2"))
    machine = dataclasses.replace(machine, ram_bytes=needed - 1)
    with refused("2 processes need about", "GiB of RAM", "fewer processes"):
        check_host_memory(situation(tmp_path, strategy, machine, model="gpt2"))


def free_disk(monkeypatch, num_bytes):
    asked = []

    def disk_usage(folder):
        asked.append(Path(folder))
        return SimpleNamespace(free=num_bytes)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    return asked


@pytest.mark.parametrize(
    ("config", "per_parameter"),
    [
        ({}, 16 * 2 + 4),
        ({"keep_checkpoints": 3}, 16 * 4 + 4),
        ({"checkpoint_every": 0}, 4),
        ({"export": False}, 16 * 2),
        ({"checkpoint_every": 0, "export": False}, 0),
    ],
)
def test_disk_boundary_by_hand(config, per_parameter, tmp_path, monkeypatch):
    needed = per_parameter * SIZES["gpt2"].num_parameters
    asked = free_disk(monkeypatch, needed)
    check_disk(situation(tmp_path, model="gpt2", **config))
    assert asked == [tmp_path]  # the nearest folder that exists
    if needed:
        free_disk(monkeypatch, needed - 1)
        with refused(f"{tmp_path} has", "GiB free", "checkpoint_every to 0"):
            check_disk(situation(tmp_path, model="gpt2", **config))


def test_the_embedding_is_saved_at_both_ends_of_deepspeeds_pipeline(tmp_path, monkeypatch):
    size = SIZES["gpt2"]
    needed = 16 * 2 * (size.num_parameters + 50257 * 768)
    free_disk(monkeypatch, needed - 1)
    here = {"model": "gpt2", "export": False}
    check_disk(situation(tmp_path, "3d", **here))  # torch's checkpoints are by name: saved once
    with refused("GiB free"):
        check_disk(situation(tmp_path, "hybrid", **here))
    free_disk(monkeypatch, needed)
    check_disk(situation(tmp_path, "hybrid", **here))


def test_infinitys_files_need_room(tmp_path, monkeypatch):
    count = SIZES["gpt2"].num_parameters
    config = {"model": "gpt2", "checkpoint_every": 0, "export": False}
    free_disk(monkeypatch, 20 * count - 1)
    check_disk(situation(tmp_path, "offload", **config))
    with refused("offload_dir"):
        check_disk(situation(tmp_path, "infinity", **config))


def test_a_file_in_the_way_of_output_dir(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(f"{tmp_path / 'file'} is a file"):
        check_disk(situation(tmp_path, output_dir=str(tmp_path / "file" / "runs")))


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    with refused(f"{tmp_path} cannot be written to", "output_dir"):
        check_disk(situation(tmp_path))


def test_only_offload_builds_extensions():
    built = {
        name: needed_extensions(named_strategy(name))
        for name in ("dp", "zero1", "zero2", "zero3", "offload", "infinity", "fsdp")
    }
    assert {name: names for name, names in built.items() if names} == {
        "offload": ["cpu_adam"],
        "infinity": ["cpu_adam", "async_io"],
    }


def test_extensions_that_deepspeed_adds_by_itself():
    built = {
        (name, machine.num_gpus > 0): built_extensions(named_strategy(name), machine)
        for name in ("dp", "zero2", "offload", "infinity")
        for machine in (CPU_MACHINE, GPU_MACHINE)
    }
    assert built == {
        ("dp", False): [],
        ("dp", True): [],
        ("zero2", False): ["deepspeed_shm_comm"],
        ("zero2", True): [],
        ("offload", False): ["cpu_adam", "deepspeed_shm_comm"],
        ("offload", True): ["cpu_adam"],
        ("infinity", False): ["cpu_adam", "async_io", "pin_memory", "deepspeed_shm_comm"],
        ("infinity", True): ["cpu_adam", "async_io", "pin_memory"],
    }


def test_the_names_are_deepspeeds_own():
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    builders = (CPUAdamBuilder, AsyncIOBuilder, PinMemoryBuilder, ShareMemCommBuilder)
    names = built_extensions(named_strategy("infinity"), CPU_MACHINE)
    assert [builder().name for builder in builders] == names


def test_no_compiler(tmp_path, monkeypatch):
    """DeepSpeed compiles its own all-reduce, whatever the strategy, where there is no GPU."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    check_extensions(situation(tmp_path, "fsdp"))
    check_extensions(situation(tmp_path, "zero3", GPU_MACHINE))
    for strategy, machine in (("offload", GPU_MACHINE), ("zero3", CPU_MACHINE)):
        with refused("no no-such-compiler", "apt-get install g++", "dp, fsdp"):
            check_extensions(situation(tmp_path, strategy, machine))


needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("c++") is None, reason="no compiler here"
)


@needs_compiler
def test_infinity_without_libaio(tmp_path, monkeypatch):
    hide_libaio(monkeypatch, tmp_path)
    assert not has_libaio()
    check_extensions(situation(tmp_path, "offload"))
    with refused("strategy='infinity' needs libaio", "apt-get install libaio-dev"):
        check_extensions(situation(tmp_path, "infinity"))


@needs_compiler
def test_a_private_copy_of_libaio_counts(tmp_path, monkeypatch):
    (tmp_path / "libaio.h").write_text(
        "typedef struct io_context *io_context_t;\nint io_setup(int, io_context_t *);\n"
    )
    (tmp_path / "libaio.c").write_text(
        '#include "libaio.h"\nint io_setup(int n, io_context_t *c) { return n; }\n'
    )
    library = ["-shared", "-fPIC", "-o", tmp_path / "libaio.so"]
    subprocess.run(["cc", tmp_path / "libaio.c", *library], check=True)
    monkeypatch.setenv("CPATH", str(tmp_path))
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
    assert has_libaio()
    check_extensions(situation(tmp_path, "infinity"))


def test_no_c_compiler_is_no_libaio(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not has_libaio()


def make_lock(folder, age_s):
    folder.mkdir(parents=True)
    lock = folder / "lock"
    lock.write_text("")
    os.utime(lock, (time.time() - age_s,) * 2)
    return lock


def test_a_stale_lock_is_found_through_the_environment(tmp_path):
    lock = make_lock(tmp_path / "extensions" / "cpu_adam", age_s=600)
    with refused(f"{lock} is 10 minutes old", "for ever", f"rm {lock}"):
        check_extensions(situation(tmp_path, "offload"))
    check_extensions(situation(tmp_path, "zero2"))
    lock.unlink()
    check_extensions(situation(tmp_path, "offload"))


def test_a_stale_lock_is_found_in_torchs_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    version = sysconfig.get_python_version().replace(".", "")
    cache = tmp_path / ".cache" / "torch_extensions"
    make_lock(cache / "py27_cpu" / "cpu_adam", age_s=600)  # another Python's is not ours
    assert extension_folders("cpu_adam") == []
    lock = make_lock(cache / f"py{version}_cpu" / "cpu_adam", age_s=600)
    with refused(str(lock)):
        check_extensions(situation(tmp_path, "offload"))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "offload", "infinity"])
def test_a_stale_lock_of_deepspeeds_own_extension(strategy, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "has_libaio", lambda: True)
    lock = make_lock(tmp_path / "extensions" / "deepspeed_shm_comm", age_s=600)
    with refused(str(lock), f"rm {lock}"):
        check_extensions(situation(tmp_path, strategy))
    check_extensions(situation(tmp_path, strategy, GPU_MACHINE))
    check_extensions(situation(tmp_path, "fsdp"))


def test_a_fresh_lock_is_somebodys(tmp_path):
    check_extension_lock(make_lock(tmp_path / "cpu_adam", age_s=5).parent)
    (tmp_path / "empty").mkdir()
    check_extension_lock(tmp_path / "empty")


def test_an_old_lock_of_a_build_that_runs_is_left_alone(tmp_path):
    folder = make_lock(tmp_path / "cpu_adam", age_s=600).parent
    ninja = tmp_path / "ninja"
    shutil.copy(shutil.which("sleep"), ninja)
    build = subprocess.Popen([ninja, "60"], cwd=folder)
    try:
        check_extension_lock(folder)
    finally:
        build.kill()
        build.wait()
    with refused("no process here builds"):
        check_extension_lock(folder)


def test_every_check_is_run(tmp_path, monkeypatch):
    checks = [name for name in vars(preflight) if name.startswith("check_")]
    run = {check.__name__ for check in preflight.CHECKS}
    assert run == set(checks) - {"check_extension_lock"}  # which check_extensions calls


def test_shared_memory_of_a_default_container_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "SHARED_MEMORY", tmp_path)
    free_disk(monkeypatch, 64 * 2**20)
    with refused("64 MiB free", "132 MiB", "--shm-size=1g"):
        check_shared_memory(situation(tmp_path, "zero2"))


@pytest.mark.parametrize(("strategy", "machine"), [("zero2", GPU_MACHINE), ("dp", CPU_MACHINE)])
def test_shared_memory_is_used_by_deepspeed_without_gpus_only(
    strategy, machine, tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "SHARED_MEMORY", tmp_path)
    free_disk(monkeypatch, 0)
    check_shared_memory(situation(tmp_path, strategy, machine))


@pytest.mark.parametrize("path", ["a" * 300, "~nobody-of-that-name/a"])
def test_paths_that_pathlib_refuses(path, tmp_path):
    with refused("output_dir"):
        check_disk(situation(tmp_path, output_dir=path))


def test_needs_on_one_disk_are_added(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "offload").mkdir()
    here = situation(tmp_path, "infinity", model="gpt2", checkpoint_every=0)
    free_disk(monkeypatch, 23 * SIZES["gpt2"].num_parameters)  # 4 for runs, 20 for offload
    with refused(f"{tmp_path / 'runs'} and {tmp_path / 'offload'}", "GiB free"):
        check_disk(here)
    free_disk(monkeypatch, 24 * SIZES["gpt2"].num_parameters)
    check_disk(here)


def test_each_disk_is_asked_for_its_own(tmp_path, monkeypatch):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    asked = free_disk(monkeypatch, 20 * SIZES["gpt2"].num_parameters)
    here = situation(tmp_path, "infinity", model="gpt2", checkpoint_every=0)
    check_disk(dataclasses.replace(here, offload_dir=other))
    assert asked == [tmp_path, other]


def test_what_is_in_the_way_is_named_by_its_key(tmp_path):
    (tmp_path / "file").write_text("")
    here = situation(tmp_path, "infinity")
    with refused(f"{tmp_path / 'file'} is a file", "set offload_dir elsewhere"):
        check_disk(dataclasses.replace(here, offload_dir=tmp_path / "file" / "x"))
