"""Build commands and SLURM jobs that run a planned layout. This module does not import torch."""

import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from distributed_training.plan.plan import Draft
from distributed_training.planner.answer import Answer, build_options, estimate_run_s
from distributed_training.records.display import describe_time
from distributed_training.settings.errors import printable
from distributed_training.settings.files import IS_INSTALLED, MARK, ROOT
from distributed_training.settings.machine import GIB

FIRST_HOST = "FIRST_HOST"  # placeholder in a launch command for several nodes
FIRST_HOST_NOTE = f"Replace {FIRST_HOST} with the name of the first node."
OVERHEAD_S = 900  # seconds per job for starting, compiling, evaluating and saving
UNKNOWN_FACTOR = 2  # factor by which a predicted time is multiplied if its range is unknown
SAFETY_FACTOR = 1.25  # factor by which predicted RAM and time are multiplied


def launch_command(plan: Draft, script: Path, job_id: str = "JOB_ID") -> str:
    """Return the command to run on each node to execute `plan`."""
    processes_here = plan.processes_here
    num_nodes = plan.num_processes // processes_here
    launcher = ["python", os.path.relpath(script)]
    program = launcher[1:]
    if IS_INSTALLED:
        launcher = ["trainplan"]
        program = ["-m", "distributed_training.cli"]
    if num_nodes > 1:
        # By default, torchrun waits ten minutes for the other nodes.
        timeout = f"--rdzv_conf=join_timeout={plan.config.rendezvous_timeout_s}"
        launcher = [
            "torchrun",
            f"--nnodes={num_nodes}",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint={FIRST_HOST}:29500",
            f"--rdzv_id={job_id}",
            timeout,
            f"--nproc_per_node={processes_here}",
            *program,
        ]
    elif processes_here > 1:
        launcher += ["--num_gpus", str(processes_here)]
    return shlex.join([*launcher, *build_options(plan)])


def build_batch_script(
    found: Answer, file: Path, script: Path, *, machine_options: Sequence[str], plan_command: str
) -> str:
    """Return the contents of the SLURM template, filled in for the first choice of an answer.
    `machine_options` are the options that describe the cluster. `plan_command` is the command that
    writes this job. The job requests 25% more RAM and time than predicted."""
    choice = found.first
    amount = found.amount
    plan = choice.plan
    processes_here = plan.processes_here
    num_nodes = plan.num_processes // processes_here
    gib = math.ceil(SAFETY_FACTOR * choice.memory.host_bytes * processes_here / GIB)
    name = f"train-{plan.strategy.name.replace('_', '-')}"
    header = [f"{MARK}:  {plan_command}", f"Submit:  sbatch {shlex.quote(file.name)}"]
    time = "04:00:00"
    if isinstance(amount, str):
        header.append(f"The time is unknown: {amount}.")
    elif (run_s := estimate_run_s(choice, amount)) is None:
        header.append("The time is unknown: the GPU's speed is unknown.")
    else:
        steps = math.ceil(amount.num_steps * (1 + amount.error))
        header.append(f"Predicted: {steps:,} steps, {describe_time(choice.as_record())}.")
        factor = choice.evidence.shares[1] if choice.evidence.shares else UNKNOWN_FACTOR
        limit_s = SAFETY_FACTOR * factor * (1 + amount.error) * run_s + OVERHEAD_S
        time = str(5 * math.ceil(limit_s / 300))  # SLURM reads a number alone as minutes
    # A user's text cannot leave its comment.
    comments = "\n".join(f"# {printable(line)}" for line in header)
    job = (ROOT / "configs/train.slurm").read_text(encoding="utf-8")
    own_file = ROOT / "configs/site.slurm"
    own_lines = own_file.read_text(encoding="utf-8").rstrip() if own_file.is_file() else ""
    num_cpus = min(4 * processes_here, plan.machine.num_cpus)  # unless it has fewer
    # Relative paths in the options refer to the current folder.
    words = shlex.join([str(script), "--strict", "--resume", "auto", *found.options])
    run_line = f"cd {shlex.quote(str(Path.cwd()))}\nrun=({words}"
    changes = {
        "train-gpt2": shlex.quote(printable(name)),
        "--nodes=1": f"--nodes={num_nodes}",
        "--gpus-per-node=4": f"--gpus-per-node={processes_here}",
        "--cpus-per-task=16": f"--cpus-per-task={num_cpus}",
        "--mem=64G": f"--mem={gib}G",
        "--time=04:00:00": f"--time={time}",
        "# Lines of configs/site.slurm": own_lines,
        'cd "${SLURM_SUBMIT_DIR:-.}"': f"cd {shlex.quote(str(script.parent))}",
        "run=(real_model_example.py --strict --resume auto": run_line,
        "--dry-run)  # here": shlex.join([*machine_options, "--dry-run"]) + ")",
    }
    # A user may have changed some of these lines in the template.
    pattern = "|".join(["^# Submit: .*", *map(re.escape, changes)])
    return re.sub(pattern, lambda match: changes.get(match[0], comments), job, flags=re.MULTILINE)
