"""A `python` that starts at once: a server that has imported torch forks a process for each call.

    with warm_python(folder) as tool:        # an executable that takes what python takes
        subprocess.run([tool, "pipedream_simple.py", "--set", "steps=0"])

The process that is started is a few lines that hand their arguments, working directory,
environment and open files to the server; a fork of it runs the script, module or -c text, and its
exit code comes back. What the script starts with sys.executable goes the same way. The server does
nothing but import and fork, and ends when its standard input does.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

FOLDER = Path(__file__).resolve().parent.parent
# sympy, by way of symbolic_shapes: the first autograd.grad with grad_outputs imports it.
PRELOAD = (
    "torch.distributed.pipelining", "torch.fx.experimental.symbolic_shapes", "matplotlib.pyplot",
    "PIL.Image", "pipedream.draw.grids", "pipedream.plan.planner",
    "pipedream.runtime.record", "pipedream.runtime.session", "pipedream.simulate.search",
    "pipedream.train.studies",
)  # fmt: skip

CLIENT = """
import array, json, os, socket, sys
path, *argv = sys.argv[1:]
numbers = sorted(map(int, os.listdir("/proc/self/fd")))
server = socket.socket(socket.AF_UNIX)
server.connect(path)
files = [n for n in numbers if n != server.fileno() and os.path.exists(f"/proc/self/fd/{n}")]
call = {"argv": argv, "cwd": os.getcwd(), "environment": dict(os.environ), "files": files}
text = json.dumps(call).encode()
rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
server.sendmsg([len(text).to_bytes(8, "big")], [rights])
server.sendall(text)
os._exit(int(server.recv(16) or b"1"))
"""


@contextlib.contextmanager
def warm_python(folder: Path) -> Iterator[Path]:
    """The executable in `folder`; the server is there until the end."""
    path, tool, client = folder / "python.socket", folder / "python", folder / "python_client.py"
    client.write_text(CLIENT)
    words = [sys.executable, "-I", "-S", str(client), str(path)]
    tool.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    tool.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(32)  # from here on calls wait until the server is ready
        command = [sys.executable, __file__, str(listener.fileno()), str(tool)]
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"},
        )
    try:
        yield tool
    finally:
        server.communicate()


def serve(listener: socket.socket, tool: str) -> None:
    """Import, then fork for each call until the standard input ends."""
    sys.path.insert(0, str(FOLDER))
    for name in PRELOAD:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork could hang"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that watch over calls are not waited for
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        argv = take_over(connection, tool)
        del sys.path[0]  # this folder's, which each call replaces by its own
        end_with(argv)


def take_over(connection: socket.socket, tool: str) -> list[str]:
    """In the process that is to run the call its arguments; the other one ends here."""
    head, files, _, _ = socket.recv_fds(connection, 8, 64)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += connection.recv(1 << 16)
    call = json.loads(text)
    child = os.fork()
    if child:
        for file in files:
            os.close(file)
        ended = os.pidfd_open(child)
        if ended not in select.select([ended, connection], [], [])[0]:  # the caller was killed
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(str(code if code >= 0 else 128 - code).encode())
        os._exit(0)
    connection.close()
    os.chdir(call["cwd"])
    os.environ.clear()
    os.environ.update(call["environment"])
    apart = [os.dup2(file, 200 + number) for number, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(apart, call["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.executable = tool
    return call["argv"]


def end_with(argv: list[str]) -> NoReturn:
    """Run it and exit, without clearing all that was imported, which would copy its memory."""
    code = 0
    try:
        run(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(argv: list[str]) -> None:
    """What `python ARGV` does."""
    if argv[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(argv[1], "<string>", "exec"), main.__dict__)
    elif argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
