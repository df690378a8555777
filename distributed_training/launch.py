"""The command line, and starting several processes. The only module that reads the environment
for launch settings. No torch import.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from distributed_training.config import nearest
from distributed_training.errors import UserError
from distributed_training.files import shown
from distributed_training.machine import Machine
from distributed_training.plan import Plan
from distributed_training.record import RECORD_FILE, mark_stopped
from distributed_training.strategy import list_strategies
from distributed_training.topology import show_axes

TORCHRUN = Path(__file__).with_name("torchrun.py")
KILLED_FILE = ".killed"  # its note, in the run's folder
MAX_DIGITS = 9  # of --num_gpus: Python reads no number of thousands of digits
CPU_PROCESSES = 2  # what "--num_gpus all" means without GPUs, or the next number that fits the mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """What a launcher told this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        words = re.findall(r"--\w+", message)
        hint = nearest(words[0], self._option_string_actions) if words else None
        fix = f"did you mean {hint}?" if hint and hint != words[0] else "see --help"
        raise UserError(message, fix=fix)


def parse_arguments(argv: Sequence[str], description: str) -> argparse.Namespace:
    """Command line of real_model_example.py; a usage error exits with code 2."""
    parser = _Parser(
        description=description,
        epilog="Several processes: deepspeed --num_gpus=N real_model_example.py, torchrun "
        "--nproc_per_node=N real_model_example.py, or --num_gpus N here.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--strategy", help=f"short for --set strategy=... ({', '.join(list_strategies())})"
    )
    parser.add_argument("--model", help="short for --set model=...")
    parser.add_argument("--preset", metavar="FILE", help="JSON of CONFIG keys, over CONFIG")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="extend",
        nargs="+",
        default=[],
        help="CONFIG keys, over CONFIG and preset; may be repeated",
    )
    parser.add_argument(
        "--num_gpus",
        metavar="N|all",
        help="start N processes with torchrun; all: one for each GPU, or "
        f"{CPU_PROCESSES} on a machine without",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would run, check it, start nothing"
    )
    parser.add_argument("--run_dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    return parser.parse_args(argv)


def overrides(arguments: argparse.Namespace) -> list[str]:
    """`key=value` texts of the command line, the short forms last."""
    texts = list(arguments.set)
    for key in ("strategy", "model"):
        value = getattr(arguments, key)
        if value is not None:
            texts.append(f"{key}={value}")
    return texts


def current_process(environment: Mapping[str, str]) -> Process | None:
    """What torchrun or deepspeed set for this process; None when no launcher started it."""
    if "RANK" not in environment:
        return None
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment["LOCAL_RANK"])
        # torchrun says LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE
        local_world_size = int(
            environment.get("LOCAL_WORLD_SIZE")
            or environment.get("LOCAL_SIZE")
            or environment["WORLD_SIZE"]
        )
    except (KeyError, ValueError) as error:
        raise UserError(
            "RANK is set but WORLD_SIZE or LOCAL_RANK is not a number",
            str(error),
            "start with torchrun or deepspeed, or unset RANK",
        ) from None
    return Process(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )


