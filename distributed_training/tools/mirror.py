"""Keep a copy of a job's runs in a mounted bucket, so that the job can continue on other machines.

    python -m distributed_training.tools.mirror NODE_RANK RUNS MIRROR COMMAND ...

Before COMMAND starts, each run in MIRROR is copied to RUNS with its newest complete checkpoint.
While COMMAND runs, each run's newest checkpoint and record are copied to MIRROR, and after it has
ended, all other files. Nodes without a shared disk have the same MIRROR, to which each node copies
its own part of a checkpoint. A checkpoint in MIRROR counts only if all files that its meta.json
names are complete. This module does not import torch."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from distributed_training.checkpoint.resume import read_meta
from distributed_training.records.folder import CHECKPOINTS, list_checkpoints, newest_checkpoint
from distributed_training.settings.errors import UserError, print_stderr
from distributed_training.settings.files import atomic_folder
from distributed_training.supervise.process import handle_signals

NUM_RETRIES = 5  # attempts to copy the model at the end


def find_complete(run: Path) -> Path | None:
    """Return the newest checkpoint whose files have the sizes in its meta.json, or None."""
    for checkpoint in reversed(list_checkpoints(run)):
        with contextlib.suppress(UserError, OSError):
            sizes = read_meta(checkpoint).files
            if sizes == {name: (checkpoint / name).stat().st_size for name in sizes}:
                return checkpoint
    return None


def fetch(runs: Path, mirror: Path) -> None:
    """Copy each run from the mirror with its newest complete checkpoint. In the mirror, remove the
    other checkpoints, because the continued run may write them again."""
    for run in mirror.iterdir():
        checkpoint = find_complete(run)
        folder = runs / run.name
        if checkpoint is None or folder.exists():
            continue
        with atomic_folder(folder) as unfinished:
            shutil.copytree(checkpoint, unfinished / CHECKPOINTS / checkpoint.name)
            for file in filter(Path.is_file, run.iterdir()):
                shutil.copyfile(file, unfinished / file.name)
        print(f"Fetched {run.name} with {checkpoint.name}.", flush=True)
        for other in {*list_checkpoints(run)} - {checkpoint}:
            shutil.rmtree(other, ignore_errors=True)  # the other nodes remove it too


def push(
    runs: Path,
    mirror: Path,
    pattern: str | None,
) -> None:
    """Copy each run's newest checkpoint, and the files in its folder that match `pattern`, to the
    mirror. There, keep the newest complete checkpoint and at most two newer ones, to which other
    nodes may still copy their files."""
    for run in runs.glob("[!l.]*"):  # without the link "latest" and hidden folders
        copy = mirror / run.name
        checkpoint = newest_checkpoint(run)
        # The record comes first, because a complete checkpoint without its record is an error.
        for file in run.glob(pattern) if pattern else ():
            name = file.relative_to(run)
            is_copied = name.parts[0] != CHECKPOINTS and not file.name.startswith(".")
            if is_copied and file.is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy / name)
        if checkpoint is not None:
            copy_checkpoint(checkpoint, copy / CHECKPOINTS / checkpoint.name)
        complete = find_complete(copy)
        checkpoints = list_checkpoints(copy)
        for other in checkpoints:
            is_newer = complete is None or other > complete
            if other != complete and not (is_newer and other in checkpoints[-2:]):
                shutil.rmtree(other, ignore_errors=True)


def _try_push(
    runs: Path,
    mirror: Path,
    pattern: str | None,
) -> bool:
    """Call `push`. If the mirror cannot be written, print why, because the run must continue.
    Return whether it was written."""
    try:
        push(runs, mirror, pattern)
    except OSError as error:
        print_stderr(f"note: the mirror is incomplete: {error}")
        return False
    return True


def copy_checkpoint(checkpoint: Path, copy: Path) -> None:
    """Copy the files of a checkpoint that the copy lacks."""
    copy.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Open files stay readable if the run deletes the checkpoint.
        files = [stack.enter_context(path.open("rb")) for path in checkpoint.iterdir()]
        for file in files:
            target = copy / Path(file.name).name
            size = target.stat().st_size if target.is_file() else None
            if size != os.fstat(file.fileno()).st_size:
                with target.open("wb") as output:
                    shutil.copyfileobj(file, output, 2**24)


def main(
    node_rank: str, runs: Path, mirror: Path, command: list[str], interval_s: float = 60.0
) -> int:
    """Run the command with a mirror of its runs, to which files are copied every `interval_s`
    seconds. Return the exit code of the command, or 1 if the last files could not be copied."""
    runs.mkdir(parents=True, exist_ok=True)
    fetch(runs, mirror)
    record = model = None
    if node_rank == "0":  # the only node with the record and the model
        record = "*"
        model = "**/*"
    process = subprocess.Popen(command)
    with handle_signals(
        {
            signal.SIGTERM: lambda signum, _: process.send_signal(signum),
        }
    ):
        while process.poll() is None:
            # All nodes copy at the same times, so that they copy the same checkpoint.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(interval_s - time.time() % interval_s)
            _try_push(runs, mirror, record)
        for _ in range(NUM_RETRIES):
            if _try_push(runs, mirror, model):
                return process.returncode % 256
            time.sleep(interval_s)
    return 1


if __name__ == "__main__":
    sys.exit(
        main(
            sys.argv[1],
            Path(sys.argv[2]),
            Path(sys.argv[3]),
            sys.argv[4:],
        )
    )
