"""Provide code that the programs in this folder share. Import this module first, so that `python
results/lab/NAME.py` finds the package."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from distributed_training.settings import keys  # noqa: E402
from distributed_training.settings.cache import use_private_caches  # noqa: E402
from distributed_training.settings.errors import UserError  # noqa: E402


def accept(arguments: argparse.Namespace) -> None:
    """Accept the command line without further checks."""


class Parser(keys.Parser):
    """Command-line parser that adds the option --dry-run. With this option, the parser calls
    `check` and exits, and nothing is started."""

    def __init__(
        self, *, check: Callable[[argparse.Namespace], None] = accept, **options: Any
    ) -> None:
        super().__init__(**options)
        self.check = check
        self.add_argument(
            "--dry-run", action="store_true", help="check the command without starting it"
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line. With --dry-run, check it and exit."""
        arguments = super().parse_args(args, namespace)
        if arguments.dry_run:
            self.check(arguments)
            print("The command is accepted. Nothing was started.")
            sys.exit(0)
        return arguments


def run(main: Callable[[], int]) -> NoReturn:
    """Run a program and exit with its exit code. Print a UserError as one line."""
    try:
        use_private_caches()
        sys.exit(main())
    except UserError as error:
        print(error.terminal_text, file=sys.stderr)
        sys.exit(error.exit_code)
