"""Test the checks of `doctor` on simulated machines."""

import dataclasses
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from distributed_training.tools import doctor
from tests.support import CPU_MACHINE, GPU_MACHINE


@pytest.fixture
def machine(monkeypatch):
    """Replace the results of nvidia-smi and torch. Return an object whose attributes set the
    results."""
    told = SimpleNamespace(stdout="3\n4\n2\n1\n", sees_gpu=True)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: told)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: told.sees_gpu)
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28))
    return told


def levels(findings):
    return {finding.topic: finding.level for finding in findings}


def test_problems_with_gpus_are_reported(machine, monkeypatch):
    fine = levels([*doctor.check_gpus(GPU_MACHINE), *doctor.check_torch_and_driver(GPU_MACHINE)])
    assert fine == {"GPUs": "ok", "in use": "ok", "torch": "ok", "fla": "warn"}
    machine.stdout = "3\n40000\n2\n1\n"
    unknown = dataclasses.replace(GPU_MACHINE, gpu_name="Tensor 9000")
    findings = {finding.topic: finding for finding in doctor.check_gpus(unknown)}
    expected_levels = dict.fromkeys(("rates", "in use"), "warn")
    assert levels(findings.values()) == {"GPUs": "ok", **expected_levels}
    assert "memory on GPU 1." in findings["in use"].text
    assert levels(doctor.check_gpus(CPU_MACHINE)) == {"GPUs": "warn"}
    machine.sees_gpu = False
    (finding,) = doctor.check_torch_and_driver(GPU_MACHINE)
    assert (finding.level, "sees no GPU" in finding.text) == ("fail", True)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    assert levels(doctor.check_torch_and_driver(GPU_MACHINE)) == {"torch": "fail"}
    assert levels(doctor.check_torch_and_driver(CPU_MACHINE)) == {"torch": "ok"}

    def not_installed(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", not_installed)
    assert levels(doctor.check_torch_and_driver(CPU_MACHINE)) == {"torch": "fail"}


def test_a_full_or_unwritable_disk_is_reported(tmp_path, monkeypatch):
    room = SimpleNamespace(free=2**40)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: room)
    runs = tmp_path / "runs"
    assert [f.level for f in doctor.check_disk(runs)] == ["ok"]
    room.free = 2**20
    assert [f.level for f in doctor.check_disk(runs)] == ["warn"]
    (finding,) = doctor.check_disk(Path("/proc/runs"))
    assert (finding.level, "/proc/runs" in finding.text) == ("fail", True)


def test_lines_fit_a_terminal_and_commands_can_be_copied(tmp_path, monkeypatch, capsys):
    lock = f"/{'a-long-folder/' * 8}lock"
    finding = doctor.warn("Hub", f"{lock} is old", f"Run:\nrm {lock}")
    monkeypatch.setattr(doctor, "check_hub", lambda: iter([finding]))
    code = doctor.main(tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert f"rm {lock}" in [line.strip() for line in printed]
    paths = re.compile(f"{lock}|{tmp_path}")
    assert all(len(paths.sub("", line)) <= 80 for line in printed)
    assert {line[:4].strip() for line in printed[:-2]} <= {"ok", "warn", "fail", ""}
    assert code == 0
