"""Inject random faults into runs of all strategies, many at a time, and measure the lost steps.

    python -m tests.faults.soak --jobs 24 --seconds 480 --seed 1 --out results/soak.json
    python -m tests.faults.soak --seed 1 --strategies zero2   # repeats the missions of zero2

A mission is one run on two or four CPU processes, started with --num_gpus as a user would. Up
to three random faults strike at random steps, and after each fault the run is restarted with
`resume=auto`. The final weights must equal the weights of a run without faults. Goodput is the
number of useful steps divided by the number of executed steps. The fault "disk full" mounts a disk,
which needs root."""

import argparse
import collections
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
from tests.parity.support import small_infinity
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
            "model": "four-wide-layers",
            "tokenizer": "embedded",
            **small_infinity(sub_group_size=2**18),
        },
    ),
}
NEEDS_EXTENSIONS = {"offload", "infinity"}  # strategies that need DeepSpeed's extensions


@dataclass(frozen=True)
class Expected:
    """Required outcome of a run after a fault."""

    status: tuple[str, ...]  # accepted statuses in the run's record; "" accepts a missing record
    named: str  # pattern that the record's error or the output must match
    recorded_s: float = 15.0  # longest time from the fault until the record is written
    ended_s: float = 15.0  # longest time until all processes have ended; a frozen process has 30 s
    removes: bool = False  # whether the run's folder is removed, which loses all its steps


