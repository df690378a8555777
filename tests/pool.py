"""Run jobs in warm processes. A server imports slow packages once and forks the processes for each
job.

    pool = Pool(HEAVY)
    result = pool.call("tests.parity.cases:train", arguments, num_processes=2)  # a Python function
    result = pool.script(["--dry-run"])                      # real_model_example.py, as a process

The server only imports and forks, so that jobs share no threads and no torch or DeepSpeed state.
The server ends when the process that started it ends. Each job has a separate port and a time
limit, after which the job's process group is killed."""

import contextlib
import gc
import importlib
import json
import os
import pickle
import pkgutil
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "real_model_example.py"
PACKAGE = "distributed_training"
# Modules to import before the first job. "name.*" imports a package with all its modules.
# "name:function" also calls the function.
LIGHT = (
    f"{PACKAGE}.settings.*", f"{PACKAGE}.data.*", f"{PACKAGE}.plan.*",
    f"{PACKAGE}.predict.*", f"{PACKAGE}.planner.*", f"{PACKAGE}.start.launch",
)  # fmt: skip
HEAVY = (
    "torch.distributed.pipelining", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch._dynamo", "torch._inductor.compile_fx", "deepspeed", "deepspeed.runtime.pipe.engine",
    "transformers.models.gpt2.configuration_gpt2", "transformers.convert_slow_tokenizer",
    "transformers.models.llama.modeling_llama",
    *LIGHT, f"{PACKAGE}.models.*", f"{PACKAGE}.parallel.*", f"{PACKAGE}.engines.*",
    f"{PACKAGE}.start.worker", "results.lab.harness", f"{PACKAGE}.cli", "tests.support",
    "tests.build_extensions:load_built",
)  # fmt: skip
CALL_LIMIT_S = 500.0
GRACE_S = 10.0  # time for the other processes to end after one has failed
FAILED = 70  # exit code if a job's function raises an exception
# These ports are below the range that Linux uses for outgoing connections (ip_local_port_range).
# Otherwise a connection could occupy the port before a launcher listens on it.
PORTS = range(10_000, 29_000)


def free_port() -> int:
    """Return a free TCP port on loopback."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue  # another process listens on it


class Pool:
    """A server that forks the processes of one job at a time."""

    def __init__(self, modules: Iterable[str], environment: Mapping[str, str]) -> None:
        self.server: subprocess.Popen[str] | None = None
        self.modules, self.environment = list(modules), dict(environment)

    def call(
        self, function: str, arguments: Any, *, num_processes: int, grace_s: float = GRACE_S
    ) -> Any:
        """Call "module:function" with `arguments` on every rank of a new process group. Return the
        result from rank 0.

        Raises RuntimeError with the output of every rank if a rank fails or the time limit is
        exceeded."""
        job = {"function": function, "environment": {}, "launched": True, "grace_s": grace_s}
        codes, ranks, result = self._run(job, num_processes, CALL_LIMIT_S, pickle.dumps(arguments))
        if any(codes):
            output = "\n".join(f"rank {i}: {out}{err}" for i, (out, err) in enumerate(ranks))
            raise RuntimeError(f"{function}: exit codes {codes}\n{output[-30_000:]}")
        return pickle.loads(result)

    def script(
        self,
        arguments: Sequence[object],
        *,
        num_processes: int = 1,
        launched: bool = False,
        cwd: Path = ROOT,
        limit_s: float = 120,
        unset: Sequence[str] = (),
        script: Path = SCRIPT,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python SCRIPT ARGUMENTS` in one process, or in several, as a launcher would.
        Return the first nonzero exit code and the output of all processes."""
        job = {
            "argv": [str(script), *map(str, arguments)],
            "cwd": str(cwd),
            "environment": environment,
            "unset": list(unset),
            "launched": launched or num_processes > 1,
        }
        codes, ranks, _ = self._run(job, num_processes, limit_s)
        out, err = ("".join(texts) for texts in zip(*ranks, strict=True))
        code = next((code for code in codes if code), 0)
        return subprocess.CompletedProcess(job["argv"], code, out, err)

    def _run(
        self, job: dict[str, Any], num_processes: int, limit_s: float, arguments: bytes = b""
    ) -> tuple[list[int], list[list[str]], bytes]:
        """Run a job. Return the exit codes and outputs by rank, and rank 0's pickled result."""
        if self.server is None or self.server.poll() is not None:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "tests.pool", *self.modules],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "arguments").write_bytes(arguments)
            (folder / "result").write_bytes(pickle.dumps(None))
            job |= {"folder": name, "num_processes": num_processes, "limit_s": limit_s}
            self.server.stdin.write(json.dumps(job) + "\n")
            self.server.stdin.flush()
            answer = self.server.stdout.readline()
            if not answer:
                raise RuntimeError(f"the fork server ended with {self.server.wait()}")
            ranks = [
                [(folder / f"{stream}{rank}").read_text() for stream in ("out", "err")]
                for rank in range(num_processes)
            ]
            return json.loads(answer), ranks, (folder / "result").read_bytes()


