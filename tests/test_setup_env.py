"""Test which environment and which torch build strategies/setup_env.sh selects."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.hub_stub import serve
from tests.pool import ROOT

pytestmark = pytest.mark.processes
GPU = "#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n"
NO_GPU = "#!/bin/sh\nexit 9\n"


def installed(tmp_path, nvidia_smi, index):
    """Run a copy of setup_env.sh with a fake nvidia-smi and the given index for CPU builds. Return
    the arguments of `uv pip install`."""
    shutil.copytree(ROOT / "strategies", tmp_path / "strategies")
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    programs, uv_log = tmp_path / "bin", tmp_path / "uv.log"
    programs.mkdir()
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    uv = f'#!/bin/sh\necho "$@" >> {uv_log}\n'
    for name, text in {"nvidia-smi": nvidia_smi, "python3": python, "uv": uv}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", f"source {tmp_path}/strategies/setup_env.sh {tmp_path}/requirements.txt"],
        env={"PATH": path, "PYTORCH_CPU_INDEX": index, "HOME": os.environ["HOME"]},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, "setup_env.sh must fail, because the fake uv installs nothing"
    (line,) = [line for line in Path(uv_log).read_text().splitlines() if "pip install" in line]
    return line


@pytest.mark.parametrize(
    ("nvidia_smi", "is_index_reachable", "uses_cpu_build"),
    [(NO_GPU, True, True), (NO_GPU, False, False), (GPU, True, False)],
)
def test_cpu_build_is_installed_without_a_gpu_if_its_index_is_reachable(
    nvidia_smi, is_index_reachable, uses_cpu_build, tmp_path
):
    with serve({}) as hub:  # a package index that answers
        address = f"{hub.endpoint if is_index_reachable else 'http://127.0.0.1:1'}/whl/cpu"
        line = installed(tmp_path, nvidia_smi, address)
    assert (f"--extra-index-url {address}" in line) == uses_cpu_build


@pytest.mark.parametrize(
    ("options", "pin", "is_met"),
    [
        ([], "numpy==2.2.0.dev1", False),
        (["--ranges"], "numpy==2.2.0.dev1", True),
        (["--ranges"], "a-package-of-nobody==1", False),
    ],
)
def test_an_active_environment_may_have_other_versions_in_the_declared_ranges(
    options, pin, is_met, tmp_path
):
    (tmp_path / "requirements.txt").write_text(f"{pin}  # not the version that is installed\n")
    check = ROOT / "strategies/check_requirements.py"
    command = [sys.executable, str(check), *options, str(tmp_path / "requirements.txt")]
    assert (subprocess.run(command, timeout=60).returncode == 0) == is_met


@pytest.mark.parametrize("has_venv", [False, True])
def test_python_on_path_serves_if_it_has_the_packages_and_there_is_no_venv(has_venv, tmp_path):
    """A container activates no environment."""
    shutil.copytree(ROOT / "strategies", tmp_path / "strategies")
    (tmp_path / "requirements.txt").write_text("numpy\n")
    if has_venv:  # without the package
        (tmp_path / ".venv/bin").mkdir(parents=True)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    source = f"source {tmp_path}/strategies/setup_env.sh {tmp_path}/requirements.txt"
    done = subprocess.run(
        ["bash", "-c", f"uv() {{ exit 3; }}; {source} && command -v python"],
        env={"PATH": path, "PYTORCH_CPU_INDEX": "none"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    used = f"{Path(sys.executable).parent}/python\n"
    assert (done.returncode, done.stdout) == ((3, "") if has_venv else (0, used))
