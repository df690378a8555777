"""Measure the RAM and time of every strategy on 1, 2 and 4 CPU processes, to check predictions.

    python results/lab/cpu.py results/records/cpu/strategies.json [--timed]

The program passes results/plans/cpu.json to `compare`. If you stop it, run the same command again
to continue. By default, each run has a few steps, which are enough to measure the peak memory. With
--timed, each run has all steps of the plan, and the program also records their time. Times mean
little unless the machine is otherwise idle.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout

from distributed_training.records.record import Record, provenance, write_json
from distributed_training.records.report import find_records
from distributed_training.records.results import RESULTS
from distributed_training.settings.files import ROOT
from distributed_training.settings.keys import Parser

COMMAND = "python results/lab/cpu.py OUT.json"
PLAN = ROOT / "results" / "plans" / "cpu.json"
# The first run tokenizes the text, which takes RAM, and fills the cache for the other runs.
PROCESS_COUNTS = (2, 4, 1)
FEW_STEPS = 5
RUN_DIRS = {False: Path("/tmp/cpu-memory"), True: Path("/tmp/cpu-timed")}  # by --timed
FOLDER_KEYS = ("output_dir", "offload_dir")


def build_entry(record: Record, timed: bool) -> dict[str, Any]:
    """Return the fields of a run's record that go into the output file."""
    config = {
        key: value for key, value in record.config_requested.items() if key not in FOLDER_KEYS
    }
    return {
        "processes": record.world_size,
        "config": config,
        "peak_host_bytes": record.memory["peak_host_bytes"],
        "step_time_s": RESULTS["ms per step"].value(record) if timed else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--timed", action="store_true")
    arguments = parser.parse_args(argv)
    folder = RUN_DIRS[arguments.timed]
    for count in PROCESS_COUNTS:
        command = ["compare", str(PLAN), f"--num_gpus={count}", f"--out={folder}"]
        command += [] if arguments.timed else [f"--max_steps={FEW_STEPS}"]
        start = [sys.executable, str(ROOT / "real_model_example.py")]
        if subprocess.run([*start, *command]).returncode != 0:
            return 1
    records = sorted(find_records([folder / "runs"]), key=lambda record: record.world_size)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "what": "peak RAM of the process that uses the most RAM, and seconds per step if measured",
        **provenance(COMMAND + (" --timed" if arguments.timed else "")),
        "machine": records[0].machine,
        "runs": [build_entry(record, arguments.timed) for record in records],
    }
    write_json(arguments.out, document)
    print(f"Wrote {len(records)} runs to {arguments.out}.")
    return 0


if __name__ == "__main__":
    checkout.run(main)