KILLED = Expected(("failed",), r"rank {rank} was killed by SIGKILL")
STOPPED = Expected(("interrupted", "ok"), "", 30, 30)  # launchers allow this time for saving
FULL = Expected(("failed",), "(No space|quota|too large).*--resume auto")
FAULTS = {
    "killed": KILLED,
    "killed while saving": KILLED,
    "killed at the start": Expected(("", "running", "failed", "interrupted"), KILLED.named),
    "launcher killed": STOPPED,  # the kernel sends SIGTERM to the ranks
    "all killed": Expected(("running",), ""),
    "frozen": Expected(("failed",), r"rank {rank} was stopped \(SIGSTOP\)", 60, 100),
    "hangs": Expected(("failed",), r"waiting for rank {rank}\b", 60, 100),
    "told to stop": STOPPED,
    "rank told to stop": STOPPED,
    "terminal gone": STOPPED,
    "Ctrl-C": STOPPED,
    "disk full": FULL,
    "no quota": FULL,
    "not finite": Expected(("failed",), r"not finite on ranks? ([\d, ]+, )?{rank}\b"),
    # A record remains if rank 0 writes it during the removal of the folder.
    "folder removed": Expected(("", "failed"), r"was removed or renamed", removes=True),
    # After the export, before the record is finished
    "killed after the export": KILLED,
    "frozen after the export": Expected(
        ("failed",), r"rank {rank} was stopped \(SIGSTOP\)", 60, 100
    ),
    # After the record is finished
    "killed at the end": Expected(("ok",), r"note: .*(rank {rank}\b|finished)"),
    "frozen at the end": Expected(("ok",), r"note: .*(rank {rank}\b|finished)", 60, 100),
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
        self.failures: list[str] = []
        with small_disk(self.runs) if "disk full" in self.kinds else contextlib.nullcontext():
            status = self._run_with_faults()
            useful_steps = saved_steps(self.runs)
            weights = read_weights(self.runs)
        kinds = ", ".join(start["kind"] for start in self.starts)
        print(f"{self.strategy}:{self.number} {kinds}: {self.failures or 'passed'}", flush=True)
        return {
            "strategy": self.strategy, "number": self.number, "status": status,
            "useful_steps": useful_steps, "steps_paid": sum(s["steps"] for s in self.starts),
            "failures": self.failures, "starts": self.starts, "weights": weights,
        }  # fmt: skip

    def _run_with_faults(self) -> str:
        rng = random.Random(f"{self.seed} {self.strategy} {self.number}")
        for _ in range(FAULTS_PER_MISSION if self.number else 0):
            kind = rng.choice(self.kinds)
            begin = saved_steps(self.runs)
            step = min(NUM_STEPS, begin + 2 + int(rng.random() * (NUM_STEPS - begin - 1)))
            row = self._start(kind, rng.randrange(STRATEGIES[self.strategy][0]), step)
            self._check_outcome(row)
            if row["status"] == "ok":
                return "ok"
        row = self._start("none", 0, 0)
        if row["status"] != "ok":
            self.failures.append(
                f"without a fault, the run ended with status {row['status']!r}: {row['tail']}"
            )
        return str(row["status"])

    def _start(self, kind: str, rank: int, step: int) -> dict[str, Any]:
        """Start the run with the given fault, and wait until all its processes have ended. Return a
        row that describes this start."""
        start_folder = self.folder / f"start-{len(self.starts)}"
        (start_folder / "processes").mkdir(parents=True)
        begin = saved_steps(self.runs)
        (self.runs / "filled").unlink(missing_ok=True)
        job = {
            "folder": str(start_folder), "disk": str(self.runs), "kind": kind, "rank": rank,
            "step": step,
        }  # fmt: skip
        began = time.time()
        log = start_folder / "log"
        code = self._launch(json.dumps(job), log, start_folder / "processes")
        ended = time.time()
        output = log.read_text(errors="replace")
        strike_file = start_folder / "struck"
        struck_at = float(strike_file.read_text()) if strike_file.exists() else None
        record, written = newest_record(self.runs, began)
        steps_file = start_folder / "paid"
        num_steps = len(steps_file.read_text().splitlines()) if steps_file.exists() else 0
        lines = re.findall(
            r"^(?:error: |failed[: ]|interrupted|note: (?:ranks? |after )).*", output, re.MULTILINE
        )
        row = {
            "kind": kind, "rank": rank, "step": step, "struck": struck_at is not None,
            "status": record.get("status", ""), "error": record.get("error"), "said": lines[-1:],
            "exit_code": code,
            "from": begin, "steps": num_steps,
            "steps_lost": begin + num_steps - saved_steps(self.runs),
            "recorded_s": (
                round(written - struck_at, 1) if struck_at and written > struck_at else None
            ),
            "ended_s": round(ended - struck_at, 1) if struck_at else None,
            "tail": output[-3000:] if record.get("status") != "ok" else "",
        }  # fmt: skip
        self.starts.append(row)
        return row

    def _launch(self, job: str, log: Path, processes: Path) -> int | None:
        """Start the launcher and wait. Return its exit code, or None if it was killed at the time
        limit."""
        count, values = STRATEGIES[self.strategy]
        arguments = settings({
            **SMALL, "strategy": self.strategy, "num_samples": 128, "epochs": 4,
            "max_steps": NUM_STEPS, "checkpoint_every": SAVED_EVERY, "output_dir": self.runs,
            "hang_timeout_s": HANG_S, "resume": "auto", **values,
            **({"offload_dir": self.folder / "offload"} if self.strategy == "infinity" else {}),
        })  # fmt: skip
        command = [sys.executable, str(WORKER), "--num_gpus", str(count), *arguments]
        environment = clean_environment(DS_ACCELERATOR="cpu", SOAK=job, OMP_NUM_THREADS="1")
        with log.open("w") as out:
            launcher = subprocess.Popen(
                command, cwd=ROOT, env=environment,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + LIMIT_S
        while launcher.poll() is None or any(running_pids(processes)):
            if time.monotonic() > end:
                self.failures.append(f"{sorted(running_pids(processes))} ran for {LIMIT_S:.0f} s")
                launcher.kill()
                for process in running_pids(processes):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                launcher.wait()
                return None
            time.sleep(0.1)
        return launcher.returncode

    def _check_outcome(self, row: dict[str, Any]) -> None:
        """Record a failure if the run did not end as required after this fault. Also record in
        `row["named"]` whether the run's messages name the cause."""
        if not row["struck"]:
            return
        expected = FAULTS[row["kind"]]
        words = f"{row['error']}\n{row['said']}"
        is_named = bool(re.search(expected.named.format(rank=row["rank"]), words))
        row["named"] = is_named or (row["status"] == "ok" and expected.status != ("ok",))
        violations = {
            f"status {row['status']!r}": row["status"] not in expected.status,
            "the culprit is not named": not row["named"],
            f"{row['steps_lost']} steps lost":
                row["steps_lost"] > 2 * SAVED_EVERY and not expected.removes,
            f"exit code {row['exit_code']}": (row["status"], row["exit_code"]) == ("ok", 1),
            f"recorded after {row['recorded_s']} s":
                (row["recorded_s"] or 0) > expected.recorded_s,
            f"ended after {row['ended_s']} s": row["ended_s"] > expected.ended_s,
        }  # fmt: skip
        texts = [text for text, violated in violations.items() if violated]
        if texts:
            self.failures.append(f"{row['kind']} at step {row['step']}: {'; '.join(texts)}")


def soak(
    seed: int,
    num_faults: int,
    seconds: float,
    jobs: int,
    strategies: Sequence[str],
    kinds: Sequence[str],
    out: Path | None,
) -> dict[str, Any]:
    """Run rounds with one mission per strategy, `jobs` missions at a time, until `num_faults`
    faults have struck or time is up. Return the record, which is also written after each round."""
    end = time.monotonic() + seconds
    missions: list[dict[str, Any]] = []
    struck = 0
    with (
        ThreadPoolExecutor(jobs) as pool,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):

        def run_round(number: int) -> list[dict[str, Any]]:
            return list(
                pool.map(
                    lambda name: Mission(
                        name, number, seed, Path(folder, f"{name}-{number}"), kinds
                    ).run(),
                    strategies,
                )
            )

        os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{folder}/extensions")
        if NEEDS_EXTENSIONS & {*strategies}:
            subprocess.run([sys.executable, ROOT / "tests/build_extensions.py"], check=True)
        references = {row["strategy"]: row for row in run_round(0)}
        assert not any(row["failures"] for row in references.values())
        for number in itertools.count(1):
            for row in run_round(number):
                weights = row.pop("weights")
                if row["status"] == "ok":
                    row |= compare_weights(weights, references[row["strategy"]]["weights"])
                    if row["largest_difference"] > TOLERANCE:
                        row["failures"].append(f"weights differ by {row['largest_difference']:.1e}")
                missions.append(row)
                struck += sum(start["struck"] for start in row["starts"])
            record = build_record(missions) | {"seed": seed, "jobs": jobs}
            if out is not None:
                out.write_text(json.dumps(record, indent=1) + "\n")
            if struck >= num_faults or time.monotonic() > end:
                return record
    raise AssertionError("missions never end")


def build_record(missions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of all missions, for publication."""
    by_fault = collections.defaultdict(list)
    for start in (start for mission in missions for start in mission["starts"] if start["struck"]):
        by_fault[start["kind"]].append(start)
    useful, paid = (sum(row[key] for row in missions) for key in ("useful_steps", "steps_paid"))
    return {
        "num_faults": sum(map(len, by_fault.values())), "num_missions": len(missions),
        "num_failed": sum(bool(mission["failures"]) for mission in missions),
        "goodput": round(useful / paid, 4), "versions": versions(), "num_steps": NUM_STEPS,
        "saved_every": SAVED_EVERY, "hang_timeout_s": HANG_S,
        "by_fault": {
            kind: {
                "faults": len(starts),
                "named": sum(start["named"] for start in starts),
                "ended_s_most": max(start["ended_s"] for start in starts),
                "steps_lost_most": max(start["steps_lost"] for start in starts),
            }
            for kind, starts in sorted(by_fault.items())
        },
        "missions": missions,
    }  # fmt: skip


def compare_weights(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return whether two runs' weights are bit-identical, and the largest relative difference
    between their tensors."""
    assert set(actual) == set(expected)
    differences = {}
    for name in actual:
        size = float(np.linalg.norm(expected[name]))
        differences[name] = float(np.linalg.norm(actual[name] - expected[name])) / max(size, 1e-9)
    identical = all(actual[name].tobytes() == expected[name].tobytes() for name in actual)
    return {"bit_identical": identical, "largest_difference": max(differences.values())}


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


def newest_record(runs: Path, since: float) -> tuple[dict[str, Any], float]:
    """Return the newest record and its modification time, or ({}, 0.0) if no record is newer than
    `since`."""
    files = {file: file.stat().st_mtime for file in runs.glob("*-*/record.json")}
    file = max(files, key=lambda file: files[file], default=None)
    if file is None or files[file] < since - 1:
        return {}, 0.0
    return json.loads(file.read_text()), files[file]


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
        f"{record['num_failed']} failed, goodput {record['goodput']}"
    )


if __name__ == "__main__":
    main()
