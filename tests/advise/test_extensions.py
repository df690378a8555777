"""The C++ extensions that DeepSpeed builds, and what stops a build."""

import os
import shutil
import subprocess
import sysconfig
import time

import pytest

from distributed_training.advise.checks import (
    built_extensions,
    check_extensions,
    has_libaio,
    refuse_stale_lock,
)
from tests.plan.helpers import plan_for
from tests.support import CPU_MACHINE, GPU_MACHINE, named_strategy, refused


@pytest.fixture(autouse=True)
def _no_extensions_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


def draft(tmp_path, strategy, machine=CPU_MACHINE):
    """A plan that no check has seen."""
    return plan_for(tmp_path, machine, checked=False, strategy=strategy)


@pytest.mark.parametrize(
    ("name", "needed", "of_deepspeeds_own"),
    [
        ("dp", [], []),
        ("3d", [], []),
        *((name, [], ["deepspeed_shm_comm"]) for name in ("zero1", "zero2", "zero3", "hybrid")),
        ("offload", ["cpu_adam"], ["deepspeed_shm_comm"]),
        ("infinity", ["cpu_adam", "async_io", "pin_memory"], ["deepspeed_shm_comm"]),
    ],
)
def test_extensions_that_are_built(name, needed, of_deepspeeds_own):
    """DeepSpeed reduces through shared memory where there are no GPUs."""
    strategy = named_strategy(name)
    assert built_extensions(strategy, GPU_MACHINE) == needed
    assert built_extensions(strategy, CPU_MACHINE) == needed + of_deepspeeds_own


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
    check_extensions(draft(tmp_path, "fsdp"))
    check_extensions(draft(tmp_path, "zero3", GPU_MACHINE))
    for strategy, machine in (("offload", GPU_MACHINE), ("zero3", CPU_MACHINE)):
        with refused("no no-such-compiler", "apt-get install g++", "dp, fsdp"):
            check_extensions(draft(tmp_path, strategy, machine))


needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("c++") is None, reason="no compiler here"
)


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
    check_extensions(draft(tmp_path, "infinity"))


def make_lock(folder, age_s):
    folder.mkdir(parents=True)
    lock = folder / "lock"
    lock.write_text("")
    os.utime(lock, (time.time() - age_s,) * 2)
    return lock


def test_a_stale_lock_is_found_in_torchs_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    version = sysconfig.get_python_version().replace(".", "")
    cache = tmp_path / ".cache" / "torch_extensions"
    make_lock(cache / "py27_cpu" / "cpu_adam", age_s=600)  # another Python's is not ours
    check_extensions(draft(tmp_path, "offload"))
    lock = make_lock(cache / f"py{version}_cpu" / "cpu_adam", age_s=600)
    with refused(str(lock)):
        check_extensions(draft(tmp_path, "offload"))


def test_an_old_lock_of_a_build_that_runs_is_left_alone(tmp_path):
    folder = make_lock(tmp_path / "extensions" / "cpu_adam", age_s=600).parent
    build = subprocess.Popen(["sleep", "60"], cwd=folder)
    try:
        refuse_stale_lock("cpu_adam")
    finally:
        build.kill()
        build.wait()
    with refused("no process here builds"):
        refuse_stale_lock("cpu_adam")
