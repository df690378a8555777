"""Build the commands that a run prints. The user can run these commands to continue the run or use
its model."""

import os
import shlex

from distributed_training.plan.plan import Plan
from distributed_training.records.display import short_path
from distributed_training.records.record import LAST, Record
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


def suggest_commands(plan: Plan, record: Record) -> dict[str, str]:
    """Return the commands to suggest after a finished run, keyed by purpose, such as "generate
    text" or "compare runs". Commands that do not apply are omitted."""
    script = shlex.split(plan.command)[1]
    suggestions = {}
    if (plan.run_dir / LAST).is_dir():
        prompt = [] if plan.config.generate is None else ["--prompt", plan.config.generate]
        arguments = ["python", script, "generate", short_path(plan.run_dir), *prompt]
        suggestions["generate text"] = shlex.join(arguments)
    folder = plan.run_dir.absolute().parent  # a resumed run may be outside `output_dir`
    suggestions["compare runs"] = shlex.join(["python", script, "report", short_path(folder)])
    return suggestions
