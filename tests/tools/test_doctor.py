"""Test the checks of `doctor` on simulated machines."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest

from distributed_training.settings.errors import UserError
from distributed_training.tools import doctor
from tests.support import CPU_MACHINE, GPU_MACHINE

TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \t{link}\t{link}\t{link}\t0-15
GPU1\t{link}\t X \t{link}\t{link}\t0-15
GPU2\t{link}\t{link}\t X \t{link}\t0-15
GPU3\t{link}\t{link}\t{link}\t X \t0-15
"""


@pytest.fixture
def machine(monkeypatch):
    """Replace the results of nvidia-smi and torch. Return an object whose attributes set the
    results."""
    told = SimpleNamespace(link="NV18", used="3\n4\n2\n1\n", torch={})

    def run_program(program, *arguments, seconds=10):
        if "topo" in arguments:
            return TOPOLOGY.format(link=told.link)
        if program == "nvidia-smi":
            return told.used
        facts = {"torch": "2.11", "cuda": "13.0", "available": True, "nccl": "2.28", "bf16": True}
        return "" if told.torch is None else json.dumps({**facts, **told.torch}) + "\n"

    monkeypatch.setattr(doctor, "run_program", run_program)
    return told


def levels(findings):
    return {finding.topic: finding.level for finding in findings}


def test_problems_with_gpus_are_reported(machine):
    fine = levels([*doctor.check_gpus(GPU_MACHINE), *doctor.check_torch_and_driver(GPU_MACHINE)])
    assert fine == dict.fromkeys(("GPUs", "in use", "links", "torch", "bf16"), "ok")
    machine.link, machine.used = "SYS", "3\n40000\n2\n1\n"
    unknown = dataclasses.replace(GPU_MACHINE, gpu_name="Tensor 9000")
    findings = {finding.topic: finding for finding in doctor.check_gpus(unknown)}
    expected_levels = dict.fromkeys(("rates", "in use", "links"), "warn")
    assert levels(findings.values()) == {"GPUs": "ok", **expected_levels}
    assert "memory on GPU 1." in findings["in use"].text
    assert levels(doctor.check_gpus(CPU_MACHINE)) == {"GPUs": "warn"}
    machine.torch = {"available": False, "cuda": None}
    (finding,) = doctor.check_torch_and_driver(GPU_MACHINE)
    assert (finding.level, "sees no GPU" in finding.text) == ("fail", True)
    machine.torch = None
    assert levels(doctor.check_torch_and_driver(GPU_MACHINE)) == {"torch": "fail"}
    assert levels(doctor.check_torch_and_driver(CPU_MACHINE)) == {"torch": "ok"}


def test_a_full_or_unwritable_disk_is_reported(tmp_path, monkeypatch):
    room = SimpleNamespace(free=2**40)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: room)
    runs = tmp_path / "runs"
    assert [f.level for f in doctor.check_disk(runs)] == ["ok"]
    room.free = 2**20
    assert [f.level for f in doctor.check_disk(runs)] == ["warn"]
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    (finding,) = doctor.check_disk(runs)
    assert (finding.level, str(tmp_path) in finding.text) == ("fail", True)


def test_lines_fit_a_terminal_and_commands_can_be_copied(tmp_path, monkeypatch, capsys):
    lock = f"/{'a-long-folder/' * 8}lock"

    def find_lock(name):
        raise UserError(f"{lock} is old", fix=f"run:  rm {lock}")

    monkeypatch.setattr(doctor.checks, "check_extensions", find_lock)
    code = doctor.main(tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert f"rm {lock}" in [line.strip() for line in printed]
    paths = re.compile(f"{lock}|{tmp_path}")
    assert all(len(paths.sub("", line)) <= 80 for line in printed)
    assert {line[:4].strip() for line in printed[:-2]} <= {"ok", "warn", "fail", ""}
    assert code == 0
