"""real_model_example.start: who plans, who prints, who trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import real_model_example
from distributed_training import launch
from distributed_training.launch import Process
from tests.unit.conftest import CPU_MACHINE, GPU_MACHINE, refused

SCRIPT = Path(real_model_example.__file__).resolve()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A corpus that is read in no time."""
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text("A text that is not very long.\n" * 1000)
    return file


@pytest.fixture
def start(text, tmp_path, monkeypatch):
    """Calls start() on a machine of this test, as a process of this test."""
    monkeypatch.setattr(launch, "prepare_environment", lambda *_: None)
    monkeypatch.setattr(launch, "alone", lambda: "alone")
    monkeypatch.setattr(real_model_example, "work", lambda *arguments: ("worked", *arguments))

    def call(*argv, machine=CPU_MACHINE, process=None):
        argv = [
            "--strategy", "dp", "--model", "gpt2-tiny", "--set", f"output_dir={tmp_path / 'runs'}",
            "--set", f"dataset={text}", "--set", "num_samples=4", *argv,
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *argv])
        monkeypatch.setattr("distributed_training.machine.detect_machine", lambda: machine)
        monkeypatch.setattr(launch, "current_process", lambda _: process)
        return real_model_example.start(launch.parse_arguments(argv, ""), launch, SCRIPT)

    return call


def rank(number, world_size=2, local_world_size=None):
    local_world_size = local_world_size or world_size
    return Process(
        rank=number,
        world_size=world_size,
        local_rank=number % local_world_size,
        local_world_size=local_world_size,
    )


def test_a_dry_run_under_a_launcher_is_printed_once_and_trains_nothing(start, tmp_path, capsys):
    assert start("--dry-run", process=rank(0)) == 0
    out = capsys.readouterr().out
    assert "launch command\n  (this one)\n" in out
    assert "x data-parallel 2" in out
    assert start("--dry-run", process=rank(1)) == 0
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_on_several_machines_counts_the_processes_of_each(start, capsys):
    assert start("--dry-run", machine=GPU_MACHINE, process=rank(0, 8, local_world_size=4)) == 0
    assert "x data-parallel 8" in capsys.readouterr().out


def test_a_dry_run_refuses_what_the_run_would(start):
    for process in (None, rank(0)):
        with refused("max_length=1025"):
            start("--dry-run", "--set", "max_length=1025", process=process)
    with refused("none.txt' does not exist"):
        start("--dry-run", "--set", "dataset=/none.txt")


def test_a_process_of_a_launcher_works(start, tmp_path):
    run_dir = tmp_path / "mine"
    answer = start("--run_dir", str(run_dir), process=rank(1))
    assert answer[0] == "worked"
    assert answer[2:] == (CPU_MACHINE, rank(1), run_dir)


def test_one_process_works_alone_and_says_what_lies_idle(start, capsys):
    assert start()[2:] == (CPU_MACHINE, "alone", None)
    assert capsys.readouterr().out == ""
    assert start(machine=GPU_MACHINE)[2:] == (GPU_MACHINE, "alone", None)
    assert capsys.readouterr().out == "using 1 of 4 GPUs; --num_gpus all uses all\n"


def test_several_processes_are_spawned_with_the_same_arguments(start, monkeypatch):
    spawned = []
    monkeypatch.setattr(launch, "spawn", lambda *arguments: spawned.append(arguments) or 7)
    assert start("--num_gpus", "2") == 7
    ((command, plan),) = spawned
    assert plan.num_processes == 2
    assert command[command.index(str(SCRIPT)) + 1 :] == [*sys.argv[1:], "--run_dir",
                                                         str(plan.run_dir)]  # fmt: skip


def test_too_little_data_starts_no_process(start, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_: pytest.fail("started a process"))
    with refused("num_samples=99999999"):
        start("--num_gpus", "2", "--set", "num_samples=99999999")
