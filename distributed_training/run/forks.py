"""Processes that begin as a copy of this one: they need not import what it has. No torch."""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from distributed_training.settings.errors import RunError

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
POLL_S = 0.05
STDIN = 0
PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent ends
Body = Callable[[], int]  # what a fork does; returns the exit code


class Fork:
    """A process that begins as a copy of this one, which has no other threads, and does what
    `body` does; the rest is what is used of Popen."""

    stdin = None

    def __init__(self, body: Body) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPS, signal.SIGTSTP))
        self.pid = os.fork()
        if self.pid == 0:
            _run_fork(body, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """The exit code, negative for a signal's number; None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # a signal's handler has just seen the end
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its end has just been seen, as above
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """At once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float = math.inf) -> int:
        """The exit code, once there is one; raises subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(["fork"], timeout_s)
            time.sleep(POLL_S)
        return code


def _run_fork(body: Body, mask: Iterable[int]) -> NoReturn:
    """Be the fork: with signals as in a new process, and out of the terminal's reach, whose Ctrl-C
    comes once, from the process that forked."""
    code = 1
    try:
        os.setsid()
        for signum in (*STOPS, signal.SIGTSTP):
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
        code = body()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what is below in the stack is of the process that forked


def beside(answer: Callable[[], str]) -> Callable[[], str]:
    """Let another process answer, from now on and as long as this one lives; returns what waits for
    the answer. That raises RunError where the process was killed, SystemExit where it failed."""
    read, write = os.pipe()

    def body() -> int:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt), open(write, "w") as pipe:
            pipe.write(answer())
        return 0

    process = Fork(body)
    os.close(write)

    def wait() -> str:
        with open(read) as pipe:
            text = pipe.read()
        code = process.wait()
        if code < 0:
            raise RunError(f"the process that planned was {killed_by(-code)}")
        if code or not text:
            raise SystemExit(code or 1)
        return text

    return wait


def killed_by(signum: int) -> str:
    """Of a process: by which signal, and what that means most often."""
    name = signal.Signals(signum).name
    return f"killed by {name}" + ("; most often memory ran out" if name == "SIGKILL" else "")
