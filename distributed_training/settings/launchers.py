"""Define the environment variables in which launchers pass ranks to processes. Each row of
LAUNCHERS describes one launcher. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launcher:
    """Environment variables of one launcher. If the launcher does not set the local rank and local
    world size, `rendezvous.assign_local_rank` derives them from the reports of all ranks."""

    name: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    unless: str = ""  # if this variable is set, the row does not apply

    def applies(self, environment: Mapping[str, str]) -> bool:
        """Return whether all variables of this launcher are set and `unless` is not. If the rank
        variable is not RANK, the launcher must also have started more than one process."""
        if self.unless in environment:
            return False
        names = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        if not all(name in environment for name in names if name):
            return False
        # torchrun may start a single process, but an srun step with one task is an ordinary
        # command.
        return self.rank == "RANK" or environment[self.world_size] != "1"


# The first row that applies is used. Inside a SLURM job, mpirun starts its daemons with srun, so
# srun's variables are also set. `srun --mpi=pmi2` sets PMI's variables, but no local ranks.
LAUNCHERS = (
    # Also for accelerate and for Kubeflow's TrainJob if its command is torchrun
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher("deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    Launcher("by hand", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    Launcher("PyTorchJob", "RANK", "WORLD_SIZE"),
    Launcher(  # Open MPI
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # For a container or wrapper that passes only these two variables
    Launcher("mpirun without local ranks", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher(  # MVAPICH
        "mpirun_rsh", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH, Intel MPI
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("a launcher with PMI", "PMI_RANK", "PMI_SIZE"),
    # Flux's brokers may run as tasks of one srun, so this row precedes srun's.
    Launcher("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher(  # LSF
        "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
    ),
    # sbatch also sets SLURM_PROCID, but no step variable. SLURM_PTY_PORT is set in a shell
    # that srun --pty starts.
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", unless="SLURM_PTY_PORT",
    ),
)  # fmt: skip

# Rank variables of launchers whose number of processes is not set or not read: PRRTE's prun, Cray's
# PALS and ALPS, horovodrun, MVAPICH 1
_UNCOUNTED = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "HOROVOD_RANK", "MPIRUN_RANK")
# Variables that contain the number of nodes on which this command is started. They are set by
# Kubeflow's TrainJob, SkyPilot, AWS Batch and SageMaker. SageMaker's variable lists the hosts.
_NODES = ("PET_NNODES", "SKYPILOT_NUM_NODES", "AWS_BATCH_JOB_NUM_NODES", "SM_HOSTS")

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


def find_uncounted_rank(environment: Mapping[str, str]) -> str:
    """If there may be other processes, return the name of the variable that contains this process's
    rank. Otherwise, return "". Call this function only if `find_launcher` returns None."""
    # sbatch sets SLURM_PROCID without starting processes.
    ranks = dict.fromkeys(
        launcher.rank for launcher in LAUNCHERS if launcher.rank != "SLURM_PROCID"
    )
    is_counted = any(launcher.world_size in environment for launcher in LAUNCHERS)
    for name in (*ranks, *_UNCOUNTED):
        # A launcher that starts one process may also set the rank in other launchers' variables.
        if name in environment and not (is_counted and environment[name] == "0"):
            return name
    return ""


def find_num_nodes(environment: Mapping[str, str]) -> tuple[str, int]:
    """Find the environment variable that specifies the number of nodes on which this command is
    started. Return (variable name, number of nodes), or ("", 1) if no variable specifies more than
    one node."""
    for name in _NODES:
        value = environment.get(name, "")
        if value.startswith("["):
            nodes = value.count(",") + 1
        else:
            max_nodes = value.rpartition(":")[2]  # torchrun accepts a range, MIN:MAX
            nodes = int(max_nodes) if max_nodes.isascii() and max_nodes.isdecimal() else 1
        if nodes > 1:
            return name, nodes
    return "", 1


def prints_messages(environment: Mapping[str, str]) -> bool:
    """Return whether this process prints messages for the whole run. Return True for:
    - rank 0 or a single process
    - a process with an invalid rank, because no other process would report the rank
    - a process whose launcher did not set the number of processes, because there may be no rank 0
    """
    launcher = find_launcher(environment)
    if launcher is None and find_uncounted_rank(environment):
        return True
    rank = environment.get(launcher.rank if launcher else "RANK", "0")
    world_size = environment.get(launcher.world_size if launcher else "WORLD_SIZE", "1")
    if not (rank + world_size).isascii() or not (rank.isdecimal() and world_size.isdecimal()):
        return True
    return rank == "0" or int(rank) >= int(world_size)
