"""Inject random faults into runs of all strategies, many at a time, and measure the lost steps.

    python -m tests.faults.soak --jobs 24 --seconds 480 --seed 1 --out results/soak.json
    python -m tests.faults.soak --seed 1 --strategies zero2   # repeats the missions of zero2

A mission is one run on two or four CPU processes, started with --num_gpus as a user would. Up
to three random faults strike at random steps, and after each fault the run is restarted with
`resume=auto`. The final weights must equal the weights of a run without faults. The
fault "disk full" mounts a disk, which needs root."""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from distributed_training.planner.checks import has_libaio
from distributed_training.records.record import versions
from tests.conftest import SMALL, clean_environment, settings
from tests.parity.support import MODELS, small_infinity
from tests.pool import ROOT

WORKER = ROOT / "tests/faults/soak_worker.py"
NUM_STEPS = 40
SAVED_EVERY = 8
HANG_S = 30
FAULTS_PER_MISSION = 3
LIMIT_S = 200.0  # time limit of one start
TOLERANCE = 1e-4  # for a weight's difference in the 2-norm, relative to the weight
TWO_STAGES = {"grad_accum_steps": 2, "batch_size": 2}
# Strategy -> (processes, CONFIG).
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "fsdp": (2, {}),
    "hsdp": (4, {"strategy": "fsdp", "dp_replicate": 2}),
    "tp": (2, {}),
    "pp": (2, TWO_STAGES),
    "3d": (4, TWO_STAGES),
    "local_sgd": (2, {"local_steps": 4}),
    "zero1": (2, {}),
    "zero2": (2, {}),
    "zero3": (2, {}),
    "offload": (2, {}),
    "hybrid": (2, TWO_STAGES),
    "infinity": (
        2,
        {
            "model": str(MODELS / "four-wide-layers"),
            "weights": "random",
            "tokenizer": "embedded",
            **small_infinity(sub_group_size=2**18),
        },
    ),
}
NEEDS_EXTENSIONS = {"offload", "infinity"}  # strategies that need DeepSpeed's extensions


# Kind of fault -> (accepted statuses in the run's record, where "" is a missing record; pattern
# that the record's error or the last message must match)
KILLED = ("failed",), r"rank {rank} was killed by SIGKILL"
STOPPED = ("interrupted", "ok"), ""
FULL = ("failed",), "(No space|quota|too large).*--resume auto"
FROZEN = ("failed",), r"rank {rank} was stopped \(SIGSTOP\)"
ENDED = ("ok",), r"note: .*(rank {rank}\b|finished)"
FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "killed": KILLED,
    "killed while saving": KILLED,
    "killed at the start": (("", "running", "failed", "interrupted"), KILLED[1]),
    "launcher killed": STOPPED,  # the kernel sends SIGTERM to the ranks
    "all killed": (("running",), ""),
    "frozen": FROZEN,
    "hangs": (("failed",), r"waiting for rank {rank}\b"),
    "told to stop": STOPPED,
    "rank told to stop": STOPPED,
    "terminal gone": STOPPED,
    "Ctrl-C": STOPPED,
    "disk full": FULL,
    "no quota": FULL,
    "not finite": (("failed",), r"not finite on rank {rank}\b"),
    # A record remains if rank 0 writes it during the removal of the folder.
    "folder removed": (("", "failed"), r"was removed or renamed"),
    "killed after the export": KILLED,  # before the record is finished
    "frozen after the export": FROZEN,
    "killed at the end": ENDED,  # after the record is finished
    "frozen at the end": ENDED,
}


