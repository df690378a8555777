"""Decide how many processes run on this machine. This module does not import torch."""

import math
import re
from collections.abc import Mapping

from distributed_training.predict.predict import Cluster, local_cluster
from distributed_training.settings.config import AUTO, Request
from distributed_training.settings.detect import detect_machine
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown
from distributed_training.settings.launchers import CPU_PROCESSES
from distributed_training.settings.machine import Machine
from distributed_training.settings.strategies import load_strategy
from distributed_training.start.cores import recent_cores


def requested_cluster(
    request: Request, num_gpus: str | None, *, times_cores: bool = False
) -> Cluster:
    """Return a cluster that consists of this machine, with the number of processes requested by
    --num_gpus. With `times_cores`, the CPU cores of a machine without GPUs are measured,
    unless they were minutes ago."""
    machine = detect_machine()
    mesh = {} if request.strategy == AUTO else load_strategy(request).mesh
    count = requested_processes(num_gpus, machine, mesh)
    cores = recent_cores(count, machine.num_cpus) if times_cores and not machine.num_gpus else None
    return local_cluster(machine, count, count, cores)


def requested_processes(num_gpus: str | None, machine: Machine, mesh: Mapping[str, int]) -> int:
    """Return the number of processes that `--num_gpus` requests, or 1 if it is not set."""
    if num_gpus == "all":
        mesh_size = math.prod(size for size in mesh.values() if size > 0)
        return machine.num_gpus or mesh_size * -(-CPU_PROCESSES // mesh_size)
    if num_gpus is not None and not re.fullmatch(r"[1-9]\d{0,3}", num_gpus):
        what = f"--num_gpus {shown(num_gpus)} is not accepted"
        raise UserError(what, 'it must be a whole number from 1 to 9,999 or "all"')
    return int(num_gpus or 1)
