"""Run the commands from CLUSTER_QUICKSTART.md: make a plan, write its job script, and run the job
on two nodes. The job receives SIGTERM, as it would at its time limit, and is requeued and resumed.
The nodes are network namespaces, and short scripts replace srun and scontrol. The agents, the
processes and the run are real."""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import assert_ok, only_record, run_command
from tests.e2e.nodes import cluster
from tests.e2e.support import clone, find_command, metrics, running, wait_for
from tests.e2e.test_printed_commands import as_required
from tests.pool import free_port
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
SMALLER = {"2x8xH100-80GB": "2x1xL4", "Qwen/Qwen2.5-7B": "gpt2-tiny", "chats.jsonl": "mine.txt"}
SHORT = shlex.split(
    "--batch_size 4 --num_samples 160 --max_length 64 --epochs 10 --lora_rank 0 "
    "--eval_samples 8 --generate none --export false --learning_rate 0.01"
)


def environment_of(nodes, tmp_path: Path) -> dict[str, str]:
    """Return the environment that SLURM sets for a job on two nodes with one process each. PATH
    begins with the folder of the scripts that replace srun and scontrol."""
    first, second = (shlex.join(node.command([])) for node in nodes)
    programs = {"srun": SRUN.format(on_first=first, on_second=second), "scontrol": SCONTROL}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        file = tmp_path / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": "", "VIRTUAL_ENV": sys.prefix, "HF_HOME": str(tmp_path / "hf"),
        "REQUEUED": str(tmp_path / "requeued"), "SLURM_JOB_NODELIST": "node[0-1]",
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
    missing = ["bash", "job.slurm", "--tokenizer", "gpt2"]
    refused = run_command(missing, cwd=repository, PYTHONPATH="", HF_HOME=str(tmp_path / "hf"))
    assert (refused.returncode, refused.stderr[:24]) == (2, "error: tokenizer='gpt2' ")

    runs, log = repository / "runs", tmp_path / "log"
    job = ["bash", "-c", f"cd {repository} && exec bash job.slurm"]
    with cluster(tmp_path) as nodes:
        environment = environment_of(nodes, tmp_path)
        with running(job, log, **environment) as process:
            wait_for(lambda: steps(runs) >= 2, process, log, 300)
            process.send_signal(signal.SIGTERM)
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
