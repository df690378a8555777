"""Compare speed and memory with values computed by hand. Also test what the trackers write to
TensorBoard files, and how they call wandb and trackio."""

import time

import numpy as np
import pytest
import torch

from distributed_training.records.metrics import (
    PeakMemory,
    StepTimer,
    build_tracker,
    summarize_performance,
)

CPU = torch.device("cpu")


def summarize(durations_s, device_name="NVIDIA H200"):
    return summarize_performance(
        durations_s, tokens_per_step=1000, flops_per_token=6_000_000_000, world_size=4,
        device_name=device_name,
    )  # fmt: skip


def test_throughput_and_mfu_by_hand():
    summary = summarize([9.0] * 5 + [0.5] * 10)
    assert summary["tokens_per_s"] == 2000
    assert summary["mfu"] == pytest.approx(2000 * 6e9 / (4 * 989.5e12))
    assert summarize([1.0], "NVIDIA H1000")["mfu"] is None


def test_steps_without_elapsed_time_have_no_throughput():
    assert summarize([0.0] * 9)["tokens_per_s"] is None
    assert summarize([9.0] * 3 + [0.5, 0.0, 0.5, 0.0, 0.5, 0.5])["tokens_per_s"] == 2000


def test_timer_excludes_the_time_between_a_mark_and_a_restart(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 100.0, 101.5, 103.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = StepTimer(CPU)
    timer.restart()  # 0
    timer.mark()  # 1
    timer.mark()  # 3
    assert timer.durations_s() == [1.0, 2.0]
    timer.restart()  # 100, after an evaluation of 97 s
    timer.mark()
    assert timer.durations_s() == [1.5]
    timer.mark()  # 103.5: reading the durations does not stop the clock
    assert timer.durations_s() == [2.0]


def test_cpu_memory_is_host_memory_only():
    memory = PeakMemory(CPU)
    memory.begin()
    block = np.ones(2**27 // 8)
    memory.end()
    numbers = memory.as_dict()
    assert numbers["peak_allocated_bytes"] is None
    assert numbers["peak_reserved_bytes"] is None
    assert block.nbytes < numbers["peak_host_bytes"] < 2**40


ROW = {
    "step": 7, "epoch": 0, "loss": 2.5, "learning_rate": 1e-3, "grad_norm": None, "skipped": 1,
    "num_targets": 64, "step_time_s": 0.5, "tokens_per_s": 128.0,
}  # fmt: skip
EVALUATION = {"step": 8, "loss": 2.0, "perplexity": 7.4, "bits_per_byte": None}
ABOUT = {"seed": 1, "max_grad_norm": None, "model": "gpt2-tiny", "pack": True}
STEP = {
    "train/step": 7, "train/epoch": 0, "train/loss": 2.5, "train/learning_rate": 1e-3,
    "train/skipped": 1, "train/num_targets": 64, "train/step_time_s": 0.5,
    "train/tokens_per_s": 128.0,
}  # fmt: skip
EVALUATED = {"eval/step": 8, "eval/loss": 2.0, "eval/perplexity": 7.4}


def track(log_to, folder, step=0):
    """Log the rows of a short run with the tracker `log_to`. A positive `step` means that the run
    is resumed after this step."""
    tracker = build_tracker(log_to, folder, ABOUT, step)
    tracker.log("train", ROW)
    tracker.log("eval", EVALUATION)
    tracker.end()


def test_tensorboard_has_each_number_once_after_a_killed_run_resumes(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = build_tracker("tensorboard", tmp_path, ABOUT, 0)
    for step in range(5, 10):
        tracker.log("train", {**ROW, "step": step, "loss": 9.0})
    tracker.end()
    track("tensorboard", tmp_path, step=6)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    logged = {
        (name, event.step): event.value
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    }
    assert [logged.pop(("train/loss", step)) for step in (5, 6)] == [9.0, 9.0]
    expected = {(name, 7): value for name, value in STEP.items()}
    expected |= {(name, 8): value for name, value in EVALUATED.items()}
    assert {key: logged.pop(key) for key in expected} == pytest.approx(expected)
    assert {step for _, step in logged} == {5, 6}
