"""configs/train.slurm on two nodes, as SLURM would run it: stopped in time, queued again, resumed.

srun and scontrol are stand-ins of a few lines; the agents, the processes and the run are real.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import SMALL, only_record, script, settings
from tests.e2e.support import assert_refused, free_port
from tests.e2e.test_printed_commands import as_required
from tests.pool import ROOT

SRUN = """\
#!/usr/bin/env bash
shift  # --kill-on-bad-exit=1
nodes=()
trap 'kill -TERM "${nodes[@]}"' TERM
for node in $(seq "$SLURM_NNODES"); do
    SLURM_NODEID=$((node - 1)) "$@" & nodes+=($!)
done
code=0
for node in "${nodes[@]}"; do
    until wait "$node" || code=$?; ! kill -0 "$node" 2>/dev/null; do :; done
done
exit "$code"
"""
SCONTROL = """\
#!/usr/bin/env bash
if [ "$1" = requeue ]; then echo "$2" >>"$REQUEUED"; else echo localhost; echo localhost; fi
"""
SHORT = {
    "model": "gpt2-tiny", "dataset": "embedded", "strategy": "fsdp", "num_samples": 160,
    "max_length": 64, "epochs": 1, "eval_samples": 8, "generate": "none", "export": "false",
}  # fmt: skip


@pytest.fixture
def job(tmp_path):
    """Starts the script as a job of two nodes with one process each."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    environment = {
        **os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": str(free_port()),
        "REQUEUED": str(tmp_path / "requeued"), "HF_HOME": str(tmp_path / "hf"),
        "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    arguments = settings({**SHORT, "output_dir": tmp_path / "runs"})
    command = ["bash", ROOT / "configs" / "train.slurm", *map(str, arguments)]
    started = []

    def start() -> subprocess.Popen:
        log = (tmp_path / "log").open("a")
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def steps(runs: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in runs.glob("*/metrics.jsonl"))


def test_a_job_of_two_nodes_is_stopped_queued_again_and_finished(job, tmp_path):
    if not as_required():
        pytest.skip("this Python has other versions than requirements.txt")
    process, runs = job(), tmp_path / "runs"
    deadline = time.monotonic() + 120
    while steps(runs) < 2:
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    said = (tmp_path / "log").read_text()
    assert (tmp_path / "requeued").read_text().strip(), said
    stopped = only_record(runs)
    assert stopped["status"] == "interrupted", said
    assert stopped["world_size"] == 2

    assert job().wait(timeout=120) == 0, (tmp_path / "log").read_text()
    finished = only_record(runs)
    assert (finished["status"], finished["step"]) == ("ok", finished["num_steps"])
    assert finished["resumed_from"], json.dumps(finished["resumed_from"])
    assert (tmp_path / "requeued").read_text().count("\n") == 1


def test_srun_without_a_launcher_is_answered_with_what_to_type(tmp_path):
    values = {**SMALL, "output_dir": tmp_path / "runs"}
    task = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    first, second = (script(values, **task, SLURM_PROCID=rank) for rank in "01")
    assert_refused(first, "srun started this command 2 times", "sbatch --nodes=2 configs/train.slu")
    assert (second.returncode, second.stderr) == (2, ""), "said once"
    batch = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}  # of sbatch: one process, no step of srun's
    assert script(values, "--dry-run", **batch).returncode == 0
