"""Build commands and job files that run a planned layout. This module does not import torch."""

import argparse
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml

from distributed_training.data.report import Amount
from distributed_training.plan.plan import Draft
from distributed_training.planner.sort import layout_settings
from distributed_training.predict.predict import Prediction
from distributed_training.settings.errors import printable
from distributed_training.settings.files import ROOT
from distributed_training.settings.machine import GIB, find_gpu
from distributed_training.settings.request import parse_overrides

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


def build_options(plan: Draft, arguments: argparse.Namespace) -> list[str]:
    """Return the options with which the script starts this plan: the preset, the typed keys, the
    keys that the planner set as if they were typed, the layout, and restarts."""
    requested = plan.requested
    values = parse_overrides(arguments.overrides) | {
        name: value
        for name, value in requested.to_key_values().items()
        if requested.set_by.get(name) == "command line"
    }
    values |= {"strategy": plan.strategy.name} | layout_settings(plan)
    options = ["--preset", arguments.preset] if arguments.preset else []
    options += [f"--{name}" for name in ("force", "strict") if getattr(arguments, name)]
    if arguments.max_restarts:
        options += ["--max_restarts", str(arguments.max_restarts)]
    for name, value in values.items():
        text = str(value)
        # argparse reads values that begin with a dash as options, except for negative numbers.
        has_dash = text.startswith("-") and text != "-1"
        options += [f"--{name}={text}"] if has_dash else [f"--{name}", text]
    return options


def build_batch_script(
    choice: Prediction,
    amount: Amount | str,
    file: Path,
    script: Path,
    options: Sequence[str],
    *,
    machine_options: Sequence[str],
    plan_command: str,
) -> str:
    """Return the contents of the template for `file`, filled in for a layout and an amount of work
    (or the reason why it is unknown). `options` are the script's options, and `machine_options` are
    the options that describe the cluster. `plan_command` is the command that writes this job. The
    job requests 25% more RAM and, under SLURM, 25% more time than predicted."""
    plan = choice.plan
    processes_here = plan.processes_here
    num_nodes = plan.num_processes // processes_here
    gib = math.ceil(SAFETY_FACTOR * choice.memory.host_bytes * processes_here / GIB)
    template, submit = job_template(file)
    name = f"train-{plan.strategy.name.replace('_', '-')}"
    header = [
        f"written by distributed_training:  {plan_command}",
        f"Submit:  {submit} {shlex.quote(file.name)}",
    ]
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
        script_words = [str(script), *options]
        if "--strict" not in script_words:
            script_words.append("--strict")
        if "--resume" not in script_words:
            script_words += ["--resume", "auto"]
        own_file = ROOT / "configs/site.slurm"
        own_lines = ""
        if own_file.is_file():
            own_lines = own_file.read_text(encoding="utf-8").rstrip()
        num_cpus = min(4 * processes_here, plan.machine.num_cpus)  # unless it has fewer
        # Relative paths in the options refer to the current folder.
        run_line = f"cd {shlex.quote(str(Path.cwd()))}\nrun=({shlex.join(script_words)}"
        changes = {
            "# Submit:  sbatch --nodes=2 configs/train.slurm --strategy fsdp ...": comments,
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
        pattern = "|".join(map(re.escape, changes))
        return re.sub(
            pattern,
            lambda match: changes[match[0]],
            job,
        )
    job, setup, shell_text = job.partition("setup:")
    document = yaml.safe_load(job)
    if template == "skypilot.yaml":
        gpu = find_gpu(plan.machine.gpu_name)
        gpu_name = str(gpu.name if gpu else plan.machine.gpu_name).replace("RTX-", "RTX")
        accelerators = f"{SKYPILOT_GPUS.get(gpu_name, gpu_name)}:{processes_here}"
        document |= {
            "name": name,
            "num_nodes": num_nodes,
            "workdir": str(script.parent),
        }
        document["resources"] |= {"accelerators": accelerators, "memory": f"{gib}+"}
        document["envs"]["TRAIN"] = shlex.join(options)
    else:
        document["metadata"]["generateName"] = f"{name}-"
        trainer = document["spec"]["trainer"]
        trainer |= {"numNodes": num_nodes, "numProcPerNode": processes_here}
        limits = {"nvidia.com/gpu": processes_here, "memory": f"{gib}Gi"}
        trainer["resourcesPerNode"]["limits"] = limits
        trainer["args"] = [*trainer["args"][:-1], *options]  # without the example --strategy
    instructions = "".join(
        re.findall(
            "^#.*\n",
            job.partition("\n")[2],
            re.MULTILINE,
        )
    )
    text = yaml.safe_dump(document, sort_keys=False)
    return f"{comments}\n{instructions}{text}{setup}{shell_text}"


def job_template(file: Path) -> tuple[str, str]:
    """Return the name of the template for a job file, and the command that submits the job."""
    entries = [entry for end, entry in TEMPLATES.items() if file.name.endswith(end)]
    return entries[0]
