"""Test the environment variables that each launcher sets for the second of two processes on a
machine."""

import os

import pytest

from distributed_training.settings.errors import run_and_report_errors
from distributed_training.settings.launchers import find_launcher
from distributed_training.start.launch import launched_process
from distributed_training.start.ranks import current_process
from distributed_training.supervise.process import Process
from tests.support import refused

RANK_1 = {"RANK": "1", "WORLD_SIZE": "4"}
TORCHRUN = {**RANK_1, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
SRUN = {
    "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
CASES = {
    "torchrun": TORCHRUN,
    "deepspeed": {**RANK_1, "LOCAL_RANK": "1", "LOCAL_SIZE": "2"},
    "srun": SRUN,
}
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    def replace(**values):
        monkeypatch.setattr(os, "environ", dict(values))

    return replace


@pytest.mark.parametrize("launcher", CASES)
def test_rank_is_read_from_every_launcher(launcher, environment, capsys):
    variables = CASES[launcher]
    assert find_launcher(variables).name == launcher
    environment(**variables, **MASTER)
    process = current_process()
    assert process == Process(rank=1, world_size=4, local_rank=1, local_world_size=2)
    assert process == current_process(), "once told, always the same"
    assert (os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("1", "2")

    environment(**variables)
    with refused(launcher, "MASTER_ADDR", "--num_gpus"):
        current_process()
    assert run_and_report_errors(lambda: current_process() and 0) == 2
    assert capsys.readouterr().err == "", "local rank 0 says it"


@pytest.mark.parametrize(
    "environment_of_one",
    [
        {},
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "2",
        },  # sbatch starts one process, which is not a step of srun
        {**SRUN, "SLURM_PTY_PORT": "1234"},  # a shell
    ],
)
def test_an_ordinary_command_has_no_launcher(environment_of_one, environment):
    environment(**environment_of_one)
    assert current_process() is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "RANK"),
        (RANK_1, "LOCAL_RANK"),
        ({**TORCHRUN, **MASTER, "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({**TORCHRUN, **MASTER, "RANK": "5"}, "RANK='5'"),
        ({**TORCHRUN, **MASTER, "LOCAL_RANK": "0"}, "LOCAL_RANK='0'"),
        ({**TORCHRUN, **MASTER, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_RANK='1'"),
        ({**TORCHRUN, **MASTER, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK='1'"),
        ({**SRUN, **MASTER, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, "SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_invalid_launcher_variables_are_refused(variables, message, environment):
    environment(**variables)
    with refused(message):
        current_process()


def test_a_deepspeed_configuration_of_accelerate_is_refused(environment):
    environment(**TORCHRUN, **MASTER, ACCELERATE_DEEPSPEED_CONFIG_FILE="ds.json")
    with refused("deepspeed_config_file", "--deepspeed_config"):
        launched_process(None)
