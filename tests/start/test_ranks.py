"""Test that ranks start together, and that no ranks are left behind after one has failed or all
have been stopped."""

import functools
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from distributed_training.settings.errors import RunError, run_and_report_errors
from distributed_training.start import ranks as ranks_module
from distributed_training.start.ranks import (
    SHUTDOWN_TIMEOUT_VARIABLE,
    compute_in_fork,
    fork,
    run_ranks,
    start_early,
)
from distributed_training.supervise.process import Startup
from tests.conftest import clean_environment

BEGIN = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
(pathlib.Path(sys.argv[1]) / f"pid-{rank}").write_text(str(os.getpid()))
while rank == 1 and not (pathlib.Path(sys.argv[1]) / "pid-0").exists():
    time.sleep(0.01)
"""
WAIT = "time.sleep(60)\n"


@pytest.fixture(params=["new", "forked"])
def ranks(request, tmp_path, monkeypatch):
    """Return a function that runs the code `text` on two ranks and returns how the ranks ended.
    After the test, check that no ranks are left behind."""

    def call(text):
        script = tmp_path / "script.py"
        script.write_text(BEGIN + text)
        if request.param == "new":
            return run_ranks([str(script), str(tmp_path)], 2)
        monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])

        def act():
            runpy.run_path(str(script))
            return 0

        return run_ranks(functools.partial(run_and_report_errors, act), 2)

    yield call
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


def test_ranks_start_during_planning_and_end_if_planning_fails(tmp_path):
    script = tmp_path / "script.py"
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    values = f"[input(), *map(os.environ.get, {names})]"
    write = f"(pathlib.Path(sys.argv[1]) / f'told-{{rank}}').write_text(' '.join({values}))"
    script.write_text(BEGIN + write)
    command = [str(script), str(tmp_path)]
    with start_early(command, 2) as started_ranks:
        early_ranks = list(started_ranks)
    assert run_ranks(command, 2, early_ranks, "a folder").exit_code == 0
    assert (tmp_path / "told-0").read_text() == "a folder 0 0 2 2 127.0.0.1"
    assert (tmp_path / "told-1").read_text() == "a folder 1 1 2 2 127.0.0.1"
    with pytest.raises(KeyboardInterrupt), start_early(command, 2) as started_ranks:
        raise KeyboardInterrupt
    assert [process.returncode for process in started_ranks] == [-signal.SIGTERM] * 2


def test_only_ranks_that_failed_by_themselves_are_blamed(ranks):
    start_s = time.monotonic()
    outcome = ranks(f"if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n{WAIT}")
    assert (outcome.exit_code, outcome.codes) == (1, {1: -signal.SIGKILL})
    assert time.monotonic() - start_s < 30


def test_ranks_that_ignore_sigterm_are_killed(ranks, monkeypatch):
    monkeypatch.setenv(SHUTDOWN_TIMEOUT_VARIABLE, "0.5")
    ignore_sigterm = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    assert ranks(f"if rank == 1: sys.exit(3)\n{ignore_sigterm}\n{WAIT}").codes == {1: 3}


def test_a_rank_frozen_after_another_has_ended_is_killed(ranks, monkeypatch, capfd):
    monkeypatch.setattr(ranks_module, "STOPPED_TIMEOUT_S", 1.0)
    monkeypatch.setattr(ranks_module, "FAILURE_TIMEOUT_S", 0.5)
    outcome = ranks("if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)")
    assert (outcome.exit_code, outcome.codes) == (0, {0: 0})
    assert (
        "note: rank 1 did not end with the other ranks and will be terminated\n"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_forwarded_to_the_ranks(signum, ranks, tmp_path):
    def stop():
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    threading.Thread(target=stop).start()
    outcome = ranks(
        "folder = pathlib.Path(sys.argv[1])\n"
        f"signal.signal({int(signum)}, lambda *_: sys.exit((folder / f'got-{{rank}}').touch()))\n"
        f"(folder / f'ready-{{rank}}').touch()\n{WAIT}"
    )
    assert (outcome.signum, outcome.exit_code) == (signum, 128 + signum)
    assert len(list(tmp_path.glob("got-*"))) == 2
    assert signal.getsignal(signum) == before


def test_a_fork_ends_despite_a_second_signal():
    def body():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        sys.stdout = SimpleNamespace(flush=lambda: os.kill(os.getpid(), signal.SIGTERM))
        return 3

    assert fork(body).wait(30) == 3


def test_ctrl_z_stops_all_ranks_and_they_continue_together(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BEGIN + WAIT)
    program = (
        "import sys\n"
        "from distributed_training.start.ranks import run_ranks\n"
        "run_ranks(sys.argv[1:], 2)"
    )
    command = [sys.executable, "-c", program, script, tmp_path]
    launcher = psutil.Popen(list(map(str, command)), env=clean_environment())

    def wait_until(stopped):
        end = time.monotonic() + 30
        while True:
            processes = [launcher, *launcher.children()]
            if len(processes) == 3 and all(
                (process.status() == psutil.STATUS_STOPPED) == stopped for process in processes
            ):
                return processes
            assert time.monotonic() < end
            time.sleep(0.02)

    while len(list(tmp_path.glob("pid-*"))) < 2:
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTSTP)
    wait_until(stopped=True)
    launcher.send_signal(signal.SIGCONT)
    _, *ranks = wait_until(stopped=False)
    launcher.terminate()
    launcher.wait(30)
    assert not any(rank.is_running() for rank in ranks)


def test_a_fork_computes_in_the_background(capfd):
    answer = compute_in_fork(lambda: "x" * 100_000)  # more than a pipe can hold
    assert answer() == "x" * 100_000
    with pytest.raises(RunError, match="killed by SIGKILL, usually because the host"):
        compute_in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))()
    with pytest.raises(SystemExit, match="1"):
        compute_in_fork(lambda: str(1 / 0))()
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_phases_are_counted_from_the_start_of_the_process():
    program = (
        "import time\n"
        "from distributed_training.supervise.process import Startup\n"
        "startup = Startup()\n"
        "time.sleep(0.5)\n"
        "startup.end('import')\n"
        "print(startup.seconds['import'])"
    )
    start_s = time.monotonic()
    output = subprocess.check_output([sys.executable, "-c", program], env=clean_environment())
    assert 0.5 < float(output) < time.monotonic() - start_s + 0.02  # tolerance: clock ticks
    assert Startup({"import": 3.0}).seconds == {"import": 3.0}


def test_ranks_are_ended_despite_an_invalid_time_limit(monkeypatch):
    monkeypatch.setenv(SHUTDOWN_TIMEOUT_VARIABLE, "x")
    rank = psutil.Popen(["sleep", "60"])
    ranks_module._terminate([rank], was_signaled=False)
    assert rank.returncode == -signal.SIGTERM
