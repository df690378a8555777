"""Measure the cores and the steps of runs on CPUs, to check the times that `plan` predicts there.

    python -m results.lab.cores results/records/cpu/cores.json

The cores are measured before and after each run, because other programs may share them. The record
is written after each run.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.predict import local_cluster
from distributed_training.predict.speed import estimate_step
from distributed_training.records.record import provenance, write_json
from distributed_training.records.report import find_records
from distributed_training.settings.detect import threads_per_process
from distributed_training.settings.files import ROOT
from distributed_training.settings.machine import Machine
from distributed_training.settings.request import build_config
from distributed_training.start.cores import measure_cores

EMBEDDED = {"dataset": "embedded", "tokenizer": "embedded", "compile": False, "num_samples": -1}
FEW = {"batch_size": 1, "max_steps": 6}
SMOL = {"model": "HuggingFaceTB/SmolLM2-135M"}
RUNS: dict[str, dict[str, Any]] = {
    "words": {"preset": "words", "num_gpus": 2, "max_steps": 100},
    "fsdp": {**SMOL, **EMBEDDED, **FEW, "max_length": 128, "strategy": "fsdp", "num_gpus": 2},
    "laptop": {"preset": "laptop", **EMBEDDED, "num_samples": 60, "max_steps": 6},
    "gpt2-tiny": {"preset": "quick", "num_samples": -1, "max_length": 512, "max_steps": 25},
    "gpt2": {"model": "gpt2", **EMBEDDED, **FEW, "max_length": 256, "strategy": "dp"},
}
NUM_CPUS = len(os.sched_getaffinity(0))
COMMON = {"weights": "random", "checkpoint_every": 0, "export": False, "generate": "none"}


def predicted_times(run: dict[str, Any]) -> Iterator[float]:
    """Yield the seconds per step that follow from each measurement of the cores."""
    machine = Machine(**run["machine"] | {"compute_capability": (0, 0)})
    for cores in run["cores"]:
        cluster = local_cluster(machine, run["processes"], run["processes"], cores)
        assert cluster.rates is not None
        plan = draft_plan(build_config(run["config"]), cluster)
        yield estimate_step(plan, cluster.rates).seconds


def measure_run(values: dict[str, Any]) -> dict[str, Any]:
    """Return the rates of a process and the times of a run's steps."""
    num_processes = values.get("num_gpus", 1)
    cores = [measure_cores(num_processes, NUM_CPUS)]
    with tempfile.TemporaryDirectory() as folder:
        options = {**values, **COMMON, "eval_samples": 2, "output_dir": folder}
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, str(ROOT / "real_model_example.py"), *words]
        training = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if training.returncode:
            sys.exit(training.stdout)
        (record,) = find_records([Path(folder)])
    cores.append(measure_cores(num_processes, NUM_CPUS))
    return {
        "processes": num_processes,
        "threads": int(os.environ.get("OMP_NUM_THREADS", threads_per_process(num_processes))),
        "config": record.config_requested | {"output_dir": "runs"},
        "cores": cores,
        "step_time_s": record.performance["step_time_s"],
        "machine": record.machine,
    }


def processor() -> str:
    """Return the name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def main() -> None:
    document = {
        "what": "rates of a process, measured before and after a run, and seconds of its steps",
        **provenance("python -m results.lab.cores OUT.json"),
        "processor": processor(),
        "load": os.getloadavg()[0],
        "runs": {},
    }
    for name in RUNS:
        began = time.perf_counter()
        run = document["runs"][name] = measure_run(RUNS[name])
        write_json(Path(sys.argv[1]), document)
        measured_s = run["step_time_s"]["p50"]
        errors = ", ".join(f"{seconds / measured_s - 1:+.0%}" for seconds in predicted_times(run))
        took_s = time.perf_counter() - began
        print(
            f"{name}: {1000 * measured_s:,.0f} ms, predicted {errors} ({took_s:.0f} s)", flush=True
        )


if __name__ == "__main__":
    main()
