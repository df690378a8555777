"""Provide code that the programs in this folder share. Import this module first, so that `python
results/lab/NAME.py` finds the package."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from distributed_training.settings.cache import use_private_caches  # noqa: E402
from distributed_training.settings.errors import UserError  # noqa: E402


def run(main: Callable[[], int]) -> NoReturn:
    """Run a program and exit with its exit code. Print a UserError as one line."""
    try:
        use_private_caches()
        sys.exit(main())
    except UserError as error:
        print(error.terminal_text, file=sys.stderr)
        sys.exit(error.exit_code)
