"""Test the values on which ranks agree before the first step, and that ranks wait for a slow
rank."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from distributed_training.parallel import agree
from distributed_training.records.record import code
from distributed_training.settings.errors import UserError
from distributed_training.settings.request import build_config
from distributed_training.start import rendezvous
from distributed_training.supervise.process import Process
from tests.support import CPU_MACHINE, small_text

VALUES = {"model": "gpt2-tiny", "strategy": "dp", "dataset": str(small_text())}


def plan_on_two_ranks(tmp_path, **of_rank_1):
    """Plan on two threads that act as ranks without a process group. Return each rank's plan or
    error message."""
    store = dist.HashStore()

    def plan(rank):
        mine = {"output_dir": str(tmp_path / str(rank)), **(of_rank_1 if rank else {})}
        process = Process(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        ask = agree.gather_in(store, rank, 2)
        try:
            return rendezvous.agree_on_plan(build_config({**VALUES, **mine}), process, ask)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(plan, (0, 1)))


def test_ranks_wait_for_rank_0_to_read_the_data_without_a_time_limit(tmp_path, monkeypatch):
    """Ranks wait for rank 0 without a time limit. The 30-minute timeout of process groups does not
    apply, because no process group exists yet."""
    waited = threading.Event()
    data = rendezvous.plan_data
    read = data.read_data
    monkeypatch.setattr(rendezvous, "detect_machine", lambda: CPU_MACHINE)
    monkeypatch.setattr(
        rendezvous.plan_data, "read_data", lambda *given: waited.wait(60) and read(*given)
    )
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) > 20:
            waited.set()

    monkeypatch.setattr(agree.time, "sleep", nap)
    first, second = plan_on_two_ranks(tmp_path)
    assert first.num_steps > 0
    assert second == first


def test_a_rank_that_never_answers_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(agree, "PATIENCE_S", 0.1)
    with pytest.raises(agree.RunError, match="Another rank has not answered"):
        agree.gather_in(dist.HashStore(), 0, 2)("here")


def test_a_different_value_on_another_rank_is_named(tmp_path):
    for said in plan_on_two_ranks(tmp_path, seed=7):
        assert said.startswith(f"rank 1 on {os.uname().nodename} and rank 0 on ")
        assert "differ in seed. Rank 1 has 7, but rank 0 has 42. Start the same command" in said


def test_different_code_on_another_rank_is_named(tmp_path, monkeypatch):
    file = "distributed_training/train/loop.py"
    assert {file, "strategies/12_local_sgd/local_sgd.py"} <= code().keys()
    versions = iter([{file: "one"}, {file: "another"}])
    monkeypatch.setattr(rendezvous, "code", lambda: next(versions))
    for said in plan_on_two_ranks(tmp_path):
        assert said.startswith(f"rank 1 on {os.uname().nodename} and rank 0 on ")
