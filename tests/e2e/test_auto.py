"""Test strategy "auto": a run that runs out of memory early is restarted with a strategy that needs
less memory."""

import json
import sys

import pytest

from distributed_training.predict.memory import estimate_memory
from distributed_training.records.record import append_metrics, write_json
from distributed_training.settings.config import AUTO
from distributed_training.start.launch import ran_out_of_memory_early
from tests.conftest import SMALL, assert_ok, run_command, settings
from tests.e2e.support import run_folders
from tests.planner.helpers import plan_for
from tests.pool import ROOT
from tests.support import GPU_MACHINE, record_values, refused

# Runs the script on GPUs that are too small for dp.
SMALL_GPUS = """
import sys
sys.path.insert(0, {root!r})
import torch
import real_model_example
real_model_example.__file__ = __file__  # --num_gpus starts this script
from distributed_training.engines import native
from distributed_training.start import launch

launch.can_fork = lambda machine: False
Engine, steps, on_gpus = native.NativeEngine, [], []
right, start = Engine.train_step, Engine.__init__
torch.cuda.max_memory_allocated = lambda device: 0

def init(self, model, weights, plan, topology):
    on_gpus.append(plan.strategy.name)
    start(self, model, weights, plan, topology)

def train_step(self, batch):
    steps.append(batch)
    if on_gpus == ["dp"] and len(steps) == 3:
        raise torch.cuda.OutOfMemoryError("a fault made on purpose")
    return right(self, batch)

Engine.train_step, Engine.__init__ = train_step, init
raise SystemExit(real_model_example.main())
"""


def test_an_early_out_of_memory_restarts_with_a_strategy_that_needs_less(tmp_path):
    script = tmp_path / "small.py"
    script.write_text(SMALL_GPUS.format(root=str(ROOT)))
    values = {**SMALL, "output_dir": tmp_path / "runs", "export": False}
    result = run_command([sys.executable, script, "--num_gpus", "2", *settings(values)])
    assert_ok(result)
    folders = run_folders(tmp_path / "runs")
    old, new = (json.loads((folder / "record.json").read_text()) for folder in folders)
    assert (old["strategy"]["name"], old["status"], new["status"]) == ("dp", "oom", "ok")
    assert new["prediction"]["peak_bytes"] < old["prediction"]["peak_bytes"]
    assert new["config_requested"]["strategy"] == AUTO
    (note,) = [line for line in result.stdout.splitlines() if "Restarting with" in line]
    instead = f"{new['strategy']['name']} with batch_size=2"
    assert note == f"note: dp with batch_size=2 ran out of memory. Restarting with {instead}"


@pytest.mark.parametrize(
    ("status", "steps", "again"), [("oom", 2, True), ("oom", 25, False), ("failed", 2, False)]
)
def test_only_an_early_out_of_memory_starts_another_strategy(status, steps, again, tmp_path):
    write_json(tmp_path / "record.json", record_values(status=status))
    append_metrics(tmp_path, [{"step": step} for step in range(steps)])
    assert ran_out_of_memory_early(tmp_path) == again


def test_the_next_choice_is_predicted_to_need_less(tmp_path):
    words = {"checked": False, "model": "gpt2-large", "batch_size": AUTO}
    plan = plan_for(tmp_path, GPU_MACHINE, 4, **words)
    for _ in range(2):
        needed = estimate_memory(plan).needed_bytes
        plan = plan_for(tmp_path, GPU_MACHINE, 4, max_gpu_bytes=needed, **words)
        assert estimate_memory(plan).needed_bytes < needed
    with refused("gpt2-large"):
        plan_for(tmp_path, GPU_MACHINE, 4, max_gpu_bytes=2**20, **words)


@pytest.mark.parametrize(
    "config", [{"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}, {"dp_replicate": 2}, {"num_microbatches": 2}]
)
def test_values_set_by_the_user_are_kept(config, tmp_path):
    planned = plan_for(tmp_path, GPU_MACHINE, 4, checked=False, model="gpt2", **config)
    assert planned.requested.strategy == AUTO
    given = {**planned.mesh, "num_microbatches": planned.batch.num_microbatches}
    assert {key: given[key] for key in config} == config
