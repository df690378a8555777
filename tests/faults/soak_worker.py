"""Run real_model_example.py with a fault in one process, for soak.py and e2e/test_faults.py.

The environment variable FAULT describes the fault as JSON and names a folder. In this folder, the
processes record their IDs, whether the fault has occurred, and a line for each completed step."""

import dataclasses
import json
import os
import resource
import shutil
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
FOLDER = Path(JOB["folder"])
KIND = JOB["kind"]
# Kind -> (signal that is sent in a step, whether the launcher receives it instead of the rank)
SIGNALS = {
    "killed": (signal.SIGKILL, False),
    "launcher killed": (signal.SIGKILL, True),
    "frozen": (signal.SIGSTOP, False),
    "rank told to stop": (signal.SIGTERM, False),
    "told to stop": (signal.SIGTERM, True),
    "terminal gone": (signal.SIGHUP, True),
    "Ctrl-C": (signal.SIGINT, True),
}
END_SIGNALS = {
    "killed after the export": signal.SIGKILL,
    "frozen after the export": signal.SIGSTOP,
    "killed at the end": signal.SIGKILL,
    "killed in the reference pass": signal.SIGKILL,
    "frozen at the end": signal.SIGSTOP,
}


def record_strike() -> None:
    """Record that the fault has occurred."""
    (FOLDER / "struck").touch()


def kill_everyone() -> None:
    """Kill all processes, as in a power failure."""
    others = {int(file.name) for file in (FOLDER / "processes").iterdir()} - {os.getpid()}
    for process in [*others, os.getpid()]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def strike_in_step(trainer: Any) -> None:
    """Cause the fault at the start of a step, or set it up to strike later."""
    if KIND in SIGNALS:
        record_strike()
        signum, launcher = SIGNALS[KIND]
        os.kill(os.getppid() if launcher else os.getpid(), signum)
    elif KIND == "all killed":
        record_strike()
        kill_everyone()
    elif KIND == "folder removed":
        record_strike()
        shutil.rmtree(trainer.plan.run_dir, ignore_errors=True)
    elif KIND in END_SIGNALS and KIND.endswith("at the end"):
        strike_at(trainer.engine, "close")
    elif KIND == "fails":
        raise RuntimeError("a fault made on purpose")
    elif KIND == "hangs":  # within the step, after its start was reported

        def hang(_batch: Any) -> None:
            record_strike()
            time.sleep(600)

        trainer.engine.train_step = hang
    elif KIND == "not finite":
        record_strike()
        step = trainer.engine.train_step
        trainer.engine.train_step = lambda batch: dataclasses.replace(
            result := step(batch), loss_sum=result.loss_sum * float("nan")
        )


def strike_at(owner: Any, name: str) -> None:
    """Send the fault's signal to this process when the method `name` of `owner` returns."""
    original = getattr(owner, name)

    def method(*arguments: Any) -> Any:
        original(*arguments)
        record_strike()
        os.kill(os.getpid(), END_SIGNALS[KIND])

    setattr(owner, name, method)


def strike_in_save(is_target: bool) -> None:
    """Cause the fault while a checkpoint is being written. `is_target` is true on the rank that the
    fault affects. The fault "no quota" affects all ranks, because they share one quota."""
    if KIND == "no quota":
        record_strike()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    elif is_target and KIND == "disk full":
        record_strike()
        with open(JOB["disk"] + "/filled", "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(2**16))
    elif is_target and KIND == "killed while saving":

        def write_parts(*_: Any) -> None:
            record_strike()
            os.kill(os.getpid(), signal.SIGKILL)

        saver.write_parts = write_parts  # type: ignore[assignment]


def slow_down_disk(last: int) -> None:
    """Let files of an export take 3 s until they are on the disk, and file number `last` forever.
    Count them in the file "slow"."""
    original = os.fsync
    slow = []

    def fsync(descriptor: int) -> None:
        if ".writing-hf" in os.readlink(f"/proc/self/fd/{descriptor}"):
            record_strike()
            slow.append(descriptor)
            (FOLDER / "slow").write_text(str(len(slow)))
            time.sleep(3 if len(slow) < last else 600)
        original(descriptor)

    os.fsync = fsync


def inject_faults(rank: int) -> None:
    """Set up fault injection on this rank."""
    is_target = rank == JOB["rank"]
    if is_target and KIND == "killed at the start":
        record_strike()
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "slow disk":
        slow_down_disk(JOB["step"])
    from distributed_training.train.loop import Trainer

    if is_target and KIND in END_SIGNALS and KIND.endswith("after the export"):
        strike_at(Trainer, "_export_and_sample")
    if is_target and KIND.endswith("in the reference pass"):
        from distributed_training.engines.native import NativeEngine

        strike_at(NativeEngine, "eval_step")
    original_update = Trainer._run_step
    original_begin = saver.Saver.begin

    def update(self: Trainer) -> None:
        if is_target and self.step + 1 == JOB["step"]:
            strike_in_step(self)
        original_update(self)
        if rank == 0:
            with suppress(OSError), open(FOLDER / "paid", "a") as file:
                file.write(f"{self.step}\n")

    def begin(self: Any, engine: Any, **options: Any) -> None:
        if options["step"] >= JOB["step"]:
            strike_in_save(is_target)
        original_begin(self, engine, **options)

    Trainer._run_step = update  # type: ignore[method-assign]
    saver.Saver.begin = begin  # type: ignore[method-assign]


def register_process() -> None:
    """Record this process's ID. If the process is a rank, set up fault injection."""
    (FOLDER / "processes").mkdir(parents=True, exist_ok=True)
    (FOLDER / "processes" / str(os.getpid())).touch()
    if "RANK" in os.environ:
        inject_faults(int(os.environ["RANK"]))


def main() -> int:
    register_process()
    real_model_example.__file__ = __file__  # so that the ranks run this script
    return real_model_example.main()


if __name__ == "__main__":
    raise SystemExit(main())
