"""Inject random faults into runs of all strategies, many at a time, and measure the lost steps.

    python -m tests.faults.soak --jobs 24 --seconds 480 --seed 1 --out results/soak.json
    python -m tests.faults.soak --seed 1 --repeat zero2:3   # repeats one mission

A mission is one run on two or four CPU processes, started with --num_gpus as a user would. Up
to three random faults strike at random steps, and after each fault the run is restarted with
`resume=auto`. The final weights must equal the weights of a run without faults. Goodput is the
number of useful steps divided by the number of executed steps."""

import argparse
import contextlib
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from distributed_training.planner.checks import has_libaio
from distributed_training.records.record import versions
from tests.conftest import SMALL, clean_environment, heavy_pool, settings
from tests.parity.support import small_infinity
from tests.pool import ROOT

WORKER = ROOT / "tests/faults/soak_worker.py"
NUM_STEPS = 40
SAVED_EVERY = 8
HANG_S = 30
FAULTS_PER_MISSION = 3
LIMIT_S = 200.0  # time limit of one start
RESERVE_S = 110.0  # no fault begins if less time remains
WEEK_S = 7 * 86400.0  # longest run; subprocess accepts no infinite timeout
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
NEEDS_EXTENSIONS = ("offload", "infinity")  # strategies that need DeepSpeed's extensions


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
    num_faults: int
    cores: list[int]
    time_left: Callable[[], float]
    warm: bool = False  # run in processes of tests.pool, without a launcher

    def run(self) -> dict[str, Any]:
        """Run the mission, and return its row for the record."""
        self.runs = self.folder / "runs"
        self.runs.mkdir(parents=True)
        rng = random.Random(f"{self.seed} {self.strategy} {self.number}")
        self.faults: list[dict[str, Any]] = []
        self.failures: list[str] = []
        with small_disk(self.runs) if "disk full" in self.kinds else contextlib.nullcontext():
            status = self._run_with_faults(rng)
            useful_steps = saved_steps(self.runs)
            weights = read_weights(self.runs)
        steps_paid = sum(fault["steps"] for fault in self.faults)
        return {
            "strategy": self.strategy, "number": self.number, "status": status,
            "useful_steps": useful_steps, "steps_paid": steps_paid, "failures": self.failures,
            "starts": self.faults, "weights": weights,
        }  # fmt: skip

    def _run_with_faults(self, rng: random.Random) -> str | None:
        for _ in range(self.num_faults):
            kind = rng.choice(self.kinds)
            share = rng.random()
            rank = rng.randrange(STRATEGIES[self.strategy][0])
            if self.time_left() < RESERVE_S:
                break
            begin = saved_steps(self.runs)
            step = min(NUM_STEPS, begin + 2 + int(share * (NUM_STEPS - begin - 1)))
            row = self._start(kind, rank, step)
            self._check_outcome(row)
            if row["status"] == "ok":
                return "ok"
        row = self._start("none", 0, 0)
        if row["status"] != "ok":
            self.failures.append(
                f"without a fault, the run ended with status {row['status']!r}: {row['tail']}"
            )
        return row["status"]

    def _start(self, kind: str, rank: int, step: int) -> dict[str, Any]:
        """Start the run with the given fault, and wait until all its processes have ended. Return a
        row that describes this start."""
        start_folder = self.folder / f"start-{len(self.faults)}"
        (start_folder / "processes").mkdir(parents=True)
        begin = saved_steps(self.runs)
        (self.runs / "filled").unlink(missing_ok=True)
        job = {
            "folder": str(start_folder),
            "kind": kind,
            "rank": rank,
            "step": step,
            "cores": self.cores,
        }
        environment = {"SOAK": json.dumps(job | {"disk": str(self.runs)}), "OMP_NUM_THREADS": "1"}
        began = time.time()
        log = start_folder / "log"
        code = self._launch(environment, log, start_folder / "processes")
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
            "seconds": round(ended - began, 1),
            "recorded_s": (
                round(written - struck_at, 1) if struck_at and written > struck_at else None
            ),
            "ended_s": round(ended - struck_at, 1) if struck_at else None, "tail": "",
        }  # fmt: skip
        if row["status"] != "ok":
            row["tail"] = output[-3000:]
        self.faults.append(row)
        return row

    def _launch(self, environment: dict[str, Any], log: Path, processes: Path) -> int | None:
        """Start the launcher and wait. Return its exit code, or None if it was killed at the time
        limit."""
        count, values = STRATEGIES[self.strategy]
        arguments = settings({
            **SMALL, "strategy": self.strategy, "num_samples": 128, "epochs": 4,
            "max_steps": NUM_STEPS, "checkpoint_every": SAVED_EVERY, "output_dir": self.runs,
            "hang_timeout_s": HANG_S, "resume": "auto", **values,
            **({"offload_dir": self.folder / "offload"} if self.strategy == "infinity" else {}),
        })  # fmt: skip
        limit_s = min(LIMIT_S, max(1.0, self.time_left()))
        if self.warm:
            result = heavy_pool().script(
                arguments, num_processes=count, script=WORKER, limit_s=limit_s, **environment
            )
            log.write_text(result.stdout + result.stderr)
            return result.returncode
        command = [sys.executable, str(WORKER), "--num_gpus", str(count), *arguments]
        with log.open("w") as out:
            launcher = subprocess.Popen(
                command, cwd=ROOT, env=clean_environment(DS_ACCELERATOR="cpu", **environment),
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + limit_s
        while launcher.poll() is None or any(running_pids(processes)):
            if time.monotonic() > end:
                if self.time_left() > 0:
                    remaining = sorted(running_pids(processes))
                    self.failures.append(
                        f"processes {remaining} were still running after {limit_s:.0f} s"
                    )
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
        if not row["struck"] or self.time_left() <= 0:
            return
        expected = FAULTS[row["kind"]]
        words = f"{row['error']}\n{row['said']}"
        row["named"] = bool(re.search(expected.named.format(rank=row["rank"]), words))
        if row["status"] == "ok" and expected.status != ("ok",):
            row["named"] = True
        violations = {
            f"status {row['status']!r}": row["status"] not in expected.status,
            "the culprit is not named": not (row["named"] or self.warm),
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


class Soak:
    """Runs missions on `jobs` threads until time is up or `num_faults` faults have struck."""

    def __init__(
        self, seed: int, num_faults: int, seconds: float, jobs: int,
        strategies: Sequence[str], kinds: Sequence[str], warm: bool, folder: Path,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.num_faults = num_faults
        self.warm = warm
        self.folder = folder
        self.strategies = list(strategies)
        self.kinds = list(kinds)
        self.jobs = jobs
        self.end = time.monotonic() + seconds
        self.lock = threading.RLock()
        self.num_begun = dict.fromkeys(strategies, 0)
        self.reference_weights: dict[str, dict[str, Any]] = {}
        self.not_run: dict[str, str] = {}
        self.missions: list[dict[str, Any]] = []
        self.broken: list[dict[str, Any]] = []  # errors of the soak itself
        self.struck = 0
        self.extensions = warm or not set(NEEDS_EXTENSIONS) & set(strategies)

    def time_left(self) -> float:
        return self.end - time.monotonic()

    def run(self, on_mission_end: Callable[[], None] = lambda: None) -> None:
        """Run all missions. Call `on_mission_end` after each mission."""
        threads = [
            threading.Thread(target=self._run_missions, args=(slot, on_mission_end), daemon=True)
            for slot in range(self.jobs)
        ]
        threads += [] if self.extensions else [threading.Thread(target=self._build, daemon=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _build(self) -> None:
        """Build DeepSpeed's extensions once for all missions."""
        script = [sys.executable, str(ROOT / "tests" / "build_extensions.py")]
        completed = subprocess.run(
            script, env=clean_environment(), capture_output=True, text=True,
            timeout=max(1, self.time_left()),
        )  # fmt: skip
        with self.lock:
            if completed.returncode:
                why = f"extensions cannot be built: {completed.stderr.strip()[-300:]}"
                self.not_run |= {name: why for name in NEEDS_EXTENSIONS if name in self.strategies}
            self.extensions = True

    def _next(self) -> tuple[str, int] | None:
        """Choose the strategy with the fewest missions among the strategies that can run now.
        Return the strategy and its next mission number, or None if no strategy can run now."""
        with self.lock:
            ready = [
                name for name in self.strategies
                if name not in self.not_run and (self.extensions or name not in NEEDS_EXTENSIONS)
                and (not self.num_begun[name] or name in self.reference_weights)
            ]  # fmt: skip
            if not ready:
                return None
            name = min(ready, key=lambda name: self.num_begun[name])
            self.num_begun[name] += 1
            return name, self.num_begun[name] - 1

    def _run_missions(self, slot: int, on_mission_end: Callable[[], None]) -> None:
        while self.time_left() > RESERVE_S and self.struck < self.num_faults:
            mission = self._next()
            if mission is None:
                time.sleep(0.2)
                continue
            try:
                row = self.run_mission(*mission, slot)
                with self.lock:
                    self._add_result(row)
            except Exception:  # skip the mission and report the error
                with self.lock:
                    self.broken.append(
                        {"mission": mission, "error": traceback.format_exc()[-2000:]}
                    )
            with self.lock:
                on_mission_end()

    def run_mission(self, strategy: str, number: int, slot: int = 0) -> dict[str, Any]:
        """Run mission `number` of a strategy, and return its row for the record."""
        cores = sorted(os.sched_getaffinity(0))
        per_job = len(os.sched_getaffinity(0)) // self.jobs
        mission_cores = cores[slot * per_job : (slot + 1) * per_job] if per_job >= 2 else []
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as folder:
            return Mission(
                strategy, number, self.seed, Path(folder), self.kinds,
                min(FAULTS_PER_MISSION, self.num_faults) if number else 0, mission_cores,
                self.time_left, self.warm,
            ).run()  # fmt: skip

    def _add_result(self, row: dict[str, Any]) -> None:
        weights = row.pop("weights")
        name = row["strategy"]
        if row["number"] == 0:
            if row["failures"]:
                self.not_run[name] = row["failures"][0]
            else:
                self.reference_weights[name] = weights
            return
        if row["status"] != "ok" and self.time_left() <= 0:
            return  # stopped because the time was over
        self.struck += sum(start["struck"] for start in row["starts"])
        row |= (
            compare_weights(weights, self.reference_weights[name]) if row["status"] == "ok" else {}
        )
        if row.get("largest_difference", 0) > TOLERANCE:
            row["failures"].append(f"weights differ by {row['largest_difference']:.1e}")
        self.missions.append(row)
        kinds = ", ".join(start["kind"] for start in row["starts"][:FAULTS_PER_MISSION])
        end = "; ".join(row["failures"]) or "passed"
        print(f"{name}:{row['number']} {kinds}: {end}", flush=True)

    def record(self) -> dict[str, Any]:
        """Return the record of all missions, for publication."""
        with self.lock:
            starts = [(m, start) for m in self.missions for start in m["starts"] if start["struck"]]
            useful, paid = (
                sum(m[k] for m in self.missions) for k in ("useful_steps", "steps_paid")
            )
            return {
                "seed": self.seed, "jobs": self.jobs, "num_faults": len(starts),
                "num_missions": len(self.missions),
                "num_failed": sum(bool(m["failures"]) for m in self.missions),
                "goodput": round(useful / paid, 4) if paid else None,
                "useful_steps": useful, "steps_paid": paid, "num_steps": NUM_STEPS,
                "saved_every": SAVED_EVERY, "hang_timeout_s": HANG_S, "versions": versions(),
                "machine": {"num_cpus": os.cpu_count(), "kernel": platform.release()},
                "not_run": self.not_run, "broken": self.broken,
                "by_fault": totals_by(starts, lambda _, start: start["kind"]),
                "by_strategy": totals_by(starts, lambda mission, _: mission["strategy"]),
                "failures": [m for m in self.missions if m["failures"]],
                "missions": [without_tails(m) for m in self.missions if not m["failures"]],
            }  # fmt: skip


def totals_by(
    starts: list[tuple[dict[str, Any], dict[str, Any]]], key: Callable[..., str]
) -> dict[str, dict[str, Any]]:
    """Group (mission, start) pairs by the result of `key`. Return the totals of each group, keyed
    by this result."""
    rows = {}
    for name in sorted({key(*pair) for pair in starts}):
        group = [pair for pair in starts if key(*pair) == name]
        missions = {id(mission): mission for mission, _ in group}.values()
        ended_s = sorted(start["ended_s"] for _, start in group)
        rows[name] = {
            "faults": len(group),
            "named": sum(start.get("named", False) for _, start in group),
            "ended_s": {"median": statistics.median(ended_s), "most": ended_s[-1]},
            "recorded_s_most": max((s["recorded_s"] or 0 for _, s in group), default=None),
            "steps_lost": {
                "mean": round(statistics.mean(start["steps_lost"] for _, start in group), 1),
                "most": max(start["steps_lost"] for _, start in group),
            },
            "missions": len(missions),
            "bit_identical": sum(m.get("bit_identical", False) for m in missions),
            "failed": sum(bool(m["failures"]) for m in missions),
            "goodput": round(
                sum(m["useful_steps"] for m in missions) / sum(m["steps_paid"] for m in missions), 4
            ),
        }
    return rows


def without_tails(mission: dict[str, Any]) -> dict[str, Any]:
    """Return a mission without its logs, which are not needed if the mission succeeds."""
    starts = [{k: v for k, v in start.items() if k != "tail"} for start in mission["starts"]]
    return {**mission, "starts": starts}


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


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder)):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


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


def soak(
    seed: int,
    num_faults: int,
    seconds: float = WEEK_S,
    *,
    jobs: int = 1,
    strategies: Sequence[str] = tuple(STRATEGIES),
    kinds: Sequence[str] = tuple(FAULTS),
    warm: bool = False,
    out: Path | None = None,
) -> dict[str, Any]:
    """Run missions until `num_faults` faults have struck or time is up. Return the record."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        soak_run = Soak(seed, num_faults, seconds, jobs, strategies, kinds, warm, Path(folder))
        exclude_unsupported(soak_run)

        def write() -> None:
            if out is not None:
                out.write_text(json.dumps(soak_run.record(), indent=1) + "\n")

        soak_run.run(write)
        write()
        return soak_run.record()


def exclude_unsupported(soak_run: Soak) -> None:
    """Exclude strategies and faults that this machine does not support. Set the folder for
    DeepSpeed's extensions unless the environment already names one."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(soak_run.folder / "extensions"))
    if "infinity" in soak_run.strategies and not has_libaio():
        soak_run.not_run["infinity"] = "libaio is not installed"
    if "disk full" in soak_run.kinds and not can_mount():
        soak_run.kinds.remove("disk full")
        soak_run.not_run["disk full"] = "a separate disk cannot be mounted on this machine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--faults", type=int, default=10**6, help="end after this many faults")
    parser.add_argument("--seconds", type=float, default=WEEK_S)
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="number of missions to run at the same time (default: 1)",
    )
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--kinds", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument(
        "--repeat",
        metavar="STRATEGY:NUMBER",
        help="repeat one mission, and print its result with the ends of its logs",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--dry-run", action="store_true", help="check the command without starting it"
    )
    a = parser.parse_args()
    if a.dry_run:
        print("The command is accepted. Nothing was started.")
        return
    print(f"seed {a.seed}", flush=True)
    if a.repeat is not None:
        name, _, number = a.repeat.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            soak_run = Soak(a.seed, a.faults, a.seconds, 1, [name], a.kinds, False, Path(folder))
            exclude_unsupported(soak_run)
            row = soak_run.run_mission(name, int(number))
        print(json.dumps({**row, "weights": None}, indent=1))
        return
    record = soak(
        a.seed, a.faults, a.seconds, jobs=a.jobs, strategies=a.strategies, kinds=a.kinds, out=a.out
    )
    print(
        f"{record['num_faults']} faults in {record['num_missions']} missions, "
        f"{record['num_failed']} failed, goodput {record['goodput']}"
    )


if __name__ == "__main__":
    main()