def requested_processes(
    num_gpus: str | None, machine: Machine, mesh: Mapping[str, int]
) -> int | None:
    """The number that `--num_gpus` asks for; None when it was not given."""
    if num_gpus is None:
        return None
    if num_gpus == "all":
        fixed = math.prod(size for size in mesh.values() if size > 0)
        return machine.num_gpus or fixed * -(-CPU_PROCESSES // fixed)
    if not num_gpus.isdecimal() or len(num_gpus) > MAX_DIGITS or int(num_gpus) < 1:
        raise UserError(f"--num_gpus {shown(num_gpus)} is not a positive number or all")
    return int(num_gpus)


def check_world_size(requested: int | None, process: Process, machine: Machine) -> None:
    """Raise UserError when the launcher delivered another number of processes than asked for."""
    if requested is not None and requested != process.world_size:
        raise UserError(
            f"--num_gpus {requested} was asked for but the launcher started {process.world_size}",
            fix="give the number to the launcher only, or to real_model_example.py only",
        )
    if machine.num_gpus and process.local_world_size > machine.num_gpus:
        raise UserError(
            f"{process.local_world_size} processes on this machine but it has {machine.num_gpus} "
            "GPUs",
            fix=f"start {machine.num_gpus}",
        )


def alone() -> Process:
    """Make this process the only one of a run, as a launcher would have."""
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    return Process(rank=0, world_size=1, local_rank=0, local_world_size=1)


def prepare_environment(machine: Machine, processes_here: int) -> None:
    """Settings that libraries read from the environment, for this process and its children."""
    # Extensions are built with ninja, which lies beside this Python even if not activated.
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(machine, processes_here)))
    if not machine.num_gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    else:
        # DeepSpeed's builder cannot read entries such as 9.0a; this machine's own is enough.
        major, minor = machine.compute_capability
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def threads_per_process(machine: Machine, processes_here: int) -> int:
    """An equal share of the cores, at least one."""
    return max(1, machine.num_cpus // processes_here)


def launch_command(plan: Plan, script: str, arguments: Sequence[str]) -> tuple[list[str], str]:
    """(what is executed, what a person would type) to start the plan's processes.

    torchrun for every strategy: unlike DeepSpeed's launcher it leaves CUDA_VISIBLE_DEVICES alone
    and gives a process that is told to stop the time to save.
    """
    options = ["--standalone", f"--nproc_per_node={plan.num_processes}"]
    hidden = ["--run_dir", str(plan.run_dir)]
    start = [sys.executable, str(TORCHRUN), str(plan.run_dir / KILLED_FILE), *options]
    launcher = ["torchrun", *options] if plan.num_processes > 1 else ["python"]
    typed = [*launcher, os.path.relpath(script), *arguments]
    return [*start, script, *arguments, *hidden], shlex.join(typed)


def spawn(command: list[str], plan: Plan) -> int:
    """Start the launcher, pass signals on, wait; return the run's exit code.

    A process that was killed could not write its own end: it is recorded here.
    """
    file = plan.run_dir / RECORD_FILE
    before = file.stat().st_mtime_ns if file.is_file() else None
    signals: list[int] = []

    def pass_on(signum: int, _frame: Any) -> None:
        signals.append(signum)
        child.send_signal(signum)

    (plan.run_dir / KILLED_FILE).unlink(missing_ok=True)
    child = subprocess.Popen(command)
    # Ctrl-C reaches the whole foreground group by itself; SIGTERM reaches only this process.
    previous = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda s, _: signals.append(s)),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
    }
    try:
        code = child.wait()
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if plan.offload_dir is not None:  # a run that failed could not remove its files
        shutil.rmtree(plan.offload_dir, ignore_errors=True)
    if not file.is_file() or file.stat().st_mtime_ns == before:  # it did not come to a record
        return code if code >= 0 else 128 - code
    if signals:
        mark_stopped(plan.run_dir, "interrupted", signal.Signals(signals[0]).name)
    killed = _killed_processes(plan.run_dir)
    if killed is not None:
        mark_stopped(plan.run_dir, "failed", killed)
    unknown = f"a process ended without a word (exit code {code}; -9 is most often memory)"
    mark_stopped(plan.run_dir, "failed", unknown, consequence=True)
    values = json.loads(file.read_text(encoding="utf-8"))
    if values["status"] in ("oom", "failed"):
        print(f"{values['status']}: {values['error']}", file=sys.stderr)
        return 1
    if values["status"] == "interrupted":
        return 128 + (signals[0] if signals else signal.SIGINT)
    return code


def _killed_processes(run_dir: Path) -> str | None:
    """What the launcher's note says, which is taken away; None where it left none."""
    file = run_dir / KILLED_FILE
    if not file.is_file():
        return None
    note = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    ranks = ", ".join(str(rank) for rank in note["ranks"])
    hint = "; most often memory ran out" if note["signal"] == "SIGKILL" else ""
    return f"rank {ranks}: killed by {note['signal']}{hint}"


def describe_plan(plan: Plan, typed_command: str) -> str:
    """What --dry-run prints: resolved CONFIG, command, DeepSpeed JSON."""
    words: dict[str, Any] = plan.config.to_user_words()
    requested = plan.requested.to_user_words()
    lines = ["resolved CONFIG"]
    for key, value in words.items():
        was = "" if requested[key] == value else f"    (was {requested[key]!r})"
        lines.append(f"  {key:<24} {value!r}{was}")
    dp_size = plan.dp_size
    lines += [
        f"  batch: global {plan.work['global_batch_size']} = micro "
        f"{plan.config.micro_batch_size} x accum {plan.config.grad_accum_steps} x data-parallel "
        f"{dp_size}",
        *(f"  note: {note}" for note in plan.resolved.notes),
        *([f"  resumes {plan.checkpoint}"] if plan.checkpoint else []),
        "launch command",
        f"  {typed_command}",
    ]
    lines += [f"mesh (from {os.path.relpath(plan.strategy.source)}): {show_axes(plan.axes)}"]
    if plan.axes["pp"] > 1:
        blocks = ", ".join(str(len(blocks)) for blocks in plan.layout.stages)
        lines += [f"pipeline: {plan.config.pipeline_schedule}, blocks a stage {blocks}"]
    if plan.deepspeed_json is not None:
        lines += [f"DeepSpeed JSON (from {os.path.relpath(plan.strategy.source)})"]
        lines += ["  " + line for line in json.dumps(plan.deepspeed_json, indent=2).splitlines()]
    return "\n".join(lines)


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
