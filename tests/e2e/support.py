"""Helpers for the end-to-end tests: fake GPUs, background runs, and checks of error messages."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.conftest import clean_environment, heavy_pool, settings
from tests.pool import GRACE_S, ROOT, SCRIPT, free_port

FAULT_SCRIPT = ROOT / "tests/faults/soak_worker.py"
H200 = "NVIDIA H200, 143771, 9.0"


def launcher_command(launcher: str, values: dict[str, object], *arguments: str) -> list[str]:
    """Return the command that starts a run with `launcher`. "spawn" uses --num_gpus 2. "faulty"
    does the same with the faults of soak_worker.py."""
    script_arguments = [str(SCRIPT), *settings(values), *arguments]
    return {
        "python": [sys.executable, *script_arguments],
        "spawn": [sys.executable, *script_arguments, "--num_gpus", "2"],
        "faulty": [sys.executable, str(FAULT_SCRIPT), *script_arguments[1:], "--num_gpus", "2"],
        "torchrun": ["torchrun", "--standalone", "--nproc_per_node=2", *script_arguments],
        "deepspeed": [
            "deepspeed",
            "--num_gpus=2",
            f"--master_port={free_port()}",
            *script_arguments,
        ],
    }[launcher]


def clone(folder: Path) -> Path:
    """Copy the current versions of all files that git tracks, to imitate a fresh clone."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def find_command(document: str, start: str) -> list[str]:
    """Find a document's only command that begins with `start`, and return the command's words. The
    command may be in a code block or in a sentence."""
    text = (ROOT / document).read_text()
    matches = set(re.findall(rf"(?:^ *|`)({re.escape(start)}[^`#\n]*)", text, re.MULTILINE))
    assert len(matches) == 1, f"{document}: {sorted(matches)}"
    return shlex.split(matches.pop())


def fake_nvidia_smi(folder: Path, *gpus: str) -> str:
    """Create an nvidia-smi in `folder` that lists `gpus` ("name, MiB, capability"). Return a PATH
    that begins with `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index, gpu in enumerate(gpus):
        name, memory, capability = gpu.split(", ")
        rows.append(f"{index}, GPU-{index:08d}, {name}, {memory}, {capability}, [N/A]")
    script = folder / "nvidia-smi"
    script.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(rows) + "\nEND\n")
    script.chmod(0o755)
    return f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def run_case(case: str, values: dict[str, object], num_processes: int = 2, **job: object) -> str:
    """Run a case from fault_cases.py or node_cases.py. Return "" if the case succeeds, and the
    output of all processes if it fails."""
    job["arguments"] = [str(SCRIPT), *settings(values)]
    grace_s = 240 if "nodes" in job else GRACE_S
    try:
        heavy_pool().call(f"tests.e2e.{case}", job, num_processes=num_processes, grace_s=grace_s)
    except RuntimeError as error:
        return str(error)
    return ""


def final_weights(run_dir: Path) -> bytes:
    """Return the contents of the weights file that a run exported."""
    return (run_dir / "hf" / "model.safetensors").read_bytes()


def run_folders(output_dir: Path) -> list[Path]:
    """Return all run folders, excluding cache folders."""
    if not output_dir.is_dir():
        return []
    folders = (path for path in output_dir.iterdir() if not path.is_symlink())  # skip "latest"
    return sorted(path for path in folders if not path.name.startswith("."))


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Check that the exit code is 2 and that stderr contains a one-line error with all `words` and
    no traceback. If the line ends in "run:", a second line contains the suggested command."""
    text = f"exit code {result.returncode}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    assert result.returncode == 2, text
    assert "Traceback" not in result.stdout + result.stderr, text
    assert result.stderr.startswith("error: "), text
    assert result.stderr.endswith("\n"), text
    message, *command = result.stderr.splitlines()
    assert len(command) == message.lower().endswith("run:"), text
    assert all(line.startswith("  ") for line in command), text
    missing = [word for word in words if word not in result.stderr]
    assert not missing, f"{missing} not in: {result.stderr}"


@contextlib.contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen]:
    """Run a command in the background and write its output to `log`. When the `with` block ends,
    kill the command's remaining processes."""
    with open(log, "w") as out:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=clean_environment(LOG=str(log), **environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for remaining in processes_with(log):  # including orphans, and workers in other sessions
            with contextlib.suppress(psutil.NoSuchProcess):
                remaining.kill()
        process.wait()


def processes_with(log: Path) -> list[psutil.Process]:
    """Return the processes of the command that `running` started with this log file."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("LOG") == str(log):
                found.append(process)
    return found


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen, log: Path, timeout_s: float = 120
) -> None:
    """Wait until `condition()` is true. Fail if the process ends or the timeout expires first."""
    end = time.monotonic() + timeout_s
    while not condition():
        exit_code = process.poll()
        assert exit_code is None, f"ended with {exit_code} too early\n{log.read_text()[-3000:]}"
        assert time.monotonic() < end, f"waited {timeout_s} s\n{log.read_text()[-3000:]}"
        time.sleep(0.02)


def remaining_processes(text: str) -> list[str]:
    """Wait up to 60 seconds for processes with `text` in their command line to end.
    Return the command lines of the remaining processes."""
    end = time.monotonic() + 60
    while True:
        others = (
            process for process in psutil.process_iter(["cmdline"]) if process.pid != os.getpid()
        )
        lines = [
            " ".join([str(process.pid), *(process.info["cmdline"] or [])]) for process in others
        ]
        remaining = [line for line in lines if text in line]
        if not remaining or time.monotonic() > end:
            return remaining
        time.sleep(0.1)


def metrics(run_dir: Path) -> list[dict]:
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
