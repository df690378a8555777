"""Processes that begin as a copy of this one: they need not import what it has. No torch."""

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

import psutil

from distributed_training.settings.errors import RunError

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STDIN = 0
PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent ends
Body = Callable[[], int]  # what a fork does; returns the exit code


def fork(body: Body) -> psutil.Process:
    """Begin a process as a copy of this one, which has no other threads, to do what `body` does."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPS, signal.SIGTSTP))
    pid = os.fork()
    if pid == 0:
        _run_fork(body, before)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return psutil.Process(pid)


def _run_fork(body: Body, mask: Iterable[int]) -> NoReturn:
    """Be the fork: with signals as in a new process, and out of the terminal's reach, whose Ctrl-C
    comes once, from the process that forked."""
    code = 1
    try:
        os.setsid()
        for signum in (*STOPS, signal.SIGTSTP):
            if signal.getsignal(signum) != signal.SIG_IGN:
                interrupts = signum == signal.SIGINT
                signal.signal(signum, signal.default_int_handler if interrupts else signal.SIG_DFL)
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

    process = fork(body)
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
