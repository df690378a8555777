"""Random faults, one after the other, and what they cost: goodput = useful steps / steps paid.

    python -m tests.soak --seed 1 --faults 300 --minutes 10 --out results/soak.json

A mission is one run on two CPU processes. Under a random strategy it meets random faults at random
steps, is begun again with `resume=auto` after each, and must end with the loss of a run that met
none. Limits of time are short.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import re
import resource
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import SMALL, heavy_pool, settings

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "fsdp", "tp", "pp", "hybrid", "local_sgd")
NUM_STEPS, SAVED_EVERY = 16, 4
# Fault -> the signal that one of the processes gets, where it is one.
FAULTS = {
    "killed": signal.SIGKILL,  # in a step
    "killed while saving": signal.SIGKILL,
    "frozen": signal.SIGSTOP,
    "hangs": None,
    "told to stop": signal.SIGTERM,
    "terminal gone": signal.SIGHUP,
    "disk full": None,  # while saving
    "not finite": None,
}
FAULTS_A_MISSION = 3
TOLERANCE = 1e-4  # of the last evaluation's loss


def with_fault(job: dict[str, Any]) -> int:
    """The script on one process of a mission; `fault` strikes rank `rank` in step `step`."""
    from distributed_training.run import checkpoint, watch
    from distributed_training.run.loop import Trainer
    from tests.e2e.fault_cases import run_script

    watch.BEAT_S, watch.LOST_S, watch.SLOW_S = 0.5, 8.0, 2.0
    right_update, right_begin = Trainer._update, checkpoint.Saver.begin
    fault, mine = job["fault"], int(os.environ["RANK"]) == job["rank"]

    def update(self: Trainer) -> None:
        if mine and self.step + 1 == job["step"]:
            if fault == "hangs":
                time.sleep(600)
            elif fault == "not finite":
                step = self.engine.train_step
                self.engine.train_step = lambda batch: dataclasses.replace(
                    result := step(batch), loss_sum=result.loss_sum * float("nan")
                )
            elif fault not in (None, "killed while saving", "disk full"):
                os.kill(os.getpid(), FAULTS[fault])
        right_update(self)
        if self.topology.rank == 0:
            with open(job["paid"], "a") as file:
                file.write(f"{self.step}\n")

    def begin(self: Any, engine: Any, **options: Any) -> None:
        if mine and options["step"] >= job["step"]:
            if fault == "disk full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            elif fault == "killed while saving":
                checkpoint.write_parts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        right_begin(self, engine, **options)

    Trainer._update, checkpoint.Saver.begin = update, begin
    return run_script(job["arguments"])


def attempt(values: Mapping[str, Any], folder: Path, fault: Mapping[str, Any]) -> tuple[int, str]:
    """(optimizer steps done, what was said) of one start of a run."""
    paid = folder / "paid"
    before = len(paid.read_text().splitlines()) if paid.exists() else 0
    job = {**fault, "paid": str(paid), "arguments": settings({**values, "resume": "auto"})}
    said = ""
    try:
        heavy_pool().call("tests.soak:with_fault", job, num_processes=2, grace_s=60)
    except RuntimeError as error:
        said = str(error)
    return len(paid.read_text().splitlines()) - before if paid.exists() else 0, said


def saved_steps(output_dir: Path) -> int:
    """The step of the newest checkpoint."""
    found = output_dir.glob("*-*/checkpoints/step-*")
    return max((int(path.name.partition("-")[2]) for path in found), default=0)


def newest_record(output_dir: Path) -> dict[str, Any]:
    """Of several where a fault came before the first checkpoint."""
    return json.loads(max(output_dir.glob("*-*/record.json")).read_text())


def run_mission(
    strategy: str, draw: random.Random, folder: Path, num_faults: int, names: Sequence[str]
) -> dict[str, Any]:
    """One run with so many faults, as a row of the record."""
    output_dir = folder / "runs"
    values = {
        **SMALL, "strategy": strategy, "max_steps": NUM_STEPS, "epochs": 4, "export": False,
        "checkpoint_every": SAVED_EVERY, "output_dir": output_dir, "hang_timeout_s": 8,
    }  # fmt: skip
    paid, faults, record = 0, list[dict[str, Any]](), {"status": None}
    for _ in range(num_faults):
        begin = saved_steps(output_dir)
        if begin >= NUM_STEPS - 1:
            break
        fault = {
            "fault": draw.choice(names),
            "rank": draw.randrange(2),
            "step": draw.randrange(begin + 2, NUM_STEPS + 1),
        }
        start = time.monotonic()
        steps, said = attempt(values, folder, fault)
        record = newest_record(output_dir)
        lost = begin + steps - saved_steps(output_dir)
        lines = re.findall(r"^(?:error: |failed: |interrupted|rank \d lost).*", said, re.MULTILINE)
        faults.append({
            **fault, "status": record["status"], "error": record["error"], "said": lines[:1],
            "steps": steps, "steps_lost": lost, "seconds": round(time.monotonic() - start, 1),
        })  # fmt: skip
        # What was still being written when the fault struck is lost, too.
        assert lost <= 2 * SAVED_EVERY, (strategy, faults[-1], said)
        paid += steps
    if record["status"] != "ok":  # which it is where a rank that writes nothing had no room to
        steps, said = attempt(values, folder, {"fault": None, "rank": 0, "step": 0})
        paid, record = paid + steps, newest_record(output_dir)
    assert record["status"] == "ok", (strategy, faults, said)
    evaluation = record["evaluations"][-1]
    return {
        "strategy": strategy, "faults": faults, "steps_paid": paid,
        "useful_steps": evaluation["step"], "loss": evaluation["loss"],
    }  # fmt: skip


def soak(
    seed: int,
    num_faults: int,
    seconds: float = float("inf"),
    *,
    strategies: Sequence[str] = STRATEGIES,
    faults: Sequence[str] = tuple(FAULTS),
) -> dict[str, Any]:
    """The record of missions until so many faults have struck, or the time is over."""
    draw, missions, end = random.Random(seed), list[dict[str, Any]](), time.monotonic() + seconds
    undisturbed: dict[str, float] = {}
    while (struck := sum(len(m["faults"]) for m in missions)) < num_faults:
        if time.monotonic() > end:
            break
        with tempfile.TemporaryDirectory() as folder:
            most = min(FAULTS_A_MISSION, num_faults - struck)
            name = draw.choice(strategies)
            mission = run_mission(name, draw, Path(folder), most, faults)
        if name not in undisturbed:
            with tempfile.TemporaryDirectory() as folder:
                undisturbed[name] = run_mission(name, draw, Path(folder), 0, faults)["loss"]
        assert abs(mission["loss"] - undisturbed[name]) < TOLERANCE, (mission, undisturbed[name])
        missions.append(mission)
        names = ", ".join(fault["fault"] for fault in mission["faults"])
        print(f"{name}: {names}: {NUM_STEPS} steps of {mission['steps_paid']}", flush=True)
    useful, paid = (sum(m[key] for m in missions) for key in ("useful_steps", "steps_paid"))
    return {
        "seed": seed, "num_faults": sum(len(m["faults"]) for m in missions),
        "goodput": useful / paid, "useful_steps": useful, "steps_paid": paid,
        "saved_every": SAVED_EVERY, "processes": 2, "host": platform.machine(),
        "missions": missions,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    record = soak(arguments.seed, arguments.faults, 60 * arguments.minutes)
    print(f"{record['num_faults']} faults, goodput {record['goodput']:.2f}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
