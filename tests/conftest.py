"""Shared helpers: run the script as a user does, run cases in one process group, hide the Hub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "real_model_example.py"
# Small enough that importing torch is most of a run.
SMALL = {
    "model": "gpt2-tiny",
    "dataset": "embedded",
    "max_length": 32,
    "batch_size": 2,
    "num_samples": 32,
    "epochs": 1,
    "eval_samples": 8,
    "generate": None,
    "learning_rate": 1e-3,
}


def clean_environment(**extra: str) -> dict[str, str]:
    """This environment without launcher variables, without GPUs, without the network's Hub."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment.update(extra)
    return environment


def run_command(
    command: list[str], *, timeout_s: float = 240, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own, which is killed whole at the time limit."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{command} ran past {timeout_s} s\n{out[-3000:]}\n{err[-3000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def settings(values: dict[str, object]) -> list[str]:
    """--set arguments for CONFIG values."""
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def run_script(
    *arguments: str, small: bool = True, output_dir: Path | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """`python real_model_example.py` with SMALL settings first and `arguments` over them."""
    values = dict(SMALL) if small else {}
    if output_dir is not None:
        values["output_dir"] = str(output_dir)
    return run_command([sys.executable, SCRIPT, *settings(values), *arguments], **options)


def only_record(output_dir: Path) -> dict:
    """The record of the one run in a folder."""
    files = sorted(output_dir.glob("*/record.json"))
    assert len(files) == 1, f"expected one run in {output_dir}, found {files}"
    return json.loads(files[0].read_text())


def assert_ok(result: subprocess.CompletedProcess[str]) -> None:
    """Fail with the end of the output unless the exit code is 0."""
    assert result.returncode == 0, (
        f"exit code {result.returncode}\n--- stdout\n{result.stdout[-3000:]}"
        f"\n--- stderr\n{result.stderr[-3000:]}"
    )
