"""One stage in its own process: runs its rank's order, with messages in and out, and times it.

The runtime knows no schedule by name. It takes operations one after the other, waits for what an
operation needs from a neighbour, runs it on the StageTrainer and sends on what it gives.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream.runtime.channels import Inbox, Neighbours, Outbox, arriving_from, connection_to
from pipedream.runtime.clocks import Clock
from pipedream.schedules.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Op, Schedule
from pipedream.schedules.policies import POLICIES, Policy
from pipedream.simulate.trace import MeasuredEvent
from pipedream.train.models import Task
from pipedream.train.trainer import Loss, StageTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Station:
    """All that one process needs to be a stage, whatever the schedule."""

    stage: int
    num_stages: int
    module: nn.Module
    """Initial weights, on the CPU; every run trains a copy on `device`."""
    loss: Loss | None
    """Of the last stage only."""
    task: Task
    neighbours: Neighbours
    clock: Clock
    receive_depth: int
    """How many receives are posted before they are asked for."""
    learning_rate: float
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    """What one stage brings home from a run."""

    events: list[MeasuredEvent]
    trainer: StageTrainer
    peak_memory_bytes: int | None
    waited_for_host: float | None
    """Share of the operations that the GPU had done within AT_ONCE_NS of their being handed over, 0
    to 1: at their end it waited for the host. None on a CPU, where to call is to compute."""


Pace = Mapping[str, float]
"""kind of operation -> seconds that are slept in it, to stand in for a device's work."""


def pace_from_ms(forward_ms: float | Fraction, backward_ms: float | Fraction) -> Pace:
    """Durations to sleep; I and W take half of a whole backward pass each."""
    half = float(backward_ms) / 2000
    return {
        FORWARD: float(forward_ms) / 1000,
        BACKWARD: 2 * half,
        INPUT_GRADIENT: half,
        WEIGHT_GRADIENT: half,
    }


def build_trainer(
    station: Station, policy: Policy, *, num_microbatches: int, num_batches: int
) -> StageTrainer:
    """A trainer of the station's initial weights; `num_microbatches` counts those of a batch."""
    return StageTrainer(
        copy.deepcopy(station.module).to(station.device),
        policy,
        stage=station.stage,
        num_stages=station.num_stages,
        batch_size=num_microbatches,
        num_microbatches=num_microbatches * num_batches,
        learning_rate=station.learning_rate,
        loss=station.loss,
    )


def warm_up_compute(station: Station) -> None:
    """Run every kind of operation once by itself, with nothing sent.

    The first torch.autograd.grad with grad_outputs takes hundreds of milliseconds, and a GPU loads
    each kernel on first use, which can wait for ever while a receive is pending.
    """
    inputs, target = station.task.microbatch(0)
    before, is_last = station.neighbours.before, station.loss is not None
    if before is not None:
        inputs = torch.zeros(before.shape, dtype=before.dtype, device=station.device)
    for policy in ("flush", "in-place"):
        trainer = build_trainer(station, POLICIES[policy], num_microbatches=4, num_batches=1)
        for i in range(4):
            out = trainer.forward(i, inputs, target if is_last else None)
            gradient = None if is_last else torch.zeros_like(out)
            if i % 2:
                trainer.input_gradient(i, gradient)
                trainer.weight_gradient(i)
            else:
                trainer.backward(i, gradient)


def run_stage(
    station: Station,
    schedule: Schedule,
    policy: Policy,
    *,
    num_microbatches: int,
    num_batches: int,
    pace: Pace,
) -> StageRun:
    """Train a copy of the initial weights under a schedule. All stages have to call this together.

    Raises StageLostError when a neighbour is gone.
    """
    trainer = build_trainer(
        station, policy, num_microbatches=num_microbatches, num_batches=num_batches
    )
    on_gpu = station.device.type == "cuda"
    with _no_garbage_collection():
        station.clock.start()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(station.device)
        with connection_to("the other stages"):
            dist.barrier()
        spans, outboxes = _run_order(station, schedule, trainer, pace)
        for outbox in outboxes:
            outbox.drain()
        station.clock.finish()
    read = station.clock.read
    return StageRun(
        events=[
            MeasuredEvent(
                rank=station.stage,
                kind=op.kind,
                stage=op.stage,
                microbatch=op.microbatch,
                start_ns=read(start),
                end_ns=read(end),
                thread=thread,
            )
            for thread, op, start, end in spans
        ],
        trainer=trainer,
        peak_memory_bytes=torch.cuda.max_memory_allocated(station.device) if on_gpu else None,
        waited_for_host=_waited_for_host(station.clock, spans),
    )


_Span = tuple[str, Op, Any, Any]

AT_ONCE_NS = 100_000  # above the error of the clocks' tie, below any operation worth measuring


def _waited_for_host(clock: Clock, spans: list[_Span]) -> float | None:
    ends = [end for thread, _, _, end in spans if thread == "compute"]
    lags = [lag for lag in map(clock.lag, ends) if lag is not None]
    return sum(lag < AT_ONCE_NS for lag in lags) / len(lags) if lags else None


def _run_order(
    station: Station, schedule: Schedule, trainer: StageTrainer, pace: Pace
) -> tuple[list[_Span], list[Outbox]]:
    """Run the stage's operations; (thread, operation, mark at its start, mark at its end) of each,
    and what may still be on its way."""
    spans: list[_Span] = []
    mark, before, after = station.clock.mark, station.neighbours.before, station.neighbours.after
    inboxes, outboxes = {}, {}
    for forward, source, target in ((True, before, after), (False, after, before)):
        if source is not None:
            arriving = arriving_from(_own_ops(schedule, source.rank), forward=forward)
            inboxes[forward] = Inbox(source, arriving, station.receive_depth)
        if target is not None:
            outboxes[forward] = Outbox(target)
    for op in _own_ops(schedule, station.stage):
        forward, received = op.kind == FORWARD, None
        if forward in inboxes and op.kind != WEIGHT_GRADIENT:
            begun = mark()
            sender, received = inboxes[forward].take(op.microbatch)
            spans.append(("receive", sender, begun, mark()))
        begun = mark()
        result = _compute(op, station, trainer, received)
        if pace[op.kind] > 0:
            time.sleep(pace[op.kind])
        spans.append(("compute", op, begun, mark()))
        if result is not None and forward in outboxes:
            begun = mark()
            outboxes[forward].send(result)
            spans.append(("send", op, begun, mark()))
    return spans, list(outboxes.values())


def _own_ops(schedule: Schedule, stage: int) -> list[Op]:
    """The operations of a stage, which is a rank's only one."""
    return [op for item in schedule.orders[stage] for op in item.parts]


def _compute(
    op: Op, station: Station, trainer: StageTrainer, received: torch.Tensor | None
) -> torch.Tensor | None:
    if op.kind == FORWARD:
        inputs, target = station.task.microbatch(op.microbatch)
        x = inputs if received is None else received
        return trainer.forward(op.microbatch, x, target if station.loss is not None else None)
    if op.kind == WEIGHT_GRADIENT:
        trainer.weight_gradient(op.microbatch)
        return None
    step = trainer.backward if op.kind == BACKWARD else trainer.input_gradient
    return step(op.microbatch, received)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python's collector would stop a stage for milliseconds, anywhere."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
