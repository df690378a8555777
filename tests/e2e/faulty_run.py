"""Run real_model_example.py with a fault in one process, for test_faults.py and test_preference.py.
The environment variable FAULT describes the fault as JSON."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import real_model_example
from distributed_training.checkpoint import saver

JOB: dict[str, Any] = json.loads(os.environ["FAULT"])
KIND = JOB["kind"]


def strike_in_step(trainer: Any) -> None:
    """Cause the fault at the start of a step."""
    if KIND == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif KIND == "fails":
        raise RuntimeError("a fault made on purpose")
    elif KIND == "hangs":  # within the step, after its start was reported
        trainer.engine.train_step = lambda _batch: time.sleep(600)


def fill_disk() -> None:
    with open(f"{JOB['folder']}/filled", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))


def slow_down_disk(seconds: float) -> None:
    """Let every file of an export take `seconds` until it is on the disk."""
    original = os.fsync

    def fsync(descriptor: int) -> None:
        if ".writing-hf" in os.readlink(f"/proc/self/fd/{descriptor}"):
            time.sleep(seconds)
        original(descriptor)

    os.fsync = fsync


def inject_fault() -> None:
    """Set up the fault on this rank."""
    from distributed_training.engines.native import NativeEngine
    from distributed_training.train.loop import Trainer

    if KIND == "slow disk":
        slow_down_disk(JOB["step"])

    def die(*_: Any) -> None:
        Path(JOB["folder"], "struck").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if KIND == "killed in the reference pass":
        NativeEngine.eval_step = die  # type: ignore[method-assign]
    original_step, original_begin = Trainer._run_step, saver.Saver.begin

    def run_step(self: Trainer) -> None:
        if self.step + 1 == JOB["step"]:
            strike_in_step(self)
        original_step(self)

    def begin(self: Any, engine: Any, **options: Any) -> None:
        if KIND == "disk full" and options["step"] >= JOB["step"]:
            fill_disk()
        original_begin(self, engine, **options)

    Trainer._run_step = run_step  # type: ignore[method-assign]
    saver.Saver.begin = begin  # type: ignore[method-assign]


def main() -> int:
    if os.environ.get("RANK") == str(JOB["rank"]):
        inject_fault()
    real_model_example.__file__ = __file__  # so that the ranks run this script
    return real_model_example.main()


if __name__ == "__main__":
    raise SystemExit(main())
