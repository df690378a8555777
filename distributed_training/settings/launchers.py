"""Define the environment variables in which launchers pass ranks to processes. Each row of
LAUNCHERS describes one launcher. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launcher:
    """Environment variables of one launcher."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    unless: str = ""  # if this variable is set, the row does not apply

    def applies(self, environment: Mapping[str, str]) -> bool:
        """Return whether all variables of this launcher are set and `unless` is not. If the rank
        variable is not RANK, the launcher must also have started more than one process."""
        names = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        if self.unless in environment or not all(name in environment for name in names):
            return False
        # torchrun may start a single process, but an srun step with one task is an ordinary
        # command.
        return self.rank == "RANK" or environment[self.world_size] != "1"


# The first row that applies is used. Inside a SLURM job, mpirun starts its daemons with srun, so
# srun's variables are also set.
LAUNCHERS = (
    # Also for accelerate and for Kubeflow's TrainJob if its command is torchrun
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher("deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    Launcher(  # Open MPI
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH, Intel MPI
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # sbatch also sets SLURM_PROCID, but no step variable. SLURM_PTY_PORT is set in a shell
    # that srun --pty starts.
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE", unless="SLURM_PTY_PORT",
    ),
)  # fmt: skip

# Variable in which accelerate passes a setting -> accelerate's name for the setting
_ACCELERATE = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM", "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism",
}  # fmt: skip
ACCELERATE_JSON = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


def describe_ignored_settings(environment: Mapping[str, str], precision: str) -> str:
    """Return a note about settings of `accelerate launch` that have no effect because CONFIG takes
    precedence. Return "" if there are no such settings. Accelerate's DeepSpeed configuration is
    checked separately by `run_dir.refuse_other_json`."""
    names = [
        name
        for variable, name in _ACCELERATE.items()
        if environment.get(variable) == "true"
        and not (name == "DeepSpeed" and ACCELERATE_JSON in environment)
    ]
    settings = [f"settings for {' and '.join(names)}"] if names else []
    mixed_precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed_precision not in ("no", precision):
        settings.append(f"mixed_precision={mixed_precision}")
    ignored = " and ".join(settings)
    return (
        ignored
        and f"accelerate launch's {ignored} will have no effect, because CONFIG takes precedence"
    )


def find_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Return the environment variables of the launcher that started this process. Return None if
    the launcher is not in LAUNCHERS."""
    return next((launcher for launcher in LAUNCHERS if launcher.applies(environment)), None)


def prints_messages(environment: Mapping[str, str]) -> bool:
    """Return whether this process prints the errors that all processes on its machine detect."""
    launcher = find_launcher(environment)
    return launcher is None or environment[launcher.local_rank] == "0"
