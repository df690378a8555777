"""Who plans, who prints, who trains."""

from __future__ import annotations

import contextlib
import io
import json
import sys

import pytest

from distributed_training.plan import machine
from distributed_training.run import launch, worker
from distributed_training.run import prepare as make
from distributed_training.run.prepare import reserve_run_dir
from distributed_training.run.process import Process
from distributed_training.settings.config import build_config
from tests.conftest import SCRIPT, SMALL, heavy_pool, only_record
from tests.support import CPU_MACHINE, GPU_MACHINE, refused, small_plan


@pytest.fixture
def start(text, tmp_path, monkeypatch):
    """Calls start() on a machine of this test, as a process of this test."""
    monkeypatch.setattr(launch, "prepare_environment", lambda *_: None)
    alone = Process(rank=0, world_size=1, local_rank=0, local_world_size=1)
    monkeypatch.setattr(launch, "single_process", lambda: alone)
    monkeypatch.setattr(worker, "run", lambda given, process, _: (given, process))

    def call(*, num_gpus=None, dry_run=False, machine=CPU_MACHINE, process=None, **config):
        values = {
            "strategy": "dp", "model": "gpt2-tiny", "output_dir": str(tmp_path / "runs"),
            "dataset": str(text), "num_samples": 4,
        }  # fmt: skip
        monkeypatch.setattr(launch, "detect_machine", lambda: machine)
        monkeypatch.setattr(launch, "current_process", lambda _: process)
        config = build_config({**values, **config})
        return launch.start(
            config, num_gpus=num_gpus, dry_run=dry_run, script=SCRIPT, arguments=["--a", "b c"]
        )

    return call


def test_a_dry_run_prints_the_plan_and_starts_nothing(start, tmp_path, capsys):
    assert start(dry_run=True, num_gpus="2") == 0
    out = capsys.readouterr().out
    assert "python real_model_example.py --num_gpus 2 --a 'b c'\n" in out
    for rank, said in ((0, "launch command\n  (this one)\n"), (1, "")):
        process = Process(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        assert start(dry_run=True, process=process) == 0  # under a launcher rank 0 prints
        out = capsys.readouterr().out
        assert said in out
        assert bool(said) == bool(out)
    with refused("--num_gpus 3", "started 2"):
        start(process=process, num_gpus="3")
    assert list(tmp_path.iterdir()) == []


def run_without_planning(run_dir):
    """In a process of its own, where nothing that plans can be called."""
    make.make_plan = make.find_sources = machine.detect_machine = None
    sys.stdin = io.StringIO(f"{run_dir}\n")
    assert launch.start_planned() == 0


def test_a_process_acts_on_plan_json_and_plans_nothing_itself(text, tmp_path):
    config = {**SMALL, "dataset": str(text), "max_steps": 9}
    plan = reserve_run_dir(small_plan(tmp_path / "runs", **config))
    values = json.loads((plan.run_dir / "plan.json").read_text())
    values["num_steps"] = 1
    (plan.run_dir / "plan.json").write_text(json.dumps(values))
    heavy_pool().call("tests.run.test_start:run_without_planning", plan.run_dir, num_processes=1)
    assert only_record(tmp_path / "runs")["num_steps"] == 1


def test_auto_on_a_gpu_is_confirmed_and_a_named_strategy_is_not(start, monkeypatch):
    begun = []
    monkeypatch.setattr(launch, "starting", lambda *_: contextlib.nullcontext([]))
    monkeypatch.setattr(launch, "spawn", lambda plan, *_: begun.append(plan.num_processes) or 0)
    assert start(machine=GPU_MACHINE, strategy="auto") == 0
    assert start(machine=GPU_MACHINE, strategy="auto", num_gpus="2") == 0
    start(machine=CPU_MACHINE, strategy="auto")
    start(machine=GPU_MACHINE)
    assert begun == [1, 2]
