"""Test the environment variables that each launcher sets for the second of two processes on a
machine."""

import os

import pytest

from distributed_training.settings.errors import run_and_report_errors
from distributed_training.settings.launchers import (
    LAUNCHERS,
    describe_ignored_settings,
    find_launcher,
)
from distributed_training.start.ranks import current_process
from distributed_training.supervise.process import Process
from tests.support import refused

RANK_1 = {"RANK": "1", "WORLD_SIZE": "2"}
TORCHRUN = {**RANK_1, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
SRUN = {
    "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
}  # fmt: skip
# In a SLURM job, mpirun uses srun to start one daemon per node.
MPIRUN = {
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "3",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
CASES = {
    "torchrun": (TORCHRUN, "torchrun", (1, 2)),
    "accelerate": ({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}, "torchrun", (1, 2)),
    "deepspeed": ({**RANK_1, "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, "deepspeed", (1, 2)),
    "by hand": ({**RANK_1, "LOCAL_RANK": "1"}, "by hand", (1, 0)),
    "PyTorchJob": ({**RANK_1, "PET_NNODES": "2"}, "PyTorchJob", (0, 0)),
    "mpirun": (MPIRUN, "mpirun", (1, 2)),
    "mpirun -x": (
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        "mpirun without local ranks",
        (0, 0),
    ),
    "mpirun_rsh": (
        {
            "MV2_COMM_WORLD_RANK": "1",
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_LOCAL_RANK": "1",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
        },
        "mpirun_rsh",
        (1, 2),
    ),
    "mpiexec": ({**PMI, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, "mpiexec", (1, 2)),
    "srun --mpi=pmi2": ({**SRUN, **PMI}, "a launcher with PMI", (0, 0)),
    "flux run": (
        {
            **SRUN,
            "SLURM_PROCID": "0",
            "FLUX_TASK_RANK": "1",
            "FLUX_JOB_SIZE": "2",
            "FLUX_TASK_LOCAL_ID": "1",
        },
        "flux run",
        (1, 0),
    ),
    "jsrun": (
        {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "1"},
        "jsrun",
        (1, 0),
    ),
    "srun": (SRUN, "srun", (1, 0)),
}
ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    def replace(**values):
        monkeypatch.setattr(os, "environ", dict(values))

    return replace


def test_every_launcher_has_a_test_case():
    assert {row for _, row, _ in CASES.values()} == {source.name for source in LAUNCHERS}


@pytest.mark.parametrize("launcher", CASES)
def test_rank_is_read_from_every_launcher(launcher, environment, capsys):
    variables, row, local = CASES[launcher]
    assert find_launcher(variables).name == row
    environment(**variables, **MASTER)
    process = current_process()
    assert (process.rank, process.world_size) == (1, 2)
    assert (process.local_rank, process.local_world_size) == local, "0 of 0: found out later"
    assert process == current_process(), "once told, always the same"
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")

    environment(**variables)
    with refused("MASTER_ADDR and MASTER_PORT", "--num_gpus N", "torchrun"):
        current_process()
    assert run_and_report_errors(lambda: current_process() and 0) == 2
    assert capsys.readouterr().err == "", "rank 0 says it"


@pytest.mark.parametrize(
    "environment_of_one",
    [
        {},
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "2",
        },  # sbatch starts one process, which is not a step of srun
        {**SRUN, "SLURM_PTY_PORT": "1234"},  # a shell
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {**SRUN, "SLURM_PTY_PORT": "1234", "SLURM_PROCID": "0", "PMIX_RANK": "0"},
        {"SKYPILOT_NUM_NODES": "1", "SM_HOSTS": '["algo-1"]', "AWS_BATCH_JOB_NUM_NODES": ""},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"},
        {"ACCELERATE_MIXED_PRECISION": "no"},
    ],
)
def test_an_ordinary_command_has_no_launcher(environment_of_one, environment):
    environment(**environment_of_one)
    assert current_process() is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "RANK is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is set, but RANK is not"),
        ({**RANK_1, **MASTER, "WORLD_SIZE": "1" + "0" * 9}, "is too large"),
        ({**RANK_1, **MASTER, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a valid port"),
        ({**RANK_1, **MASTER, "RANK": "\u0661"}, "is not a number"),
        ({**TORCHRUN, **MASTER, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number"),
        ({**TORCHRUN, **MASTER, "MASTER_PORT": ""}, "MASTER_PORT='' is not a number"),
        ({**RANK_1, **MASTER, "RANK": "2"}, "RANK=2 is out of range for WORLD_SIZE=2"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is set, but WORLD_SIZE is not"),
        (
            {"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "1"},
            "PMIX_RANK is set, but WORLD_SIZE is not",
        ),
        ({"PALS_RANKID": "0"}, "PALS_RANKID is set, but"),
        ({"ALPS_APP_PE": "1"}, "ALPS_APP_PE is set, but"),
        ({"HOROVOD_RANK": "1"}, "HOROVOD_RANK is set, but"),
        ({"MPIRUN_RANK": "1"}, "MPIRUN_RANK is set, but"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK is set, but"),
        ({"PMI_RANK": "0"}, "PMI_RANK is set, but"),
        ({"FLUX_TASK_RANK": "0"}, "FLUX_TASK_RANK is set, but"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES specifies 4 nodes, but this process has no"),
        ({"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NUM_NODES specifies 2 nodes"),
        ({"AWS_BATCH_JOB_NUM_NODES": "3"}, "AWS_BATCH_JOB_NUM_NODES specifies 3 nodes"),
        ({"SM_HOSTS": '["algo-1","algo-2"]'}, "SM_HOSTS specifies 2 nodes"),
        ({"ACCELERATE_MIXED_PRECISION": "no", **MASTER}, "accelerate launch started one process"),
    ],
)
def test_incomplete_launcher_variables_are_refused(variables, message, environment, capsys):
    environment(**variables)
    with refused(message):
        current_process()
    if "WORLD_SIZE" not in variables:  # perhaps no other process can report the error
        assert run_and_report_errors(lambda: current_process() and 0) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["-1", "", "2", "x", "\u0661"])
def test_an_invalid_rank_is_reported(rank, environment, capsys):
    environment(**{**RANK_1, **MASTER, "RANK": rank})
    assert run_and_report_errors(lambda: current_process() and 0) == 2
    assert f"RANK={rank}" in capsys.readouterr().err.replace("'", "")


def test_one_process_of_torchrun_is_a_single_process(environment):
    environment(**ONE)
    assert current_process() == Process(rank=0, world_size=1, local_rank=0, local_world_size=1)


def test_unused_settings_of_accelerate_are_named():
    assert describe_ignored_settings({"ACCELERATE_MIXED_PRECISION": "no"}, "fp32") == ""
    assert describe_ignored_settings({"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16") == ""
    variables = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_DEEPSPEED": "true"}
    assert (
        "accelerate launch's settings for DeepSpeed and mixed_precision=fp16"
        in describe_ignored_settings(variables, "bf16")
    )
    variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = "is compared with CONFIG's"
    assert "DeepSpeed" not in describe_ignored_settings(variables, "bf16")
