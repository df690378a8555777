"""Imported first by the programs here, so that `python results/lab/NAME.py` finds the package."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def run(main: Callable[[], int]) -> NoReturn:
    """Run a program; what a user did wrong is said in one line."""
    from distributed_training.settings.cache import use_private_caches
    from distributed_training.settings.errors import UserError

    try:
        use_private_caches()
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
