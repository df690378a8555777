"""What an engineer types from CLUSTER_QUICKSTART.md: a plan, the job that it writes, and the job on
two nodes, stopped in time, queued again and resumed.

The nodes are network namespaces; srun and scontrol are stand-ins of a few lines; the agents, the
processes and the run are real.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import assert_ok, clean_environment, only_record, run_command
from tests.e2e.nodes import cluster
from tests.e2e.support import clone, metrics, printed
from tests.e2e.test_printed_commands import as_required
from tests.ports import free_port
from tests.support import small_text

SRUN = """\
#!/usr/bin/env bash
shift  # --kill-on-bad-exit=1
nodes=()
trap 'kill -TERM "${{nodes[@]}}"' TERM
{on_first} env --chdir="$PWD" "$@" & nodes+=($!)
{on_second} env --chdir="$PWD" "$@" & nodes+=($!)
code=0
for node in "${{nodes[@]}}"; do
    until wait "$node" || code=$?; ! kill -0 "$node" 2>/dev/null; do :; done
done
exit "$code"
"""
SCONTROL = """\
#!/usr/bin/env bash
if [ "$1" = requeue ]; then echo "$2" >>"$REQUEUED"; else echo node0; echo node1; fi
"""
DOCUMENT = "CLUSTER_QUICKSTART.md"
SMALLER = {"2x8xH100-80GB": "2x1xL4", "gpt2-xl": "gpt2-tiny"}
SHORT = shlex.split(
    "--dataset mine.txt --num_samples 160 --max_length 64 --epochs 10 --eval_samples 8 "
    "--generate none --export false --learning_rate 0.01"
)


@pytest.fixture
def repository(tmp_path):
    return clone(tmp_path / "repository")


@pytest.fixture
def job(repository, tmp_path):
    """Starts job.slurm of the repository, as a job of two nodes with one process each."""
    started = []
    with cluster(tmp_path) as nodes:
        first, second = (shlex.join(node.command([])) for node in nodes)
        programs = {"srun": SRUN.format(on_first=first, on_second=second), "scontrol": SCONTROL}
        (tmp_path / "bin").mkdir()
        for name, text in programs.items():
            file = tmp_path / "bin" / name
            file.write_text(text)
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = clean_environment(
            PATH=path, PYTHONPATH="", VIRTUAL_ENV=sys.prefix, HF_HOME=str(tmp_path / "hf"),
            REQUEUED=str(tmp_path / "requeued"), SLURM_JOB_NODELIST="node[0-1]", SLURM_NNODES="2",
            SLURM_GPUS_ON_NODE="1", SLURM_JOB_ID=str(free_port()),
        )  # fmt: skip

        def start() -> subprocess.Popen:
            with (tmp_path / "log").open("a") as log:
                started.append(
                    subprocess.Popen(
                        ["bash", "job.slurm"], cwd=repository, env=environment, stdout=log,
                        stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                    )
                )  # fmt: skip
            return started[-1]

        yield start
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def plan(repository: Path, words: list[str]) -> tuple[str, dict[str, str], str]:
    """The best layout's strategy, what the job's header asks for, and the line with its run."""
    result = run_command(words, cwd=repository, PYTHONPATH="")
    assert_ok(result)
    table = result.stdout.split("\nlayout", 1)[1].splitlines()
    text = (repository / "job.slurm").read_text()
    asked = dict(re.findall(r"^#SBATCH --(\S+)=(\S+)", text, re.MULTILINE))
    (run,) = re.findall(r"^run=\((.*)\)$", text, re.MULTILINE)
    return table[1].split()[0], asked, run


def steps(runs: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in runs.glob("2*/metrics.jsonl"))


def test_from_a_plan_to_a_job_on_two_nodes(job, repository, tmp_path):
    if not as_required():
        pytest.skip("this Python has other versions than requirements.txt")
    command = printed(DOCUMENT, "python real_model_example.py plan --cluster")
    layout, asked, run = plan(repository, command)
    assert (asked["nodes"], asked["gpus-per-node"]) == ("2", "8")
    assert f"--model gpt2-xl --strategy {layout} " in run

    (repository / "mine.txt").write_text(small_text().read_text())
    command = [SMALLER.get(word, word) for word in command]
    layout, asked, run = plan(repository, [*command, *SHORT])
    assert (asked["nodes"], asked["gpus-per-node"]) == ("2", "1")
    assert f"--strategy {layout} --resume auto" in run

    process = job()
    runs = repository / "runs"
    said = lambda: (tmp_path / "log").read_text()  # noqa: E731
    deadline = time.monotonic() + 300
    while steps(runs) < 2:
        assert process.poll() is None, said()
        assert time.monotonic() < deadline, said()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=200)
    assert (tmp_path / "requeued").read_text().count("\n") == 1, said()
    stopped = only_record(runs)
    assert stopped["status"] == "interrupted", said()
    assert 2 <= stopped["step"] < stopped["num_steps"] == 200

    assert job().wait(timeout=300) == 0, said()
    record = only_record(runs)
    assert (record["status"], record["step"], record["world_size"]) == ("ok", 200, 2)
    assert (record["hostname"], record["strategy"]["name"]) == ("node0", layout)
    assert record["resumed_from"].endswith(f"step-{stopped['step']:08}")
    assert record["batch"]["global_batch_size"] == 8
    assert [row["step"] for row in metrics(Path(record["run_dir"]))] == list(range(1, 201))
    assert record["evaluations"][-1]["loss"] < record["evaluations"][0]["loss"] - 0.5
    assert (tmp_path / "requeued").read_text().count("\n") == 1
