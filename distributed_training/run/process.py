"""Which process of a run this is. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

import psutil

from distributed_training.settings.errors import UserError

SLURM_SCRIPT = "configs/train.slurm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """What a launcher told this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def on_one_machine(self) -> bool:
        """Whether all processes of the run are."""
        return self.local_world_size == self.world_size


class Startup:
    """Seconds of each phase from the start of this process to the end of its first step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = psutil.Process().create_time()

    def end(self, phase: str) -> None:
        """A phase has ended, and the next begun."""
        now = time.time()
        self.seconds[phase] = round(now - self._last, 3)
        self._last = now


def current_process(environment: Mapping[str, str]) -> Process | None:
    """What a launcher set for this process; None when none started it."""
    if "RANK" not in environment:
        tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")  # set by srun alone, not by sbatch
        if tasks != "1" and "SLURM_PTY_PORT" not in environment:  # nor in a shell from srun --pty
            what = f"srun started this command {tasks} times"
            fix = f"one task a node, with torchrun in it: sbatch --nodes=2 {SLURM_SCRIPT}"
            raise UserError(what, "no launcher told the processes their ranks", fix)
        return None
    try:
        here = environment.get("LOCAL_SIZE") or environment["WORLD_SIZE"]  # deepspeed's word
        told = {"LOCAL_WORLD_SIZE": here, **environment}
        return Process(**{field.name: int(told[field.name.upper()]) for field in fields(Process)})
    except (KeyError, ValueError) as error:
        what = "RANK is set but WORLD_SIZE or LOCAL_RANK is not a number"
        raise UserError(what, str(error), "start with torchrun, or unset RANK") from None


def single_process() -> Process:
    """Set what process groups ask the environment for, as a launcher of one process would."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # any that is free then
    return Process(rank=0, world_size=1, local_rank=0, local_world_size=1)
