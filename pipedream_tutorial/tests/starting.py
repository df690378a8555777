"""Starts the runtime as a user would, and sees to it that nothing of it is left. For the tests."""

import gc
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

FOLDER = Path(__file__).resolve().parent.parent
SCRIPT = [sys.executable, "pipedream_runtime.py", "--device", "cpu"]
FAST = ["--forward_ms", "0", "--backward_ms", "0", "--check_weights", "False"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
MARK = ("RUNTIME_TEST", str(os.getpid()))  # in the environment, which all processes inherit
ENVIRONMENT = os.environ | dict([MARK]) | {"PYTHONPATH": str(FOLDER)}


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Whatever a test started has ended by its end."""
    yield
    _, alive = psutil.wait_procs(_started(), timeout=10)
    for process in alive:
        process.kill()
    assert not alive


def _started():
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK[0]) == MARK[1]:
                found.append(process)
        except psutil.Error:  # not ours, or just ended
            continue
    return found


def run(arguments, *, start=SCRIPT, limit_s=100, cwd=FOLDER):
    """The finished process; past the limit subprocess.TimeoutExpired."""
    begun = time.monotonic()
    done = subprocess.run(
        [*start, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=ENVIRONMENT,
    )
    done.seconds = time.monotonic() - begun
    return done


def warm(arguments, num_stages, *, script=SCRIPT[1:], limit_s=60, before=None):
    """Like run(), but each stage is forked from a server that has imported torch, and finds what
    torchrun would set: without our launcher and the two seconds that torch takes to import.

    `before` is a function that each process calls first. Past the limit all are killed, which the
    exit code says.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    size = {"WORLD_SIZE": str(num_stages), "LOCAL_WORLD_SIZE": str(num_stages)}
    with tempfile.TemporaryDirectory() as folder:
        stages = []
        for rank in range(num_stages):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **dict([MARK])}
            streams = [Path(folder, f"{stream}{rank}") for stream in ("out", "err")]
            given = ([*script, *arguments], {**address, **size, **own}, streams, before)
            stages.append(server.Process(target=_be_a_stage, args=given))
            stages[-1].start()
        end = time.monotonic() + limit_s
        for stage in stages:
            stage.join(max(0, end - time.monotonic()))
        for stage in stages:
            stage.kill()
            stage.join()
        said = ("".join(path.read_text() for path in sorted(Path(folder).glob(f"{stream}*")))
                for stream in ("out", "err"))  # fmt: skip
        code = next((stage.exitcode for stage in stages if stage.exitcode), 0)
        return subprocess.CompletedProcess(script, code, *said)


# sympy, by way of symbolic_shapes: the first autograd.grad with grad_outputs imports it.
PRELOAD = [
    "torch.fx.experimental.symbolic_shapes", "pipedream.runtime.session", "pytest", "psutil",
]  # fmt: skip


def _be_a_stage(argv, environment, streams, before):
    gc.freeze()  # neither looked at again nor copied for that
    os.environ.update(environment)
    os.chdir(FOLDER)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    if before is not None:
        before()
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def _free_port():
    """Not one that Linux could give to a connection before rank 0 listens."""
    while True:
        port = random.SystemRandom().randrange(10_000, 29_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def last_line(text):
    return text.strip().splitlines()[-1]
