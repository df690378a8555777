"""Measure when each line of a run's output appears, with empty caches and then with filled ones.

    python results/lab/first_minute.py OUT.json [-- python real_model_example.py ...]

Without a command, the program times the default run on one GPU: gpt2-medium with random weights and
without network access.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout

from distributed_training.records.record import provenance, write_json
from distributed_training.settings.detect import detect_machine
from distributed_training.settings.files import ROOT
from distributed_training.settings.keys import Parser

COMMAND = (
    sys.executable, str(ROOT / "real_model_example.py"), "--num_gpus", "1", "--weights", "random",
    "--dataset", "embedded", "--tokenizer", "embedded", "--num_samples", "400",
)  # fmt: skip
# Name -> (0 to note the first matching line or -1 to note the last, pattern of the line)
MARKS = {
    "first_line": (0, r""),
    "header": (0, r"  model "),
    "first_step": (0, r"step +[1-9]\d*/\d+  epoch"),
    "last_step": (-1, r"step +(\d+)/\1  epoch"),
    "saved": (-1, r"saved "),
    "exported": (-1, r"exported "),
}


def timed_lines(command: Sequence[str], **environment: str) -> list[tuple[float, str]]:
    """Run a command. Return one entry per printed line: the seconds since the start, and the line.
    The last entry contains the time at which the command ended, with an empty line."""
    began = time.monotonic()
    lines = []
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((round(time.monotonic() - began, 2), line.rstrip("\n")))
        print(f"{lines[-1][0]:7.2f}  {lines[-1][1]}", flush=True)
    if code := process.wait():
        sys.exit(f"error: The command ended with exit code {code}.")
    return [*lines, (round(time.monotonic() - began, 2), "")]


def find_marks(lines: Sequence[tuple[float, str]]) -> dict[str, float | None]:
    """Return the time of each entry in MARKS and of the end, in seconds. An entry's time is None if
    no line matches its pattern."""
    seconds_of: dict[str, float | None] = {}
    for name, (position, pattern) in MARKS.items():
        times = [seconds for seconds, line in lines[:-1] if re.match(pattern, line)]
        seconds_of[name] = times[position] if times else None
    return {**seconds_of, "end": lines[-1][0]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("command", nargs="*", default=COMMAND, help="command to time, after --")
    arguments = parser.parse_args(argv)
    machine = detect_machine()
    document: dict[str, Any] = provenance(" ".join(arguments.command))
    document |= {"gpu_name": machine.gpu_name, "num_gpus": machine.num_gpus, "runs": {}}
    document["num_cpus"] = os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DISTRIBUTED_TRAINING_CACHE")
        caches = {name: f"{folder}/{name}" for name in names}
        command = [*arguments.command, "--output_dir", f"{folder}/runs"]
        for cache_state in ("cold", "warm"):
            lines = timed_lines(command, **caches)
            seconds = find_marks(lines)
            document["runs"][cache_state] = seconds
            print(cache_state, json.dumps(seconds), flush=True)
    write_json(arguments.out, document)
    return 0


if __name__ == "__main__":
    checkout.run(main)
