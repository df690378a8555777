"""Build commands and job files that run a planned layout. This module does not import torch."""

import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from distributed_training.plan.plan import Draft
from distributed_training.planner.answer import Answer, build_options
from distributed_training.settings.errors import printable
from distributed_training.settings.files import IS_INSTALLED, MARK, ROOT
from distributed_training.settings.machine import GIB, find_gpu

FIRST_HOST = "FIRST_HOST"  # placeholder in a launch command for several nodes
FIRST_HOST_NOTE = f"Replace {FIRST_HOST} with the name of the first node."
OVERHEAD_S = 900  # seconds per job for starting, compiling, evaluating and saving
SAFETY_FACTOR = 1.25  # factor by which predicted RAM and time are multiplied
# End of a job file's name -> template in configs/, and the command that submits the job
TEMPLATES = {
    ".sky.yaml": ("skypilot.yaml", "sky jobs launch"),
    ".yaml": ("kubeflow-trainjob.yaml", "kubectl create -f"),
    "": ("train.slurm", "sbatch"),
}
# GPUs whose name in SkyPilot is not our name without "RTX-"
SKYPILOT_GPUS = {"H100-80GB": "H100", "A100-40GB": "A100", "V100-16GB": "V100"}


def launch_command(
    plan: Draft,
    script: Path,
    job_id: str = "JOB_ID",
) -> str:
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
    found: Answer,
    file: Path,
    script: Path,
    *,
    machine_options: Sequence[str],
    plan_command: str,
) -> str:
    """Return the contents of the template for `file`, filled in for the first choice of an answer.
    `machine_options` are the options that describe the cluster. `plan_command` is the command that
    writes this job. The job requests 25% more RAM and, under SLURM, 25% more time than
    predicted."""
    choice = found.first
    amount = found.amount
    plan = choice.plan
    options = found.options
    processes_here = plan.processes_here
    num_nodes = plan.num_processes // processes_here
    gib = math.ceil(SAFETY_FACTOR * choice.memory.host_bytes * processes_here / GIB)
    template, submit = job_template(file)
    name = f"train-{plan.strategy.name.replace('_', '-')}"
    header = [f"{MARK}:  {plan_command}", f"Submit:  {submit} {shlex.quote(file.name)}"]
    time = "04:00:00"
    if isinstance(amount, str):
        header.append(f"The time is unknown: {amount}.")
    elif choice.likely_s is None:
        header.append("The time is unknown: the GPU's speed is unknown.")
    else:
        steps = math.ceil(amount.num_steps * (1 + amount.error))
        min_step_s, max_step_s = choice.likely_s
        header.append(f"Predicted: {steps:,} steps of {min_step_s:.3g} to {max_step_s:.3g} s each.")
        limit_s = SAFETY_FACTOR * steps * max_step_s + OVERHEAD_S
        time = str(5 * math.ceil(limit_s / 300))  # SLURM reads a number alone as minutes
    # A user's text cannot leave its comment.
    comments = "\n".join(f"# {printable(line)}" for line in header)
    job = (ROOT / "configs" / template).read_text(encoding="utf-8")
    if template == "train.slurm":
        own_file = ROOT / "configs/site.slurm"
        own_lines = ""
        if own_file.is_file():
            own_lines = own_file.read_text(encoding="utf-8").rstrip()
        num_cpus = min(4 * processes_here, plan.machine.num_cpus)  # unless it has fewer
        # Relative paths in the options refer to the current folder.
        words = shlex.join([str(script), "--strict", "--resume", "auto", *options])
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
    elif template == "skypilot.yaml":
        gpu = find_gpu(plan.machine.gpu_name)
        gpu_name = str(gpu.name if gpu else plan.machine.gpu_name).replace("RTX-", "RTX")
        accelerators = f"{SKYPILOT_GPUS.get(gpu_name, gpu_name)}:{processes_here}"
        changes = {
            "train-gpt2": _quoted(name),
            "num_nodes: 2": f"num_nodes: {num_nodes}",
            "workdir: .": f"workdir: {_quoted(str(script.parent))}",
            "H100:8": _quoted(accelerators),
            "64+": f"{gib}+",
            "--strategy fsdp": _quoted(shlex.join(options)),
        }
    else:
        changes = {
            "train-gpt2-": _quoted(f"{name}-"),
            "numNodes: 2": f"numNodes: {num_nodes}",
            "numProcPerNode: 8": f"numProcPerNode: {processes_here}",
            "gpu: 8": f"gpu: {processes_here}",
            "64Gi": f"{gib}Gi",
            "--strategy=fsdp": ", ".join(map(_quoted, options)),
        }
    # A user may have changed some of these lines in the template.
    pattern = "|".join(["^# Submit: .*", *map(re.escape, changes)])
    return re.sub(
        pattern,
        lambda match: changes.get(match[0], comments),
        job,
        flags=re.MULTILINE,
    )


def _quoted(text: str) -> str:
    """Return a YAML string on one line."""
    import yaml

    return str(yaml.safe_dump(text, default_style='"', width=sys.maxsize)).rstrip()


def job_template(file: Path) -> tuple[str, str]:
    """Return the name of the template for a job file, and the command that submits the job."""
    entries = [entry for end, entry in TEMPLATES.items() if file.name.endswith(end)]
    return entries[0]
