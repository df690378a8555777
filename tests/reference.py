"""Run what tests compare the suite with, such as models of transformers and PEFT, in a process that
has never imported the suite.

    step = call_reference(train_step, folder, inputs, targets)  # of tests/models/theirs.py

Each test worker starts one such process, because importing transformers takes seconds. The
functions are in files that import nothing of the suite."""

import atexit
import functools
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = "distributed_training"


@functools.cache
def _process() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.reference"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(process.communicate)
    return process


def call_reference(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function in the process of references, and return its result. Raises RuntimeError with
    the traceback if the function raises an exception."""
    pipe = _process()
    pickle.dump((function, arguments, options), pipe.stdin)
    pipe.stdin.flush()
    result, error = pickle.load(pipe.stdout)
    if error:
        raise RuntimeError(error)
    return result


def main() -> None:
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print
    while True:
        try:
            function, arguments, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        result, error = None, ""
        try:
            result = function(*arguments, **options)
            assert PACKAGE not in sys.modules, f"{function.__module__} imports {PACKAGE}"
        except Exception:
            error = traceback.format_exc()
        pickle.dump((result, error), results)
        results.flush()


if __name__ == "__main__":
    main()
