"""Build the commands that a run prints. The user can run these commands to continue the run, use
its model or train longer."""

import os
import shlex
from pathlib import Path
from typing import Any

from distributed_training.plan.plan import Plan
from distributed_training.records.display import best_if_overfitted, short_path
from distributed_training.records.record import LAST, Record
from distributed_training.settings.config import KEYS
from distributed_training.supervise.process import LAUNCHER_VARIABLE


def build_continue_command(plan: Plan) -> tuple[str, str]:
    """Return an introductory sentence, and the command that continues this run. If an external
    launcher started the run, return the option to add to the launcher's command instead."""
    if _has_external_launcher(plan):
        sentence = "To continue, run the same command again and add:"
        return sentence, f"--resume {short_path(plan.run_dir)}"
    return "To continue, run:", build_repeat_command(plan, resume=short_path(plan.run_dir))


def suggest_commands(plan: Plan, record: Record) -> dict[str, str]:
    """Return the commands to suggest after a finished run, keyed by purpose, such as "generate
    text" or "compare runs". If the run overfitted, suggest keeping the best weights instead of
    training longer. Commands that do not apply are omitted."""
    config = plan.config
    script = _script(plan)
    suggestions = {}
    if (plan.run_dir / LAST).is_dir():
        prompt = [] if config.generate is None else ["--prompt", config.generate]
        best = ["--best"] if best_if_overfitted(record) and record.best else []
        arguments = ["python", script, "generate", short_path(plan.run_dir), *best, *prompt]
        suggestions["generate text"] = shlex.join(arguments)
    folder = plan.run_dir.absolute().parent  # a resumed run may be outside `output_dir`
    is_default = folder == Path(script).absolute().parent / "runs"
    runs_argument = [] if is_default else [short_path(folder)]
    suggestions["compare runs"] = shlex.join(["python", script, "report", *runs_argument])
    if _has_external_launcher(plan):
        return suggestions
    # A resumed run reads settings from its directory, so its command may lack some of them.
    is_resumed = plan.requested.resume is not None
    best_row = best_if_overfitted(record)
    if best_row and best_row["step"]:
        if not record.best and not is_resumed:
            repeat = build_repeat_command(plan, keep_best=True)
            suggestions["train again and keep the best weights"] = repeat
        return suggestions
    if record.step < record.num_steps:  # a longer run would stop early as well
        return suggestions
    changes: dict[str, Any] = {"epochs": 2 * config.epochs}
    if (
        config.max_steps == plan.num_steps
    ):  # a preset's max_steps can exceed the steps of all epochs
        changes = {"max_steps": 2 * config.max_steps}
    purpose = "train a new run for twice as long"
    if is_resumed:
        purpose = "train this run for twice as long"
        changes["resume"] = short_path(plan.run_dir)
    return {**suggestions, purpose: build_repeat_command(plan, **changes)}


def build_repeat_command(plan: Plan, **changes: Any) -> str:
    """Return the command that started this run, without `resume` and with new values for the keys
    in `changes`. The script's path is valid in the current folder."""
    arguments = shlex.split(plan.command)
    dropped_names = {name for key in {"resume", *changes} for name in (key, *KEYS[key].aliases)}
    kept_arguments = ["python", _script(plan)]
    options = iter(arguments[2:])
    for word in options:
        name, equals, _ = word.removeprefix("--").partition("=")
        if word.startswith("--") and name.replace("-", "_") in dropped_names:
            if not equals:
                next(options)
        elif word.startswith("--") or name not in dropped_names:  # drops KEY=VALUE of --set
            kept_arguments.append(word)
    new_options = [f"--{name}={value}" for name, value in changes.items()]
    words = [*kept_arguments, *new_options]
    next_words = [*words[1:], "--"]
    return shlex.join(
        word
        for word, next_word in zip(words, next_words, strict=True)
        if word != "--set"
        or not next_word.startswith("--")  # every value of this --set was dropped
    )


def _script(plan: Plan) -> str:
    return short_path(Path(shlex.split(plan.command)[1]).absolute())


def _has_external_launcher(plan: Plan) -> bool:
    """Return whether torchrun, deepspeed or another external launcher started the processes."""
    return plan.num_processes > 1 and LAUNCHER_VARIABLE not in os.environ
