"""Build the command that continues a run."""

import os
import shlex

from distributed_training.plan.plan import Plan
from distributed_training.records.display import short_path
from distributed_training.settings.errors import printable
from distributed_training.supervise.process import LAUNCHER_VARIABLE


def explain_continuing(plan: Plan) -> str:
    """Return a sentence and the command that continues this run. If an external launcher started
    the run, return the option to add to the launcher's command instead."""
    option = shlex.join(["--resume", short_path(plan.run_dir)])
    if plan.num_processes > 1 and LAUNCHER_VARIABLE not in os.environ:
        return f"To continue, run the same command again and add:\n  {printable(option)}"
    command = plan.command.removesuffix(f" {option}")  # a continued run was started with it
    return f"To continue, run:\n  {printable(command)} {option}"
