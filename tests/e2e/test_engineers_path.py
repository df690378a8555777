"""Run the commands from CLUSTER_QUICKSTART.md: make a plan, write its job script, and run the job.
The job is stopped, as it would be before its time limit, and is requeued and resumed.

One test runs a real SLURM whose nodes share this machine. In the other test, the nodes are network
namespaces, and short scripts replace srun, scancel and scontrol. The agents, the processes and the
run are real."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distributed_training.records.record import load_record
from tests.conftest import assert_ok, only_record, run_command, settings
from tests.e2e.nodes import cluster
from tests.e2e.support import clone, find_command, metrics, running, wait_for
from tests.e2e.test_printed_commands import as_required
from tests.pool import SCRIPT, free_port
from tests.support import small_text

SRUN = """\
#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
nodes=()
trap 'kill -KILL "${{nodes[@]}}"' TERM  # as srun does
{on_first} env --chdir="$PWD" "$@" & nodes+=($!)
{on_second} env --chdir="$PWD" "$@" & nodes+=($!)
echo "${{nodes[@]}}" >"$TASKS"
code=0
for node in "${{nodes[@]}}"; do
    until wait "$node" || code=$?; ! kill -0 "$node" 2>/dev/null; do :; done
done
exit "$code"
"""
SCANCEL = """\
#!/usr/bin/env bash
[ "$*" = "--signal=TERM $SLURM_JOB_ID.0" ] && kill -TERM $(cat "$TASKS")
"""
SCONTROL = """\
#!/usr/bin/env bash
if [ "$1" = requeue ]; then echo "$2" >>"$REQUEUED"; else echo node0; echo node1; fi
"""
DOCUMENT = "CLUSTER_QUICKSTART.md"
SMALLER = {"2x8xH100-80GB": "2x1xL4", "Qwen/Qwen2.5-7B": "gpt2-tiny", "chats.jsonl": "mine.txt"}
SHORT = shlex.split(
    "--batch_size 4 --num_samples 160 --max_length 64 --epochs 10 --lora_rank 0 "
    "--eval_samples 8 --generate none --export false --learning_rate 0.01"
)


def environment_of(nodes, tmp_path: Path) -> dict[str, str]:
    """Return the environment that SLURM sets for a job on two nodes with one process each. PATH
    begins with the folder of the scripts that replace SLURM's programs."""
    first, second = (shlex.join(node.command([])) for node in nodes)
    srun = SRUN.format(on_first=first, on_second=second)
    programs = {"srun": srun, "scancel": SCANCEL, "scontrol": SCONTROL}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        file = tmp_path / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": "", "VIRTUAL_ENV": sys.prefix, "HF_HOME": str(tmp_path / "hf"),
        "REQUEUED": str(tmp_path / "requeued"), "TASKS": str(tmp_path / "tasks"),
        "SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": str(free_port()),
    }  # fmt: skip


def steps(runs: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in runs.glob("2*/metrics.jsonl"))


def test_from_a_plan_to_a_job_on_two_nodes(tmp_path):
    if not as_required():
        pytest.skip("this Python has other versions than requirements.txt")
    repository = clone(tmp_path / "repository")
    (repository / "mine.txt").write_text(small_text().read_text())
    command = find_command(DOCUMENT, "python real_model_example.py plan --cluster")
    command = [SMALLER.get(word, word) for word in command]
    planned = run_command([*command, *SHORT], cwd=repository, PYTHONPATH="")
    assert_ok(planned)
    assert planned.stdout.splitlines()[-2:] == ["  bash job.slurm", "  sbatch job.slurm"]
    script = (repository / "job.slurm").read_text()
    assert " --strategy dp " in script
    assert "--strict --resume auto" in script
    for line in ("#SBATCH --nodes=2", "#SBATCH --gpus-per-node=1", "#SBATCH --time=20"):
        assert line in script.splitlines()

    # Outside a job, job.slurm only checks the plan for the cluster on which it will run.
    checked = run_command(["bash", "job.slurm"], cwd=repository, PYTHONPATH="")
    assert_ok(checked)
    assert "launch command\n  torchrun --nnodes=2 " in checked.stdout
    assert checked.stdout.splitlines()[-1] == "  sbatch job.slurm"
    missing = ["bash", "job.slurm", "--tokenizer", "gpt2"]
    refused = run_command(missing, cwd=repository, PYTHONPATH="", HF_HOME=str(tmp_path / "hf"))
    assert (refused.returncode, refused.stderr[:24]) == (2, "error: tokenizer='gpt2' ")

    runs, log = repository / "runs", tmp_path / "log"
    job = ["bash", "-c", f"cd {repository} && exec bash job.slurm"]
    with cluster(tmp_path) as nodes:
        environment = environment_of(nodes, tmp_path)
        with running(job, log, **environment) as process:
            wait_for(lambda: steps(runs) >= 2, process, log, 300)
            process.send_signal(signal.SIGUSR1)
            process.wait(timeout=200)
        requeued = (tmp_path / "requeued").read_text()
        assert requeued.count("\n") == 1, log.read_text()
        stopped = only_record(runs)
        assert stopped["status"] == "interrupted", log.read_text()
        assert 2 <= stopped["step"] < stopped["num_steps"] == 200
        with running(job, log, **environment) as process:
            assert process.wait(timeout=300) == 0, log.read_text()
    record = only_record(runs)
    assert (record["status"], record["step"], record["world_size"]) == ("ok", 200, 2)
    assert (record["hostname"], record["strategy"]["name"]) == ("node0", "dp")
    assert record["resumed_from"].endswith(f"step-{stopped['step']:08}")
    assert record["batch"]["global_batch_size"] == 8
    assert [row["step"] for row in metrics(Path(record["run_dir"]))] == list(range(1, 201))
    assert record["evaluations"][-1]["loss"] < record["evaluations"][0]["loss"] - 0.5
    assert (tmp_path / "requeued").read_text() == requeued


