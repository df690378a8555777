"""Test how ranks detect lost and hanging ranks, and when they give up."""

import platform
import re
import threading
import time
import weakref

import pytest

from distributed_training.supervise.process import Process
from distributed_training.supervise.watch import LOST_S, Watch, describe_late_ranks, read_stacks


@pytest.fixture
def watch():
    watch = Watch(Process(rank=0, world_size=1, local_rank=0, local_world_size=1))
    yield watch
    watch.end()


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        ("torch/distributed/distributed_c10d", True),
        ("torch/nn/parallel/distributed", True),  # DDP's forward pass exchanges bucket sizes
        ("torch/_ops", True),  # a wait_tensor of tensor parallelism
        ("deepspeed/comm/torch", True),
        ("deepspeed/runtime/swap_tensor/async_swapper", False),
        # The frame of DeepSpeed's nvtx wrapper is ignored; the caller's frame decides.
        ("deepspeed/runtime/zero/partition_parameters > deepspeed/utils/nvtx", True),
        ("deepspeed/ops/adam/cpu_adam > deepspeed/utils/nvtx", False),
        ("user/script", False),
    ],
)
def test_stacks_that_wait_for_other_ranks_are_recognized(watch, file, waits):
    *callers, inner = (f"/site-packages/{name}.py" for name in file.split(" > "))
    gate = threading.Lock()
    namespace = {"gate": gate}
    exec(compile("def inside():\n    gate.acquire()", inner, "exec"), namespace)
    target = namespace["inside"]
    for caller in callers:
        caller_namespace = {"target": target}
        exec(compile("def outside():\n    target()", caller, "exec"), caller_namespace)
        target = caller_namespace["outside"]
    with gate:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        while all(function != "inside" for _, _, function in read_stacks()[thread.ident]):
            time.sleep(0.001)
        watch.set_activity("where another thread works", thread=thread.ident)
        assert watch._describe()["waits"] == waits
    thread.join(10)


def test_inspecting_a_thread_keeps_none_of_its_local_variables(watch, monkeypatch):
    class Tensor:
        pass

    tensors = weakref.WeakSet()
    entered, leave = threading.Event(), threading.Event()

    def work():
        tensor = Tensor()
        tensors.add(tensor)
        entered.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    num_alive = []

    def node():  # `_describe` calls this function at its end
        leave.set()
        thread.join()
        num_alive.append(len(tensors))
        return "n"

    monkeypatch.setattr(platform, "node", node)
    watch._describe()
    assert num_alive == [0]


def test_time_limit_follows_measured_steps_and_is_ten_minutes_for_all_else(watch):
    watch.end()
    watch.world_size, watch._min_limit_s = 2, 60.0
    watch.set_activity("saving step 3")
    watch._clock += 200  # time that does not belong to a step
    limits = []
    for seconds in (1, 5, 5, 300):
        watch.set_activity("step", is_step=True)
        limits.append(watch.limit_s)
        watch._clock += seconds
    watch.set_activity("step", is_step=True)
    assert [*limits, watch.limit_s] == [600, 60, 60, 100, 100]
    watch.set_activity("the end")
    assert watch.limit_s == 600
    watch._timeout_s = 7
    assert watch.limit_s == 7
    watch._min_limit_s = 600.0  # the minimum for compiled steps
    watch.set_activity("step", is_step=True)
    assert watch.limit_s == 7
    watch._steps_s.clear()  # the first step
    assert watch.limit_s == 600
    watch._timeout_s = 0
    assert watch.limit_s == 0, "never, also while the first step is compiled"
    watch._timeout_s, watch.world_size = None, 1
    assert watch.limit_s == 0, "nobody waits for it"


@pytest.mark.parametrize(
    ("heard_s", "answered_s", "reason"),
    [
        (LOST_S + 1, 2, "lost rank 0 during startup: no heartbeat for 30 s, so the rank is"),
        # The last heartbeat was read twice before the node was disconnected. The node's launcher is
        # also disconnected and must end.
        (LOST_S + 1, LOST_S - 1, ""),
        (LOST_S + 3, LOST_S + 1, "rank 1 on .* lost rank 0 on node0: no heartbeat"),
    ],
)
def test_a_frozen_rank_0_is_distinguished_from_a_lost_connection(
    watch, monkeypatch, heard_s, answered_s, reason
):
    watch.end()
    watch.rank, watch.world_size = 1, 2
    monkeypatch.setenv("MASTER_ADDR", "node0")
    watch._heartbeat_at, watch._response_at = watch._clock - heard_s, watch._clock - answered_s
    reasons = [""]
    monkeypatch.setattr(watch, "_give_up", lambda reason, *_: reasons.append(reason))
    watch._check_other_ranks()
    assert re.match(reason or "$", reasons[-1])


def test_the_rank_outside_of_a_collective_is_named_as_late():
    state = {"count": 3, "host": "n", "activity": "step 3", "where": "loop.py:126 _run_step"}
    states = [{**state, "waits": True}, {**state, "waits": False}, {**state, "waits": True}]
    text = "waiting for rank 1 on n, which is in step 3 at loop.py:126 _run_step"
    assert describe_late_ranks(states) == text
