"""Test how ranks publish their activity, and how the launching process finds ranks that hang."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from distributed_training.start import progress as progress_module
from distributed_training.start.progress import (
    Activity,
    Monitor,
    Progress,
    Rank,
    describe_suspects,
    find_limit,
)
from tests.conftest import clean_environment

# A process beside threads of C++ that enter and leave Python all the time
CROWDED = """
import ctypes, sys, time
from distributed_training.start.progress import Progress
progress = Progress(int(sys.argv[1]))
pthreads = ctypes.CDLL("libpthread.so.0")
callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
print("ready", flush=True)
end = time.monotonic() + 4
while time.monotonic() < end:
    threads = [ctypes.c_ulong() for _ in range(20)]
    for thread in threads:
        pthreads.pthread_create(ctypes.byref(thread), None, callback, None)
    for thread in threads:
        pthreads.pthread_join(thread, None)
"""


def config(timeout_s=None, compile=False):
    return SimpleNamespace(hang_timeout_s=timeout_s, compile=compile, profile=False)


@pytest.mark.parametrize(
    ("timeout_s", "world_size", "compile", "name", "steps_s", "limit_s"),
    [
        (None, 2, False, "the export", [5], 600),
        (None, 2, False, "step 1", [], 600),
        (None, 2, False, "step 4", [1, 1, 300], 60),
        (None, 2, False, "step 4", [5, 5, 5], 100),
        (None, 2, True, "step 4", [5, 5, 5], 600),
        (None, 1, False, "step 1", [], 0),  # nobody waits for it
        (7, 1, False, "the export", [], 7),
        (7, 2, True, "step 1", [], 7),
        (0, 2, True, "step 1", [], 0),
    ],
)
def test_limit_of_an_activity(timeout_s, world_size, compile, name, steps_s, limit_s):
    assert find_limit(config(timeout_s, compile), world_size, name, steps_s) == limit_s


@pytest.fixture
def ranks():
    """Return two ranks that sleep."""
    started = {
        number: Rank(process=subprocess.Popen(["sleep", "60"]), report_fd=os.memfd_create("report"))
        for number in range(2)
    }
    yield started
    for rank in started.values():
        rank.process.kill()
        rank.process.wait()
        os.close(rank.report_fd)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that the monitor reads and the test moves."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def check(ranks, clock):
    """Return a function that checks once per second for `seconds` seconds, and returns the last
    reason."""

    def run(monitor, seconds):
        for _ in range(seconds):
            clock.now += 1
            if reason := monitor.check(ranks):
                break
        return reason

    return run


def test_the_rank_that_hangs_is_named_at_half_the_limit_and_at_the_limit(
    ranks, check, clock, capsys
):
    monitor = Monitor(config(20), 2)
    publishers = [Progress(rank.report_fd) for rank in ranks.values()]
    assert check(monitor, 100) == "", "startup has no limit"
    for publisher in publishers:
        publisher.set_activity("step 1")
    publishers[0].set_activity("step 2")
    assert check(monitor, 11) == ""
    assert capsys.readouterr().err == ""
    clock.now += 1000  # this process was suspended; this counts as 2 s
    assert check(monitor, 2) == ""
    assert "waiting for rank 1, which is in step 1" in capsys.readouterr().err
    assert "step 1 has hung for 2" in check(monitor, 20)
    publishers[1].set_activity("step 2")
    assert check(monitor, 15) == ""
    for publisher in publishers:
        publisher.set_activity("")
    assert check(monitor, 100) == "", "rank 0 may upload the model"


def test_a_stopped_rank_is_named_within_the_minute(ranks, check):
    monitor = Monitor(config(0), 2)
    os.kill(ranks[1].process.pid, signal.SIGSTOP)
    while not ranks[1].is_stopped():
        time.sleep(0.01)
    assert "rank 1" in check(monitor, 60)
    ranks[1].process.send_signal(signal.SIGCONT)
    while ranks[1].is_stopped():
        time.sleep(0.01)
    assert check(monitor, 60) == ""


def test_the_contents_of_a_progress_file_are_only_shown(ranks, check, monkeypatch):
    """Whatever another process writes, signals go to the ranks, and control characters do not
    reach the terminal."""
    signaled = []
    assert ranks[1].read_activity() == Activity()
    Progress(ranks[0].report_fd).set_activity("step 1")
    os.pwrite(ranks[1].report_fd, f"1 \x1b{os.getppid()}".encode().ljust(128), 0)
    assert ranks[1].read_activity() == Activity(1, f"\\x1b{os.getppid()}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, signum: signaled.append(pid))
        assert "has hung" in check(Monitor(config(5), 2), 20)
    assert set(signaled) == {rank.process.pid for rank in ranks.values()}


@pytest.mark.parametrize(
    ("innermost", "in_collective"),
    [
        ("torch/distributed/distributed_c10d", True),
        ("torch/nn/parallel/distributed", True),  # DDP's forward pass exchanges bucket sizes
        ("torch/_ops", True),  # a wait_tensor of tensor parallelism
        ("deepspeed/comm/torch", True),
        ("deepspeed/utils/nvtx", True),  # the wrapper of DeepSpeed's functions
        ("deepspeed/runtime/swap_tensor/async_swapper", False),
        ("user/script", False),
    ],
)
def test_stacks_that_wait_for_other_ranks_are_recognized(innermost, in_collective, ranks):
    files = (innermost, "deepspeed/runtime/zero/stage3", "distributed_training/train/loop")
    lines = [f'  File "/packages/{file}.py", line 7 in run' for file in files]
    os.pwrite(ranks[0].report_fd, "\n".join(["Stack", *lines]).encode(), 128)
    assert ranks[0].read_stack() == (in_collective, " at loop.py:7 run")


def test_the_ranks_that_the_others_wait_for():
    late, ahead = Activity(3, "step 3"), Activity(4, "step 4")
    waits, works = (True, " at a.py:1 f"), (False, " at b.py:2 g")
    text = describe_suspects({0: ahead, 1: late, 2: ahead}, dict.fromkeys(range(3), waits))
    assert text.endswith("rank 1, which is in step 3 at a.py:1 f")
    text = describe_suspects({0: late, 1: late}, {0: waits, 1: works})
    assert text.endswith("rank 1, which is in step 3 at b.py:2 g")
    text = describe_suspects({0: late, 1: late}, {0: waits, 1: waits})
    assert "all ranks are in step 3 at a.py:1 f" in text


def test_stacks_can_be_read_beside_threads_of_other_languages():
    report_fd = os.memfd_create("report")
    command = [sys.executable, "-c", CROWDED, str(report_fd)]
    process = subprocess.Popen(
        command, pass_fds=[report_fd], stdout=subprocess.PIPE, env=clean_environment()
    )
    assert process.stdout.readline() == b"ready\n"
    rank = Rank(process=process, report_fd=report_fd)
    stacks = set()
    while process.poll() is None:
        rank.request_stack()
        time.sleep(0.01)
        stacks.add(os.pread(report_fd, 100, 128))
    assert process.returncode == 0
    assert any(stack.startswith(b"Stack (most recent call first)") for stack in stacks)
    os.close(report_fd)


def test_without_our_launching_process_a_timer_ends_a_rank_that_hangs():
    publisher = Progress()
    for limit_s, seconds in ((60.0, 90.0), (0.0, 0.0)):
        publisher.limit_s = limit_s
        try:
            publisher.set_activity("step 1")
            assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(seconds, abs=1)
        finally:
            publisher.set_activity("")
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