@dataclass
class Mission:
    """A run with its faults and results. For each strategy, mission number 0 has no faults."""

    strategy: str
    number: int
    seed: int
    folder: Path
    kinds: Sequence[str]

    def run(self) -> dict[str, Any]:
        """Run the mission, and return its row for the record."""
        self.runs = self.folder / "runs"
        self.runs.mkdir(parents=True)
        self.starts: list[dict[str, Any]] = []
        with small_disk(self.runs) if "disk full" in self.kinds else contextlib.nullcontext():
            self._run_with_faults()
            weights = read_weights(self.runs)
        kinds = ", ".join(start["kind"] for start in self.starts)
        failures = [failure for start in self.starts for failure in start["failures"]]
        print(f"{self.strategy}:{self.number} {kinds}: {failures or 'passed'}", flush=True)
        return {
            "strategy": self.strategy, "number": self.number,
            "failures": failures, "starts": self.starts, "weights": weights,
        }  # fmt: skip

    def _run_with_faults(self) -> None:
        rng = random.Random(f"{self.seed} {self.strategy} {self.number}")
        for _ in range(FAULTS_PER_MISSION if self.number else 0):
            kind = rng.choice(self.kinds)
            begin = saved_steps(self.runs)
            step = min(NUM_STEPS, begin + 2 + int(rng.random() * (NUM_STEPS - begin - 1)))
            if self._start(kind, rng.randrange(STRATEGIES[self.strategy][0]), step) == "ok":
                return
        self._start("none", 0, 0)

    def _start(self, kind: str, rank: int, step: int) -> str:
        """Start the run with the given fault, wait until all its processes have ended, and add a
        row that describes this start. Return the status in the run's record."""
        folder = self.folder / f"start-{len(self.starts)}"
        (folder / "processes").mkdir(parents=True)
        begin = saved_steps(self.runs)
        (self.runs / "filled").unlink(missing_ok=True)
        began = time.time()
        job = {"folder": str(folder), "disk": str(self.runs), "kind": kind, "rank": rank}
        code = self._launch(json.dumps({**job, "step": step}), folder)
        output = (folder / "log").read_text(errors="replace")
        record = newest_record(self.runs, began)
        status = str(record.get("status", ""))
        steps_file = folder / "paid"
        num_steps = len(steps_file.read_text().splitlines()) if steps_file.exists() else 0
        has_struck = (folder / "struck").exists()
        statuses, pattern = FAULTS[kind] if has_struck else (("ok",), "")
        lines = re.findall(
            r"^(?:error: |failed[: ]|interrupted|note: (?:ranks? |after )).*", output, re.MULTILINE
        )
        words = f"{record.get('error')}\n{lines[-1:]}"
        steps_lost = begin + num_steps - saved_steps(self.runs)
        violations = {
            f"status {status!r}": status not in statuses,
            "the cause is not named": not re.search(pattern.format(rank=rank), words),
            f"{steps_lost} steps lost":
                steps_lost > 2 * SAVED_EVERY and kind != "folder removed",
            f"exit code {code}": (status, code) == ("ok", 1) or code is None,
        }  # fmt: skip
        failures = [f"{kind} at step {step}: {text}" for text, wrong in violations.items() if wrong]
        self.starts.append({
            "kind": kind, "rank": rank, "step": step, "struck": has_struck, "status": status,
            "words": words, "steps": num_steps, "steps_lost": steps_lost, "failures": failures,
            "tail": output[-3000:] if failures else "",
        })  # fmt: skip
        return status

    def _launch(self, job: str, folder: Path) -> int | None:
        """Start the launcher and wait. Return its exit code, or None if processes were killed at
        the time limit."""
        count, values = STRATEGIES[self.strategy]
        arguments = settings({
            **SMALL, "strategy": self.strategy, "num_samples": 128, "epochs": 4,
            "max_steps": NUM_STEPS, "checkpoint_every": SAVED_EVERY, "output_dir": self.runs,
            "hang_timeout_s": HANG_S, "resume": "auto", **values,
            **({"offload_dir": self.folder / "offload"} if self.strategy == "infinity" else {}),
        })  # fmt: skip
        command = [sys.executable, str(WORKER), "--num_gpus", str(count), *arguments]
        environment = clean_environment(DS_ACCELERATOR="cpu", FAULT=job, OMP_NUM_THREADS="1")
        with (folder / "log").open("w") as out:
            launcher = subprocess.Popen(
                command, cwd=ROOT, env=environment,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + LIMIT_S
        while launcher.poll() is None or any(running_pids(folder / "processes")):
            if time.monotonic() > end:
                launcher.kill()
                for process in running_pids(folder / "processes"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                launcher.wait()
                return None
            time.sleep(0.1)
        return launcher.returncode


def soak(
    seed: int, num_faults: int, seconds: float, jobs: int,
    strategies: Sequence[str], kinds: Sequence[str], out: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Run rounds with one mission per strategy, `jobs` missions at a time, until `num_faults`
    faults have struck or time is up. Return the record, which is also written after each round."""
    end = time.monotonic() + seconds
    missions: list[dict[str, Any]] = []
    references: dict[str, dict[str, Any]] = {}  # strategy -> weights of a run without faults
    with (
        ThreadPoolExecutor(jobs) as pool,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{folder}/extensions")
        if NEEDS_EXTENSIONS & {*strategies}:
            subprocess.run([sys.executable, ROOT / "tests/build_extensions.py"], check=True)
        for number in itertools.count():
            round_of_missions = [
                Mission(name, number, seed, Path(folder, f"{name}-{number}"), kinds)
                for name in strategies
            ]
            for row in pool.map(Mission.run, round_of_missions):
                weights = row.pop("weights")
                reference = references.setdefault(row["strategy"], weights)
                row["largest_difference"] = largest_difference(weights, reference)
                if row["largest_difference"] > TOLERANCE:
                    row["failures"].append(f"weights differ by {row['largest_difference']:.1e}")
                missions.append(row)
            starts = [start for mission in missions for start in mission["starts"]]
            num_struck = sum(start["struck"] for start in starts)
            record = {
                "seed": seed, "jobs": jobs, "num_faults": num_struck,
                "num_missions": len(missions),
                "num_failed": sum(bool(mission["failures"]) for mission in missions),
                "versions": versions(), "missions": missions,
            }  # fmt: skip
            if out is not None:
                out.write_text(json.dumps(record, indent=1) + "\n")
            if number and (num_struck >= num_faults or time.monotonic() > end):
                break
    return record


def largest_difference(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest relative difference between the weights of two runs, which is infinite if
    one of them has exported no weights."""
    if set(actual) != set(expected):
        return math.inf
    return max(
        float(np.linalg.norm(actual[name] - weight)) / max(float(np.linalg.norm(weight)), 1e-9)
        for name, weight in expected.items()
    )


def running_pids(processes: Path) -> Iterator[int]:
    """Yield the IDs of the running processes that have a file in `processes`. Each file's name is a
    process ID."""
    for file in list(processes.iterdir()):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{file.name}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] != "Z":
                yield int(file.name)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small disk at `folder`, and unmount it when the `with` block ends."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False)


def saved_steps(runs: Path) -> int:
    """Return the step of the newest checkpoint, or 0 if no checkpoint exists."""
    paths = runs.glob("*-*/checkpoints/step-*/meta.json")
    return max((int(path.parent.name.partition("-")[2]) for path in paths), default=0)


def newest_record(runs: Path, since: float) -> dict[str, Any]:
    """Return the newest record, or {} if no record is newer than `since`."""
    files = {file: file.stat().st_mtime for file in runs.glob("*-*/record.json")}
    file = max(files, key=lambda file: files[file], default=None)
    if file is None or files[file] < since - 1:
        return {}
    return dict(json.loads(file.read_text()))


def read_weights(runs: Path) -> dict[str, Any]:
    """Return the most recently exported weights, or {} if no run has exported weights."""
    files = sorted(runs.glob("*-*/hf/model.safetensors"), key=lambda file: file.stat().st_mtime)
    return load_file(files[-1]) if files else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--faults", type=int, default=10**6, help="end after this many faults")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=1, help="missions at the same time")
    supported = [name for name in STRATEGIES if name != "infinity" or has_libaio()]
    parser.add_argument("--strategies", nargs="+", default=supported, choices=STRATEGIES)
    parser.add_argument("--kinds", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="only check the command")
    a = parser.parse_args()
    if a.dry_run:
        return
    print(f"seed {a.seed}", flush=True)
    record = soak(a.seed, a.faults, a.seconds, a.jobs, a.strategies, a.kinds, a.out)
    print(
        f"{record['num_faults']} faults in {record['num_missions']} missions, "
        f"{record['num_failed']} failed"
    )


if __name__ == "__main__":
    main()
