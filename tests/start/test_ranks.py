"""Test that ranks start together, and that no ranks are left behind after one has failed or all
have been stopped."""

import os
import signal
import threading
import time

import psutil
import pytest

from distributed_training.start import ranks as ranks_module
from distributed_training.start.ranks import run_ranks
from distributed_training.supervise.process import LAUNCHER_VARIABLE

BEGIN = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
(pathlib.Path(sys.argv[1]) / f"pid-{rank}").write_text(str(os.getpid()))
while rank == 1 and not (pathlib.Path(sys.argv[1]) / "pid-0").exists():
    time.sleep(0.01)
"""
WAIT = "time.sleep(60)\n"


@pytest.fixture
def ranks(tmp_path):
    """Return a function that runs the code `text` on two ranks and returns how the ranks ended.
    After the test, check that no ranks are left behind."""

    def call(text, **options):
        script = tmp_path / "script.py"
        script.write_text(BEGIN + text)
        return run_ranks([str(script), str(tmp_path)], 2, **options)

    yield call
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


def test_ranks_share_a_file_without_a_name(ranks, tmp_path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    names += ["GLOO_SOCKET_IFNAME"]
    outcome = ranks(
        f"launcher, store, *_ = map(int, os.environ[{LAUNCHER_VARIABLE!r}].split())\n"
        "assert launcher == os.getppid()\n"
        "os.write(os.open(f'/proc/self/fd/{store}', os.O_WRONLY | os.O_APPEND), b'x')\n"
        "while os.fstat(store).st_size < 2: time.sleep(0.01)\n"
        "file = pathlib.Path(sys.argv[1]) / f'told-{rank}'\n"
        f"file.write_text(' '.join(map(os.environ.get, {names})))"
    )
    assert outcome.exit_code == 0
    assert (tmp_path / "told-0").read_text() == "0 0 2 2 127.0.0.1 lo"
    assert (tmp_path / "told-1").read_text() == "1 1 2 2 127.0.0.1 lo"


class FakeMonitor:
    def __init__(self, folder, result):
        self.folder = folder
        self.result = result

    def check(self, ranks):
        assert sorted(ranks) == [0, 1]
        while len(list(self.folder.glob("pid-*"))) < 2:
            time.sleep(0.01)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_hang_ends_the_ranks(ranks, tmp_path):
    outcome = ranks(WAIT, monitor=FakeMonitor(tmp_path, "rank 1 hangs"))
    assert (outcome.exit_code, outcome.reason) == (1, "rank 1 hangs")


def test_a_monitor_that_fails_ends_no_run(ranks, tmp_path, capfd):
    monitor = FakeMonitor(tmp_path, ValueError("a fault made on purpose"))
    outcome = ranks("time.sleep(1.5)", monitor=monitor)
    assert outcome.exit_code == 0
    assert capfd.readouterr().err.count("a fault made on purpose") == 1


def test_only_ranks_that_failed_by_themselves_are_blamed(ranks):
    start_s = time.monotonic()
    outcome = ranks(f"if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n{WAIT}")
    assert (outcome.exit_code, outcome.codes) == (1, {1: -signal.SIGKILL})
    assert time.monotonic() - start_s < 30


def test_ranks_that_ignore_sigterm_are_killed(ranks, monkeypatch):
    monkeypatch.setattr(ranks_module, "FAILURE_TIMEOUT_S", 0.5)
    ignore_sigterm = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    assert ranks(f"if rank == 1: sys.exit(3)\n{ignore_sigterm}\n{WAIT}").codes == {1: 3}


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
