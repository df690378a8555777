import time

import numpy as np
import pytest
import torch

from distributed_training.records.metrics import PeakMemory, StepTimer, summarise_performance

CPU = torch.device("cpu")


def summarise(durations_s, device_name="NVIDIA H200"):
    return summarise_performance(
        durations_s, tokens_per_step=1000, flops_per_token=6_000_000_000, world_size=4,
        device_name=device_name,
    )  # fmt: skip


def test_throughput_and_mfu_by_hand():
    summary = summarise([9.0] * 5 + [0.5] * 10)
    assert summary["tokens_per_s"] == 2000
    assert summary["tokens_per_s_per_process"] == 500
    assert summary["mfu"] == pytest.approx(2000 * 6e9 / (4 * 989.5e12))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12),
        # These only begin like a known one.
        ("Quadro RTX 6000", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # a seventh of one
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_peaks_of_gpus(name, peak):
    summary = summarise([1.0], device_name=name)
    assert summary["peak_flops_per_gpu"] == peak
    assert (summary["mfu"] is None) == (peak is None)


def test_timer_leaves_out_what_lies_between_restart_and_mark(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 100.0, 101.5, 103.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = StepTimer(CPU)
    timer.restart()  # 0
    timer.mark()  # 1
    timer.mark()  # 3
    timer.restart()  # 100: evaluation took 97
    timer.mark()
    assert timer.durations_s() == [1.0, 2.0, 1.5]
    timer.mark()  # 103.5: looking at the durations stops no clock
    assert timer.durations_s() == [1.0, 2.0, 1.5, 2.0]


def test_cpu_memory_is_host_memory_only():
    memory = PeakMemory(CPU)
    memory.begin()
    block = np.ones(2**27 // 8)
    memory.end()
    numbers = memory.as_dict()
    assert numbers["peak_allocated_bytes"] is None
    assert numbers["peak_reserved_bytes"] is None
    assert block.nbytes < numbers["peak_host_bytes"] < 2**40
