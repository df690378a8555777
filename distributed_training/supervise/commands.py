"""Build the command that continues a run."""

import os
import shlex

from distributed_training.plan.plan import Plan
from distributed_training.records.display import short_path
from distributed_training.records.folder import list_checkpoints
from distributed_training.settings.errors import printable
from distributed_training.supervise.process import LAUNCHER_VARIABLE


def explain_continuing(plan: Plan) -> str:
    """Return a sentence and the command that continues this run, or say that nothing was saved. If
    an external launcher started the run, return the option to add to the launcher's command
    instead."""
    if not list_checkpoints(plan.run_dir):
        return "Nothing was saved."
    option = shlex.join(["--resume", short_path(plan.run_dir)])
    if plan.num_processes > 1 and LAUNCHER_VARIABLE not in os.environ:
        return f"To continue, run the same command again and add:\n  {printable(option)}"
    command = plan.command.removesuffix(f" {option}")  # a continued run was started with it
    return f"To continue, run:\n  {printable(command)} {option}"
