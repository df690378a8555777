"""The process group of a program that is no training: a launcher's processes, or one alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from distributed_training.parallel.agree import from_rank_0
from distributed_training.plan.topology import process_group
from distributed_training.run import launch, rendezvous, worker
from distributed_training.run.process import Process, current_process, single_process
from distributed_training.settings.config import RENDEZVOUS_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The processes that all runs share."""

    process: Process
    device: torch.device
    folder: Path  # of all ranks and runs, so that a text is tokenised once; removed at the end


@contextlib.contextmanager
def open_group(p2p_channels: int | None = None) -> Iterator[Group]:
    """Join the process group that the launcher describes (a group of one without a launcher), with
    so many of NCCL's channels for messages, or as many as it likes."""
    process = current_process(os.environ) or single_process()
    launch.prepare_environment(process.local_world_size)
    device = worker.prepare(torch.cuda.device_count(), process)
    store = rendezvous.meet(process, RENDEZVOUS_S)
    # Three minutes: another rank may have failed.
    with process_group(device, store, minutes=3, p2p_channels=p2p_channels):
        folder = Path(from_rank_0(tempfile.mkdtemp() if process.rank == 0 else None))
        try:
            yield Group(process=process, device=device, folder=folder)
        finally:
            if process.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
