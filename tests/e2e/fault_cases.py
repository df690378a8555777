"""Run the script with an injected fault, for the fault tests.

The process pool of tests/pool.py calls these functions on every rank. Each function exits with the
script's exit code."""

import os
import signal
from typing import Any

import torch

from distributed_training.engines import deepspeed, native
from distributed_training.models.private import local_part
from distributed_training.train import run as training
from distributed_training.train.loop import Trainer
from tests.pool import run_script
from tests.support import named_strategy


def with_bad_gradient(job: dict[str, Any]) -> None:
    """In each step in job["steps"], set a gradient or the loss to NaN on rank 1. Native engines
    get a NaN gradient of the parameter job["name"], and DeepSpeed gets a NaN loss.

    Under DDP, set the gradient to NaN on all ranks, because DDP averages gradients."""
    rank, calls, update = int(os.environ["RANK"]), [], native.NativeEngine.update

    def is_bad(everywhere: bool = False) -> bool:
        calls.append(None)
        return (everywhere or rank == 1) and len(calls) in job["steps"]

    def bad_update(self: Any) -> Any:
        if is_bad(self.plan.only_copies):
            parameter = self.parameters[self.gradient_names.index(job["name"])]
            local_part(parameter.grad).fill_(float("nan"))
        return update(self)

    native.NativeEngine.update = bad_update
    for engine in (deepspeed.DeepSpeedEngine, named_strategy("hybrid").load_engine()):
        run = engine._run

        def bad_run(self: Any, batch: Any, scale: float, run: Any = run) -> torch.Tensor:
            factor = float("nan") if is_bad() else 1.0
            return run(self, batch, scale * factor) * factor

        engine._run = bad_run
    run_script(*job["arguments"])


def without_step(job: dict[str, Any]) -> None:
    """Skip the batch of step job["step"]."""
    original = Trainer._run_step

    def run_step(self: Trainer) -> None:
        if self.step + 1 == job["step"]:
            self.history.step += 1
        else:
            original(self)

    Trainer._run_step = run_step
    run_script(*job["arguments"])


def with_a_signal_in_a_library(job: dict[str, Any]) -> None:
    """Send a signal before training, inside library code that replaces KeyboardInterrupt with a
    ValueError."""

    def build_engine(*_: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:  # as a tensor's constructor does
            raise ValueError("could not determine the shape")  # noqa: B904

    training.build_engine = build_engine
    run_script(*job["arguments"])
