"""Starts one process a stage and watches over them.

Whoever starts the processes also ends them: this module, or torchrun's agent. A stage that only
lost its neighbour waits a moment before it exits, so that the one that failed is seen first.
"""

from __future__ import annotations

import datetime
import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pipedream.errors import UserError

REPORTS = "PIPEDREAM_REPORTS"
"""Environment: the folder where processes that launch() started say why they failed."""
STORE_SOCKET = "PIPEDREAM_STORE_SOCKET"
"""Environment of rank 0: the file descriptor of the socket on which it is to serve the store."""
START = "fork" if sys.platform == "linux" else "spawn"
"""How a process begins: with what is imported here, where that is safe."""
GRACE_S = 2.0
_POLL_S = 0.02
_LINGER_S = 0.3
"""Until each has seen who else is there: they are told to end one after the other."""


_pids: list[int] = []
"""Process ids by rank, once the processes have met."""


class StageLostError(RuntimeError):
    """Another stage's process is gone, or did not answer in time."""


class Process(NamedTuple):
    """Which of the processes this is."""

    rank: int
    world_size: int
    local_rank: int


def this_process(environment: Mapping[str, str], num_stages: int) -> Process | None:
    """What launch() or torchrun set for this process; None if neither started it.

    Raises UserError when the number of processes is not `num_stages`, or when they are on more
    than one machine: measured times need one clock.
    """
    if "RANK" not in environment:
        return None
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    try:
        rank, world_size, local_rank, local_size = (int(environment[name]) for name in names)
    except (KeyError, ValueError):
        raise UserError(
            "RANK is set, but WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE is not a number",
            "start with torchrun, or unset RANK",
        ) from None
    if world_size != num_stages:
        raise UserError(
            f"{world_size} processes were started for num_stages={num_stages}",
            f"type torchrun --nproc_per_node={num_stages}, or --set num_stages={world_size}",
        )
    if local_size != world_size:
        raise UserError(
            f"{world_size} processes on more than one machine",
            "start all stages on one: their times are compared on its clock",
        )
    return Process(rank, world_size, local_rank)


def launch(stage: Callable[[], NoReturn], num_stages: int) -> int:
    """Run `stage` in a process for each; the exit code for the whole. What is imported here need
    not be imported there.

    0 if all ended well. At the first process that did not, the others are killed and the last
    thing on stderr is one line that names the stage and says what happened: code 2 for what the
    user can mend, 1 for the rest. The processes end, too, when this one is killed.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    workers: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="pipedream-") as folder:
        try:
            _start(stage, num_stages, folder, workers)
            failed = _wait(workers, folder)
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join()
        return 0 if failed is None else _explain(failed, workers, folder)


def _start(
    stage: Callable[[], NoReturn], num_stages: int, folder: str, workers: list[BaseProcess]
) -> None:
    """Rank 0 gets the listening socket itself: a port number alone could be taken meanwhile."""
    context: Any = multiprocessing.get_context(START)
    gc.freeze()  # what is imported is shared: collecting would copy it
    with socket.create_server(("127.0.0.1", 0), backlog=num_stages) as listener:
        environment = {
            "WORLD_SIZE": str(num_stages),
            "LOCAL_WORLD_SIZE": str(num_stages),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            REPORTS: folder,
        }
        for rank in range(num_stages):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            given = (stage, own, None if rank else listener)
            worker = context.Process(target=_be, args=given)
            worker.start()
            workers.append(worker)


def _be(
    stage: Callable[[], NoReturn], environment: dict[str, str], listener: socket.socket | None
) -> NoReturn:
    """In a new process."""
    os.setsid()  # Ctrl-C reaches the one that started us alone, which ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    if listener is not None:
        os.environ[STORE_SOCKET] = str(listener.detach())
    stage()


def _wait(workers: Sequence[BaseProcess], folder: str) -> int | None:
    """The rank that failed first; None once all have ended well."""
    while True:
        codes = [worker.exitcode for worker in workers]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            return min(failed, key=lambda rank: _report(folder, rank).get("kind") == "lost")
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_S)


def _explain(rank: int, workers: Sequence[BaseProcess], folder: str) -> int:
    report = _report(folder, rank)
    code = workers[rank].exitcode
    assert code is not None
    if report.get("kind") == "user":
        print("error:", report["text"], file=sys.stderr)
        return 2
    if "text" in report:
        print(report["traceback"], end="", file=sys.stderr)
        what = f"failed: {report['text']}"
    elif code < 0:
        name = signal.Signals(-code).name
        what = f"(process {workers[rank].pid}) was killed by {name}"
        if -code == signal.SIGKILL:
            what += ", which is also what happens when memory runs out"
    else:
        what = f"ended with exit code {code} and said nothing"
    print(
        f"error: stage {rank} of {len(workers)} {what}; the other stages were ended",
        file=sys.stderr,
    )
    return 1


def _report(folder: str, rank: int) -> dict[str, str]:
    try:
        return json.loads(Path(folder, str(rank)).read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # killed, perhaps while it wrote
        return {}


def run_worker(body: Callable[[Process], None], process: Process) -> NoReturn:
    """Be one stage: run `body`, report what it raises to whoever started us, and exit.

    To be called before torch is imported, so that the signals it blocks are so in all threads.
    """
    if REPORTS in os.environ:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, args=(process,), daemon=True).start()
    try:
        body(process)
    except UserError as error:
        _tell(process, "user", error)
        code = 2
    except StageLostError as error:
        _tell(process, "lost", error)
        time.sleep(GRACE_S)
        code = 1
    except BaseException as error:
        _tell(process, "failed", error)
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after an error the backends' threads may hold it up for ever.
    os._exit(code)


def _end_with_parent() -> None:
    """However launch()'s process ends, also by SIGKILL; then nobody else removes the folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(os.environ[REPORTS], ignore_errors=True)
    os._exit(1)