def serve(modules: Iterable[str]) -> None:
    """Import the modules, then run one job per line until the input ends."""
    gc.disable()  # it would traverse the modules many times during the imports
    for name in modules:
        name, _, function = name.partition(":")
        base, star, _ = name.partition(".*")
        module = importlib.import_module(base)
        if function:
            getattr(module, function)()
        if star:
            for module_info in pkgutil.walk_packages(module.__path__, f"{base}."):
                with contextlib.suppress(ModuleNotFoundError):  # Triton, which only GPUs have
                    importlib.import_module(module_info.name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork could hang"
    gc.collect()
    gc.freeze()  # so that garbage collection in forks does not copy the imports' memory
    gc.enable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that printed text is not mixed with answers
    for line in sys.stdin:
        answers.write(json.dumps(_fork(json.loads(line))) + "\n")
        answers.flush()


def _fork(job: dict[str, Any]) -> list[int]:
    """Run a job's processes in a separate process group and return their exit codes by rank."""
    port = free_port() if job["launched"] else 0
    children: list[int] = []
    for rank in range(job["num_processes"]):
        child = os.fork()
        if child == 0:
            os.setpgid(0, children[0] if children else 0)
            _run_rank(job, rank, port)
        with contextlib.suppress(OSError):  # parent and child both call it; the first call counts
            os.setpgid(child, children[0] if children else child)
        children.append(child)
    codes: dict[int, int] = {}
    end = time.monotonic() + job["limit_s"]
    while len(codes) < len(children):
        pid, status = os.waitpid(-children[0], os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] != 0:
                end = min(end, time.monotonic() + job.get("grace_s", GRACE_S))
        elif time.monotonic() > end:
            os.killpg(children[0], signal.SIGKILL)
            end = float("inf")
        else:
            time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):  # child processes that remain
        os.killpg(children[0], signal.SIGKILL)
    return [codes[child] for child in children]


def _run_rank(job: dict[str, Any], rank: int, port: int) -> None:
    """Run one process of a job, then exit. This function does not return."""
    code = FAILED
    try:
        folder, count = Path(job["folder"]), job["num_processes"]
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{stream}{rank}", os.O_WRONLY | os.O_CREAT), number)
        for name in job.get("unset", ()):
            os.environ.pop(name, None)
        os.environ.update(job["environment"])
        if job["launched"]:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, "WORLD_SIZE": count}
            os.environ.update({name: str(value) for name, value in ranks.items()})
            os.environ.update(LOCAL_WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1")
        os.chdir(job.get("cwd", ROOT))
        if "argv" in job:
            run_script(*job["argv"])
        else:
            _call(job["function"], folder, rank)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):  # Python prints such a code if it is not caught
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_script(script: str, *arguments: str) -> None:
    """Run a file in this process as `python FILE ARGUMENTS` would. The script may raise SystemExit
    with its exit code."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _call(name: str, folder: Path, rank: int) -> None:
    module, _, function = name.partition(":")
    arguments = pickle.loads((folder / "arguments").read_bytes())
    result = getattr(importlib.import_module(module), function)(arguments)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    serve(sys.argv[1:])
