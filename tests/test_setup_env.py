"""strategies/setup_env.sh: which build of torch it asks for."""

import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.pool import ROOT

GPU = "#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n"
NO_GPU = "#!/bin/sh\nexit 9\n"


@pytest.fixture
def index():
    """A package index that answers."""
    server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
    server.shutdown()
    server.server_close()


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def installed(tmp_path, nvidia_smi, index):
    """What uv is told to install, by a copy of the folder, on a machine with this nvidia-smi."""
    shutil.copytree(ROOT / "strategies", tmp_path / "strategies")
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    programs, told = tmp_path / "bin", tmp_path / "told"
    programs.mkdir()
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    uv = f'#!/bin/sh\necho "$@" >> {told}\n'
    for name, text in {"nvidia-smi": nvidia_smi, "python3": python, "uv": uv}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", f"source {tmp_path}/strategies/setup_env.sh {tmp_path}/requirements.txt"],
        env={"PATH": path, "PYTORCH_CPU_INDEX": index, "HOME": os.environ["HOME"]},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, "nothing was installed"
    (line,) = [line for line in Path(told).read_text().splitlines() if "install" in line]
    return line, done.stderr


@pytest.mark.parametrize(
    ("nvidia_smi", "reached", "taken"),
    [(NO_GPU, True, True), (NO_GPU, False, False), (GPU, True, False)],
)
def test_the_cpu_build_is_taken_without_a_gpu_where_it_is_in_reach(
    nvidia_smi, reached, taken, index, tmp_path
):
    address = index if reached else "http://127.0.0.1:1/whl/cpu"
    line, said = installed(tmp_path, nvidia_smi, address)
    assert (f"--extra-index-url {address}" in line) == taken
    assert ("taking the CPU build" in said) == taken
