"""Test the parts of a worker that do not need a second process."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distributed_training.models import find_model
from distributed_training.records.record import load_record
from distributed_training.settings.request import build_config
from distributed_training.start import launched, worker
from distributed_training.start.ranks import single_process
from distributed_training.supervise import ending
from distributed_training.supervise.process import Process
from distributed_training.train.run import build_model
from tests.planner.helpers import plan_for
from tests.support import (
    CPU_MACHINE,
    GPU_MACHINE,
    cpu_topology,
    draw_model,
    refused,
    start_test_record,
)


def test_initial_weights_are_rounded_to_the_compute_dtype(tmp_path):
    """DeepSpeed starts from rounded weights. Therefore all strategies start from rounded weights,
    which are stored in fp32."""
    plan = plan_for(tmp_path, CPU_MACHINE, 1, precision="bf16", seed=7)
    model, weights, _ = build_model(plan, cpu_topology(plan))
    weights.fill(model, torch.device("cpu"))
    actual = dict(model.named_parameters())
    expected = draw_model(find_model("gpt2-tiny"), seed=7).state_dict()
    assert actual.keys() == expected.keys()  # the output layer is still tied to the embedding
    for name, parameter in actual.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected[name].bfloat16().float()), name


def test_running_out_of_memory_names_the_peak_and_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 2**30)
    plan = plan_for(tmp_path, GPU_MACHINE, 2, strategy="dp", batch_size=128, max_length=128)
    text = ending.explain_out_of_memory(plan, cpu_topology(plan), "tried to allocate")
    assert "rank 0: tried to allocate" in text
    assert "1.00 GiB" in text
    assert "activation_checkpointing=selective" in text


@pytest.mark.parametrize(
    ("error", "recorded", "has_traceback"),
    [
        (IndexError("bad index: 1"), "bad index: 1", True),
        (RuntimeError("No space left on device"), "No space left", True),  # said, not known
        (OSError(28, "No space left on device"), "--resume auto", False),
    ],
)
def test_only_causes_known_by_type_or_number_are_explained(
    error, recorded, has_traceback, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start_test_record(tmp_path)
    plan = SimpleNamespace(run_dir=tmp_path, has_node_local_files=False, offload_dir=None)
    with pytest.raises(SystemExit, match="1"):
        ending.end_failed(plan, SimpleNamespace(rank=0, local_rank=0), error)
    assert recorded in load_record(tmp_path).error
    assert (type(error).__name__ in capsys.readouterr().err) is has_traceback


PROCESS = Process(rank=4, world_size=5, local_rank=4, local_world_size=5)


@pytest.mark.parametrize(
    ("planned", "seen", "device", "variable"),
    [
        (
            8,
            8,
            torch.device("cuda", 4),
            ("TORCH_CUDA_ARCH_LIST", "9.0"),
        ),  # compute capability of this machine's GPU
        (0, 0, torch.device("cpu"), ("DS_ACCELERATOR", "cpu")),
        (5, 4, ("5 processes", "4 GPUs", "--gpus-per-node"), ()),
        (5, 0, ("torch", "GPU"), ()),
    ],
)
def test_each_process_gets_a_device_or_is_refused(planned, seen, device, variable, monkeypatch):
    monkeypatch.setattr(os, "environ", {"TORCH_CUDA_ARCH_LIST": "8.0 9.0a"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    if variable:
        assert worker.prepare_device(planned, PROCESS) == device
        assert variable in os.environ.items()
    else:
        with refused(*device):
            worker.prepare_device(planned, PROCESS)


def test_a_full_cache_disk_is_reported_to_all_ranks(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "cache")

    monkeypatch.setattr(launched, "read_data", full)
    monkeypatch.setattr(launched, "detect_machine", lambda: CPU_MACHINE)
    sent = []
    config = build_config({"model": "gpt2-tiny", "strategy": "dp", "output_dir": str(tmp_path)})
    with pytest.raises(OSError, match="cache") as raised:
        launched.agree_on_plan(
            config, replace(PROCESS, rank=0), lambda value: sent.append(value) or [value]
        )
    assert sent[-1] == ("OSError", 28, "No space left on device", "cache")
    assert raised.value.errno == 28


def test_a_stopped_build_leaves_no_compiler(tmp_path, monkeypatch):
    compiler = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(worker, "train", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(worker, "end_failed", lambda *_: None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    process = single_process()
    worker.run(plan_for(tmp_path, CPU_MACHINE, 1), process, dist.HashStore())
    assert compiler.wait(10) == -signal.SIGTERM
