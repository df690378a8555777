"""Test that ranks wait for a slow rank before the first step, and that differences between ranks
are reported."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from distributed_training.parallel import agree
from distributed_training.records.record import code_checksums
from distributed_training.settings.errors import UserError
from distributed_training.settings.request import build_config
from distributed_training.start import launched
from distributed_training.supervise.process import Process
from tests.support import CPU_MACHINE, small_text

VALUES = {"model": "gpt2-tiny", "strategy": "dp", "dataset": str(small_text())}


def plan_on_two_ranks(tmp_path, **rank_1_values):
    """Make a plan on two threads that act as ranks without a process group. Return each rank's plan
    or error message."""
    store = dist.HashStore()

    def plan(rank):
        rank_values = {"output_dir": str(tmp_path / str(rank)), **(rank_1_values if rank else {})}
        process = Process(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        gather_values = agree.build_store_gather(store, rank, 2)
        try:
            return launched.agree_on_plan(
                build_config({**VALUES, **rank_values}), process, gather_values
            )
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(plan, (0, 1)))


def test_ranks_wait_for_rank_0_to_read_the_data_without_a_time_limit(tmp_path, monkeypatch):
    """Ranks wait for rank 0 without a time limit. The 30-minute timeout of process groups does not
    apply, because no process group exists yet."""
    may_continue = threading.Event()
    read_data = launched.read_data
    monkeypatch.setattr(launched, "detect_machine", lambda: CPU_MACHINE)
    monkeypatch.setattr(
        launched, "read_data", lambda *arguments: may_continue.wait(60) and read_data(*arguments)
    )
    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) > 20:
            may_continue.set()

    monkeypatch.setattr(agree.time, "sleep", sleep)
    first, second = plan_on_two_ranks(tmp_path)
    assert first.num_steps > 0
    assert second == first


def test_a_different_value_on_another_rank_is_named(tmp_path):
    for message in plan_on_two_ranks(tmp_path, seed=7):
        assert message.startswith(f"rank 1 on {os.uname().nodename} and rank 0 on ")
        assert "seed" in message


def test_different_code_on_another_rank_is_named(tmp_path, monkeypatch):
    file = "distributed_training/train/loop.py"
    assert {file, "strategies/12_local_sgd/local_sgd.py"} <= code_checksums().keys()
    versions = iter([{file: "one"}, {file: "another"}])
    monkeypatch.setattr(launched, "code_checksums", lambda: next(versions))
    for message in plan_on_two_ranks(tmp_path):
        assert message.startswith(f"rank 1 on {os.uname().nodename} and rank 0 on ")