@contextlib.contextmanager
def real_slurm(folder: Path) -> Iterator[list[str]]:
    """Start a SLURM with two nodes. Yield the words before a folder and a command to run there."""
    if shutil.which("slurmctld") is None or os.getuid() != 0:
        assert "CI" not in os.environ, "CI needs slurmctld, slurmd, munge and root"
        pytest.skip("no slurmctld, or not root")
    spaces = ["--net", "--mount", "--uts", "--pid"]
    script = str(Path(__file__).with_name("slurm.sh"))
    command = ["unshare", *spaces, "--fork", "--kill-child", "--mount-proc", "bash", script]
    with subprocess.Popen(
        [*command, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            (first,) = psutil.Process(process.pid).children()
            enter = ["nsenter", "--target", str(first.pid), *spaces, "--"]
            yield [*enter, "env", f"SLURM_CONF={folder}/slurm.conf", "env", "--chdir"]
        finally:
            process.kill()  # and, with it, all processes inside


class Job:
    """Job in a real SLURM."""

    def __init__(self, inside: list[str], folder: Path, *options: str) -> None:
        self.inside, self.folder = inside, folder
        words = ["sbatch", "--parsable", "--output=%j.log", *options, "my job.slurm"]
        self.number = self.call(*words).strip()

    def call(self, *command: str) -> str:
        words = [*self.inside, str(self.folder), *command]
        found = run_command(words, PYTHONPATH="", VIRTUAL_ENV=sys.prefix)
        assert_ok(found)
        return found.stdout

    @property
    def log(self) -> str:
        file = self.folder / f"{self.number}.log"
        return file.read_text() if file.exists() else ""

    @property
    def record(self) -> dict:
        """Record of the newest run."""
        return load_record(max((self.folder / "runs").glob("2*"))).model_dump()

    def wait_for(self, condition, timeout_s: float = 180) -> None:
        """Wait until `condition` is true, or if it is text, until SLURM says this of the job."""
        end = time.monotonic() + timeout_s
        status = ""
        while condition not in status if isinstance(condition, str) else not condition():
            status = self.call("scontrol", "show", "job", self.number)
            assert time.monotonic() < end, status + self.log
            time.sleep(0.3)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Return a function that writes a job for a number of nodes. The function returns
    `real_slurm`'s words, and a new folder with the job "my job.slurm"."""
    if not as_required():
        pytest.skip("this Python has other versions than requirements.txt")
    with real_slurm(tmp_path_factory.mktemp("slurm")) as inside:

        def write(num_nodes: int, num_epochs: int) -> tuple[list[str], Path]:
            folder = tmp_path_factory.mktemp(f"{num_nodes} nodes")
            values = {"model": "gpt2-tiny", "dataset": small_text(), "output_dir": "runs"}
            words = ["plan", "--cluster", f"{num_nodes}x1xL4", "--write", "my job.slurm"]
            command = [sys.executable, str(SCRIPT), *words, *settings(values), *SHORT]
            planned = run_command([*command, "--epochs", str(num_epochs)], cwd=folder)
            assert_ok(planned)
            assert planned.stdout.endswith("\n  bash 'my job.slurm'\n  sbatch 'my job.slurm'\n")
            return inside, folder

        yield write


def test_a_job_in_slurm_is_queued_again_only_after_progress(slurm):
    inside, folder = slurm(1, 30)
    runs = folder / "runs"
    job = Job(inside, folder)
    job.wait_for(lambda: "launch command" in job.log)
    job.call("scancel", "--batch", "--signal=USR1", job.number)  # as before the time limit
    job.wait_for("JobState=FAILED")
    job.wait_for("Restarts=0")
    assert not [*runs.glob("*/checkpoints/*")], job.log

    job = Job(inside, folder)
    job.wait_for(lambda: steps(runs) >= 2)
    job.call("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for("Restarts=1")
    stopped = job.record
    assert stopped["status"] == "interrupted", job.log
    job.wait_for("JobState=COMPLETED")
    record = job.record
    assert (record["status"], record["step"]) == ("ok", 1200), job.log
    assert record["resumed_from"].endswith(f"step-{stopped['step']:08}")
    assert [row["step"] for row in metrics(Path(record["run_dir"]))] == list(range(1, 1201))


def test_a_job_on_two_nodes_saves_before_its_limit_and_ends_when_cancelled(slurm):
    inside, folder = slurm(2, 1000)
    job = Job(inside, folder, "--signal=B:USR1@60")
    job.wait_for(lambda: steps(folder / "runs") >= 2)
    job.call("scontrol", "update", f"jobid={job.number}", "TimeLimit=1")
    job.wait_for("Restarts=1")
    assert (job.record["status"], job.record["step"] >= 2) == ("interrupted", True), job.log
    job.wait_for(lambda: f"step-{job.record['step']:08}\nlaunch command" in job.log)
    job.call("scancel", job.number)
    job.wait_for("JobState=CANCELLED")
    job.wait_for("EndTime=2")
    job.wait_for("Restarts=1")
