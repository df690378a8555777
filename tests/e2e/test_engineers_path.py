"""Run the commands from CLUSTER_QUICKSTART.md: make a plan, write its job script, and run the job
in a real SLURM, whose two nodes share this machine. The job is stopped, requeued and resumed."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distributed_training.records.record import load_record
from tests.conftest import assert_ok, run_command
from tests.e2e.support import clone, find_command, metrics
from tests.e2e.test_printed_commands import as_required
from tests.support import small_text

DOCUMENT = "CLUSTER_QUICKSTART.md"
SMALLER = {"Qwen/Qwen2.5-7B": "gpt2-tiny", "chats.jsonl": "mine.txt", "job.slurm": "my job.slurm"}
SHORT = shlex.split(
    "--batch_size 4 --num_samples 160 --max_length 64 --lora_rank 0 "
    "--eval_samples 8 --generate none --export false --learning_rate 0.01"
)


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
        self.inside, self.folder, self.runs = inside, folder, folder / "runs"
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
        return load_record(max(self.runs.glob("2*"))).model_dump()

    def trains(self) -> bool:
        """Return whether the newest run has trained steps."""
        return any(len(metrics(file.parent)) > 1 for file in self.runs.glob("2*/metrics.jsonl"))

    def stop(self) -> None:
        """Send the signal that SLURM sends before the time limit."""
        self.call("scancel", "--batch", "--signal=USR1", self.number)

    def wait_for(self, condition, timeout_s: float = 240) -> None:
        """Wait until `condition` is true, or if it is text, until SLURM says this of the job."""
        end = time.monotonic() + timeout_s
        status = ""
        while condition not in status if isinstance(condition, str) else not condition():
            status = self.call("scontrol", "show", "job", self.number)
            assert time.monotonic() < end, status + self.log
            time.sleep(1)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    if not as_required():
        pytest.skip("this Python has other versions than requirements.txt")
    folder = clone(tmp_path_factory.mktemp("my repository"))
    (folder / "mine.txt").write_text(small_text().read_text())
    return folder


@pytest.fixture(scope="module")
def inside(tmp_path_factory):
    with real_slurm(tmp_path_factory.mktemp("slurm")) as words:
        yield words


def write_job(repository: Path, cluster: str, *options: str) -> str:
    """Run the document's command for another cluster, and return the text of the job."""
    command = find_command(DOCUMENT, "python real_model_example.py plan --cluster")
    smaller = {**SMALLER, "2x8xH100-80GB": cluster}
    command = [smaller.get(word, word) for word in command]
    planned = run_command([*command, *SHORT, *options], cwd=repository, PYTHONPATH="")
    assert_ok(planned)
    assert planned.stdout.endswith("\n  bash 'my job.slurm'\n  sbatch 'my job.slurm'\n")
    return (repository / "my job.slurm").read_text()


def test_from_a_plan_to_a_job_on_two_nodes(repository, inside, tmp_path):
    script = write_job(repository, "2x1xL4", "--epochs", "1000")
    assert " --strategy dp " in script
    assert "--strict --resume auto" in script
    for line in ("#SBATCH --nodes=2", "#SBATCH --gpus-per-node=1", "#SBATCH --cpus-per-task=4"):
        assert line in script.splitlines()

    # Outside a job, the script only checks the plan for the cluster on which it will run.
    checked = run_command(["bash", "my job.slurm"], cwd=repository, PYTHONPATH="")
    assert_ok(checked)
    assert "launch command\n  torchrun --nnodes=2 " in checked.stdout
    assert shlex.split(checked.stdout.splitlines()[-1]) == ["sbatch", "my job.slurm"]
    missing = ["bash", "my job.slurm", "--tokenizer", "gpt2"]
    refused = run_command(missing, cwd=repository, PYTHONPATH="", HF_HOME=str(tmp_path / "hf"))
    assert (refused.returncode, refused.stderr[:24]) == (2, "error: tokenizer='gpt2' ")

    start = time.monotonic()
    job = Job(inside, repository, "--signal=B:USR1@600")
    job.wait_for(job.trains)
    limit = int((time.monotonic() - start) / 60) + 2  # one to two minutes from now
    job.call("scontrol", "update", f"jobid={job.number}", f"TimeLimit={limit}")
    job.wait_for("Restarts=1")
    stopped = job.record
    assert (stopped["status"], stopped["world_size"]) == ("interrupted", 2), job.log
    job.wait_for(lambda: f"step-{stopped['step']:08}\nlaunch command" in job.log)
    job.call("scancel", job.number)
    job.wait_for("JobState=CANCELLED")
    job.wait_for(lambda: job.call("squeue", "--noheader") == "")
    job.wait_for("Restarts=1")


def test_a_job_is_queued_again_only_after_progress(repository, inside):
    write_job(repository, "1x1xL4", "--epochs", "20", "--seed", "7")
    job = Job(inside, repository)
    # SLURM loses signals to processes that it has not started yet.
    job.wait_for(lambda: "importing torch" in job.log)
    job.stop()
    job.wait_for("JobState=FAILED")
    job.wait_for("Restarts=0")

    shutil.rmtree(job.runs, ignore_errors=True)
    job = Job(inside, repository)
    job.wait_for(job.trains)
    job.stop()
    job.wait_for("Restarts=1")
    stopped = job.record
    assert stopped["status"] == "interrupted", job.log
    job.wait_for("JobState=COMPLETED")
    record = job.record
    assert (record["status"], record["step"]) == ("ok", 800), job.log
    assert record["resumed_from"].endswith(f"step-{stopped['step']:08}")
    assert [row["step"] for row in metrics(Path(record["run_dir"]))] == list(range(1, 801))
