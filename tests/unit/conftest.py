"""Helpers of the unit tests. No test here touches the network or starts a GPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from distributed_training import hub
from distributed_training.config import build_config
from distributed_training.errors import UserError
from distributed_training.machine import Machine
from distributed_training.strategy import Strategy, load_strategy
from distributed_training.tokenizer import EMBEDDED_DIR, Tokenizer

CPU_MACHINE = Machine(
    num_gpus=0,
    gpu_name=None,
    gpu_memory_bytes=0,
    compute_capability=(0, 0),
    ram_bytes=64 * 2**30,
    num_cpus=2,
)
GPU_MACHINE = dataclasses.replace(
    CPU_MACHINE,
    num_gpus=4,
    gpu_name="NVIDIA H200",
    gpu_memory_bytes=139 * 2**30,
    compute_capability=(9, 0),
    ram_bytes=512 * 2**30,
)


@contextlib.contextmanager
def refused(*words: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """The block raises UserError with a one-line text that holds every one of `words`."""
    with pytest.raises(UserError) as caught:
        yield caught
    text = str(caught.value)
    assert text.splitlines() == [text]
    for word in words:
        assert word in text


def named_strategy(name: str) -> Strategy:
    """One of the shipped strategies."""
    return load_strategy(build_config({"strategy": name}))


_START = {
    "schema_version": 1,
    "status": "running",
    "error": None,
    "config": {
        "model": "gpt2-medium",
        "strategy": "zero2",
        "max_length": 512,
        "precision": "bf16",
        "compile": True,
        "weights": "pretrained",
        "dataset": "wikitext-2",
        "tokenizer": "gpt2",
        "learning_rate": 5e-5,
        "lr_schedule": "cosine",
        "warmup_steps": 10,
    },
    "strategy": {
        "name": "zero2",
        "engine": "deepspeed",
        "sharding": "optimizer state, gradients",
    },
    "work": {"model": "gpt2-medium", "seed": 42, "global_batch_size": 32},
    "started_at": "2026-01-01T00:00:00+00:00",
    "run_dir": "runs/x",
    "world_size": 4,
    "topology": {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "tp": 1},
    "pipeline": None,
    "machine": {"gpu_name": "NVIDIA H200", "num_gpus": 4, "num_cpus": 64},
    "num_parameters": 354_823_168,
    "dtypes": {
        "parameters": "bf16, fp32 master copy",
        "arithmetic": "bf16",
        "gradients": "bf16",
        "optimizer_state": "fp32",
        "reduction": "bf16",
    },
    "estimated_state_bytes": {
        "parameters": 2**30,
        "gradients": 2**28,
        "optimizer": 3 * 2**28,
        "host": 0,
        "disk": 0,
    },
    "batch": {
        "global_batch_size": 32,
        "micro_batch_size": 4,
        "grad_accum_steps": 2,
        "dp_size": 4,
    },
    "data": {
        "num_train_samples": 1000,
        "num_validation_samples": 200,
        "real_token_share": 0.875,
        "steps_per_epoch": 32,
    },
    "num_steps": 64,
    "step": 0,
    "loss_curve": [],
    "evaluations": [],
    "epochs": [],
    "num_skipped_steps": 0,
}
_RESULTS = {
    "status": "ok",
    "step": 64,
    "loss_curve": [[1, 3.5], [64, 3.0625]],
    "evaluations": [
        {"step": 0, "loss": 3.5, "perplexity": 33.125},
        {"step": 64, "loss": 3.0, "perplexity": 20.0625},
    ],
    "performance": {
        "num_timed_steps": 59,
        "step_time_s": {"p10": 0.12, "p50": 0.125, "p90": 0.13, "p99": 0.2},
        "tokens_per_s": 131072.0,
        "mfu": 0.3141,
    },
    "memory": {
        "peak_allocated_bytes": 10 * 2**30,
        "peak_reserved_bytes": 12 * 2**30,
        "peak_host_bytes": 5 * 2**30,
        "by_rank": [{"peak_reserved_bytes": size * 2**30} for size in (12, 11, 10, 9)],
    },
    "disk": {"read_bytes": 0, "write_bytes": 640_000, "num_steps": 64},
}


def made_record(*, finished: bool = True, **changes: Any) -> dict[str, Any]:
    """A run's record as at its start or its end; `a__b=1` changes values["a"]["b"]."""
    values: dict[str, Any] = copy.deepcopy({**_START, **_RESULTS} if finished else _START)
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = values
        for part in parents:
            section = section[part]
        section[last] = value
    return values


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither cache nor Hub has anything, whatever this machine holds."""

    def fetch_all(repo_id: str, *_: object, **__: object) -> None:
        raise OSError(f"{repo_id} is hidden from unit tests")

    monkeypatch.setattr(hub, "fetch_all", fetch_all)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The one that the repository ships."""
    return Tokenizer(EMBEDDED_DIR)
