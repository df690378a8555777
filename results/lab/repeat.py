"""Run each record's command with --dry-run, in this process.

    python results/lab/repeat.py [RECORD.json ...]

A record's `made_with` contains the command that created the record, and the commit of the code. A
record's `command` repeats the measurement with the current code. A dry run that plans a layout uses
the record's machine instead of this machine. If a record's dataset is an absolute path, the dry run
reads the embedded text instead. The program does not test whether this machine has the record's
GPUs or can create network namespaces.
"""

import contextlib
import io
import json
import os
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import checkout

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT
from distributed_training.settings.machine import find_gpu

LAUNCHERS = {"python", "torchrun", "bash"}
SCRIPT = "real_model_example.py"


def records(paths: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the path and content of each given file that contains `made_with`. If no files are
    given, search all of results/."""
    for path in paths or sorted((ROOT / "results").rglob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document, dict) and "made_with" in document:
            yield path, document


def split_launcher(command: str) -> tuple[str, list[str]]:
    """Return the number of processes that a command starts, and the arguments after the launcher
    and its options."""
    words = shlex.split(command)
    while "=" in words[0]:  # environment variables
        del words[0]
    assert words[0] in LAUNCHERS, command
    if "--" in words:  # The words after -- are a command that the program measures.
        del words[words.index("--") :]
    if words[0] == "torchrun":
        return words[1].rpartition("=")[2], words[2:]
    if words[1].endswith("slow_link.sh"):  # A rate and the program follow.
        return "2", words[3:]
    return "1", words[1:]


def dry_run_options(document: dict[str, Any]) -> list[str]:
    """Return the options with which a dry run plans the recorded training run for the machine in
    the record."""
    options = ["--dry-run"]
    config = document.get("config_requested", {})
    gpu = find_gpu(document["machine"]["gpu_name"]) if "machine" in document else None
    if gpu is not None:
        options += ["--cluster", f"{document['world_size']}x{gpu.name}"]
    if config.get("dataset", "").startswith("/"):
        options += ["--dataset", "embedded", "--tokenizer", "embedded"]
    if config.get("weights", "").startswith("/"):  # weights of an earlier run
        options += ["--weights", "random"]
    return options


def dry_run_command(document: dict[str, Any]) -> str:
    """Run a record's command with --dry-run. Return "" if the command is accepted, and its output
    otherwise."""
    count, words = split_launcher(document["command"])
    is_module = words[0] == "-m"
    program, *words = words[1:] if is_module else words
    if program == SCRIPT and words[0] != "parity":
        options = dry_run_options(document)
        if "--cluster" in options:
            start = words.index("--num_gpus")
            del words[start : start + 2]
        words += options
    else:
        words.append("--dry-run")
    path = program if is_module else str(ROOT / program)
    run = runpy.run_module if is_module else runpy.run_path
    with (
        mock.patch.object(sys, "argv", [path, *words]),
        mock.patch.dict(os.environ, {"WORLD_SIZE": count}),
    ):
        return capture_error(lambda: run(path, run_name="__main__"))


def capture_error(act: Callable[[], object]) -> str:
    """Call `act`. Return "" if it succeeds, and its output or error otherwise."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            act()
    except UserError as error:
        return str(error)
    except SystemExit as system_exit:
        return (
            ""
            if system_exit.code in (0, None)
            else printed.getvalue().strip() or f"exit {system_exit.code}"
        )
    return ""


def main() -> int:
    """Run the commands from all records. Return 1 if a command is rejected."""
    refused = 0
    count = 0
    for path, document in records([Path(name).resolve() for name in sys.argv[1:]]):
        count += 1
        if why := dry_run_command(document):
            refused += 1
            print(f"{path.relative_to(ROOT)}: {document['command']}\n  {why.splitlines()[-1]}")
    print(f"{count - refused} of {count} commands were accepted.")
    return 1 if refused else 0


if __name__ == "__main__":
    checkout.run(main)
