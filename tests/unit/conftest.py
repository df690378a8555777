"""Helpers of the unit tests. No test here touches the network or starts a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

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
