"""Ask the planner as the command `plan --json` does. The planner's page runs this file in the
browser."""

import contextlib
import io
from pathlib import Path

import real_model_example
from distributed_training.cli import Program, run_command
from distributed_training.settings.errors import UserError


def ask(*options: str) -> str:
    """Return the answer to a request as JSON, or an error. `options` are those of `plan`."""
    program = Program(
        config=real_model_example.CONFIG,
        script=Path(real_model_example.__file__),
        description="",
        output_dir=Path("runs"),
        argv=("--json", *options),
    )
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            run_command("plan", program)
    except UserError as error:
        return error.terminal_text
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return (
            "error: A model of this type must be measured with torch, which this page does "
            "not have. Choose a similar model above, or ask in a terminal."
        )
    return output.getvalue()
