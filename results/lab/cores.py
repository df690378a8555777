"""Measure the cores and the steps of runs on CPUs, to check the times that `plan` predicts there.

    OMP_NUM_THREADS=1 python results/lab/cores.py results/records/cpu/cores.json

The cores are measured before and after each run, because other programs may share them.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import checkout

from distributed_training.records.record import provenance, write_json
from distributed_training.records.report import find_records
from distributed_training.settings.files import ROOT
from distributed_training.start.cores import measure_cores

EMBEDDED = {"dataset": "embedded", "tokenizer": "embedded", "compile": False, "num_samples": -1}
FEW = {"batch_size": 1, "max_steps": 8}
SMOL = {"model": "HuggingFaceTB/SmolLM2-135M"}
RUNS: dict[str, dict[str, Any]] = {
    "words": {"preset": "words", "num_gpus": 2, "max_steps": 200},
    "laptop": {"preset": "laptop", **EMBEDDED, "num_samples": 60, "max_steps": 8},
    "gpt2-tiny": {"preset": "quick", "num_samples": -1, "max_length": 512, "max_steps": 25},
    "gpt2": {"model": "gpt2", **EMBEDDED, **FEW, "max_length": 256, "strategy": "dp"},
    "fsdp": {**SMOL, **EMBEDDED, **FEW, "max_length": 128, "strategy": "fsdp", "num_gpus": 2},
}
NUM_CPUS = len(os.sched_getaffinity(0))
COMMON = {"weights": "random", "checkpoint_every": 0, "export": False, "generate": "none"}


def measure_run(values: dict[str, Any]) -> dict[str, Any]:
    """Return the rates of a process and the times of a run's steps."""
    num_processes = values.get("num_gpus", 1)
    cores = [measure_cores(num_processes, NUM_CPUS)]
    with tempfile.TemporaryDirectory() as folder:
        options = {**values, **COMMON, "eval_samples": 2, "output_dir": folder}
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        subprocess.run([sys.executable, str(ROOT / "real_model_example.py"), *words], check=True)
        (record,) = find_records([Path(folder)])
    cores.append(measure_cores(num_processes, NUM_CPUS))
    return {
        "processes": num_processes,
        "config": record.config_requested | {"output_dir": "runs"},
        "cores": cores,
        "step_time_s": record.performance["step_time_s"],
        "machine": record.machine,
    }


def main() -> int:
    runs = {name: measure_run(values) for name, values in RUNS.items()}
    document = {
        "what": "rates of a process, measured before and after a run, and seconds of its steps",
        **provenance("OMP_NUM_THREADS=1 python results/lab/cores.py OUT.json"),
        "runs": runs,
    }
    write_json(Path(sys.argv[1]), document)
    return 0


if __name__ == "__main__":
    checkout.run(main)
