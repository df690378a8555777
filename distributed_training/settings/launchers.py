"""Define the environment variables in which launchers pass ranks to processes. Each row of
LAUNCHERS describes one launcher. This module does not import torch."""

from collections.abc import Mapping
from typing import NamedTuple

PLANNED_OPTION = "--planned"  # option that a command passes to the ranks that it starts
CPU_PROCESSES = 2  # minimum number of processes for "--num_gpus all" without GPUs


class Launcher(NamedTuple):
    """Environment variables of one launcher."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


# The first row whose variables are all set is used.
LAUNCHERS = (
    # Also for accelerate and for Kubeflow's TrainJob if its command is torchrun
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher("deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    # sbatch also sets SLURM_PROCID, but no step variable.
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
    ),
)


def find_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Return the environment variables of the launcher that started this process. Return None if
    the launcher is not in LAUNCHERS. Also return None in an interactive shell of srun (--pty) and
    in a step with one task, because the command that a user types there has no launcher."""
    for launcher in LAUNCHERS:
        if all(name in environment for name in launcher[1:]):
            is_shell = "SLURM_PTY_PORT" in environment or environment[launcher.world_size] == "1"
            return None if launcher.name == "srun" and is_shell else launcher
    return None


def prints_messages(environment: Mapping[str, str]) -> bool:
    """Return whether this process prints the errors that all processes on its machine detect."""
    launcher = find_launcher(environment)
    return launcher is None or environment[launcher.local_rank] == "0"