def _end_when_told(process: Process) -> None:
    """torchrun tells all others to end when one is gone: say which, whatever we are waiting for.

    A signal handler would not do: it runs only when the main thread is back from what it waits for.
    """
    signal.sigwait({signal.SIGTERM})
    gone = [rank for rank, pid in enumerate(_pids) if not _is_alive(pid)]
    if gone and process.rank == min(set(range(len(_pids))) - set(gone)):
        names = ", ".join(f"stage {rank} of {len(_pids)} (process {_pids[rank]})" for rank in gone)
        print(f"error: {names} is gone; the other stages are ended", file=sys.stderr, flush=True)
    time.sleep(_LINGER_S)
    os._exit(128 + signal.SIGTERM)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _tell(process: Process, kind: str, error: BaseException) -> None:
    text = str(error) if kind == "user" else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    if REPORTS in os.environ:
        report = {"kind": kind, "text": text, "traceback": traceback.format_exc()}
        Path(os.environ[REPORTS], str(process.rank)).write_text(json.dumps(report))
        return
    name = f"stage {process.rank} of {process.world_size}"
    if kind == "user":
        if process.rank == 0:
            print("error:", text, file=sys.stderr)
    elif kind == "lost":
        print(f"{name} stops: {error}", file=sys.stderr, flush=True)
    else:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        traceback.print_exc()
        print(f"error: {name} failed: {text}", file=sys.stderr, flush=True)
        get_error_handler().record_exception(RuntimeError(f"{name} failed: {text}"))


def meet(process: Process, timeout: datetime.timedelta) -> None:
    """Make torch's default process group, of gloo: for barriers and results, on a GPU as well."""
    import torch.distributed as dist

    from pipedream.runtime.channels import exchange

    options: dict[str, Any] = {}
    if REPORTS in os.environ:
        serves = process.rank == 0
        options["store"] = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            process.world_size,
            serves,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=int(os.environ[STORE_SOCKET]) if serves else None,
        )
        options |= {"rank": process.rank, "world_size": process.world_size}
    dist.init_process_group("gloo", timeout=timeout, **options)
    _pids.extend(exchange(os.getpid()))
