"""Create a run's folder and write its plan there. This module does not import
torch."""

import contextlib
import itertools
import os
import shlex
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distributed_training.checkpoint import resume
from distributed_training.plan.plan import PLAN_AS_JSON, PLAN_FILE, Plan, load_plan
from distributed_training.records.folder import list_checkpoints, remove_unfinished
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import replace_file
from distributed_training.supervise import claims

LATEST = "latest"  # link in output_dir to the newest run's folder


def reserve_run_dir(plan: Plan, more_notes: Sequence[str] = ()) -> Plan:
    """Choose the run to resume, or create a folder for a new run. Write the plan into the folder,
    make <output_dir>/latest point to the folder, and return the plan with its final `run_dir`.
    If another process holds the run, wait for its end in a job of SLURM, and raise InUseError
    elsewhere."""
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    notes = [*plan.notes, *more_notes]
    checkpoint = resume.choose_checkpoint(plan, notes)
    folder = checkpoint.parents[1] if checkpoint else plan.output_dir / plan.run_dir.name
    if checkpoint and resume.read_meta(checkpoint).data_fingerprint != plan.data_fingerprint:
        # The chat template may have rendered an earlier date. Let the ranks read the data again.
        requested = plan.requested.model_copy(update={"date": load_plan(folder).requested.date})
        plan = replace(plan, requested=requested, cache=None, data_fingerprint="")
    numbers = itertools.count(2)
    while checkpoint is None:
        try:
            folder.mkdir()
            break
        except FileExistsError:  # a run that was started in the same second
            folder = folder.with_name(f"{plan.run_dir.name}-{next(numbers)}")
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    plan = replace(
        plan,
        run_dir=folder,
        checkpoint=checkpoint,
        command=shlex.join(["python", *sys.argv]),
        notes=tuple(notes),
        run_id=uuid.uuid4().hex if run_id == "none" else run_id,
        attempt_id=uuid.uuid4().hex,
    )
    try:
        claims.claim(folder, plan.run_id)
    except claims.InUseError:
        if "SLURM_JOB_ID" not in os.environ:
            raise
        # Ranks live on if SLURM lost their node and queued their job again. They save meanwhile.
        claims.wait_until_free(folder, plan.run_id)
        return reserve_run_dir(plan, more_notes)
    remove_unfinished(folder)
    write_plan(plan)
    latest = plan.output_dir / LATEST
    if latest.is_symlink() or not latest.exists():
        with contextlib.suppress(OSError):  # the file system does not support links
            new_link = plan.output_dir / f".latest-{folder.name}"
            new_link.symlink_to(os.path.relpath(folder, plan.output_dir.resolve()))
            new_link.replace(latest)
    return plan


def write_plan(plan: Plan) -> None:
    """Write the plan to the run's folder. From now on, a record of an earlier attempt is not
    changed until rank 0 replaces it."""
    replace_file(plan.run_dir / PLAN_FILE, PLAN_AS_JSON.dump_json(plan, indent=2))


def plan_restart(plan: Plan) -> tuple[Path | None, str]:
    """Return the checkpoint from which a restarted run continues, and a note that names the
    checkpoint. The checkpoint is the last one that the failed attempt has written. If there is
    none, it is the checkpoint from which this attempt resumed, or None if the run starts from the
    beginning."""
    saved = plan.checkpoint
    for checkpoint in list_checkpoints(plan.run_dir):  # oldest first
        with contextlib.suppress(UserError):  # a damaged checkpoint, which was not chosen
            if resume.read_meta(checkpoint).attempt_id == plan.attempt_id:
                saved = checkpoint
    return saved, f"the run was restarted from {saved.name if saved else 'the beginning'}"
