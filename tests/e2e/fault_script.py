"""Run real_model_example.py with a fault in rank 1. The environment variable FAULT names the fault.

The script also runs when the launching process starts its ranks, because `__file__` is replaced."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import real_model_example

FAULT = os.environ["FAULT"]


def in_step_5() -> None:
    """Hang, fail or be killed."""
    if FAULT == "fails":
        raise RuntimeError("a fault made on purpose")
    if FAULT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def add_fault() -> None:
    from distributed_training.engines import native

    original, calls = native.NativeEngine.train_step, []

    def train_step(self: Any, batch: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            in_step_5()
        return original(self, batch)

    native.NativeEngine.train_step = train_step  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ.get("RANK") == "1":
        add_fault()
    real_model_example.__file__ = __file__
    raise SystemExit(real_model_example.main())
