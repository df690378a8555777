"""One rank in its own process: runs its order, with messages in and out, and times it.

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
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream.runtime.channels import Form, Inbox, Outbox, Peer, connection_to
from pipedream.runtime.clocks import Clock
from pipedream.schedules.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Op, Schedule
from pipedream.schedules.policies import POLICIES, Policy
from pipedream.simulate.trace import MeasuredEvent, handed_on
from pipedream.train.models import Task
from pipedream.train.trainer import Loss, StageTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Station:
    """All that one process needs to be a rank, whatever the schedule."""

    rank: int
    modules: Mapping[int, nn.Module]
    """stage -> initial weights, on the CPU, for the stages of this rank; every run trains copies
    on `device`."""
    num_stages: int
    """Of the whole model, on all ranks."""
    loss: Loss
    """Of the last stage."""
    task: Task
    peers: Mapping[int, Peer]
    form: Form
    """Of every stage's input, and so of all that is sent."""
    clock: Clock
    receive_depth: int
    """How many receives are posted before they are asked for."""
    learning_rate: float
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRun:
    """What one rank brings home from a run."""

    events: list[MeasuredEvent]
    trainers: dict[int, StageTrainer]
    """By stage."""
    peak_memory_bytes: int | None
    waited_for_host: float | None
    """Share of the operations that the GPU had done within AT_ONCE_NS of their being handed over, 0
    to 1: at their end it waited for the host. None on a CPU, where to call is to compute."""


Pace = Mapping[str, float]
"""kind of operation -> seconds that are slept in it, to stand in for a device's work."""


def pace_from_ms(
    forward_ms: float | Fraction, backward_ms: float | Fraction, stages_per_rank: int = 1
) -> Pace:
    """Durations to sleep, of one stage; I and W take half of a whole backward pass each."""
    forward, half = (float(ms) / 1000 / stages_per_rank for ms in (forward_ms, backward_ms / 2))
    return {FORWARD: forward, BACKWARD: 2 * half, INPUT_GRADIENT: half, WEIGHT_GRADIENT: half}


def build_trainer(
    station: Station,
    stage: int,
    policy: Policy,
    *,
    num_microbatches: int,
    num_batches: int,
    cut: bool,
) -> StageTrainer:
    """A trainer of a stage's initial weights; `num_microbatches` counts those of a batch."""
    return StageTrainer(
        copy.deepcopy(station.modules[stage]).to(station.device),
        policy,
        stage=stage,
        num_stages=station.num_stages,
        batch_size=num_microbatches,
        num_microbatches=num_microbatches * num_batches,
        learning_rate=station.learning_rate,
        loss=station.loss if stage == station.num_stages - 1 else None,
        cut=cut,
    )


def warm_up_compute(station: Station) -> None:
    """Run every kind of operation once by itself, with nothing sent.

    The first torch.autograd.grad with grad_outputs takes hundreds of milliseconds, and a GPU loads
    each kernel on first use, which can wait for ever while a receive is pending.
    """
    for stage, policy, cut in product(station.modules, ("flush", "in-place"), (False, True)):
        inputs, target = station.task.microbatch(0)
        is_last = stage == station.num_stages - 1
        if stage > 0:
            shape, dtype = station.form
            inputs = torch.zeros(shape, dtype=dtype, device=station.device)
        trainer = build_trainer(
            station, stage, POLICIES[policy], num_microbatches=2, num_batches=1, cut=cut
        )
        for i in range(2):
            out = trainer.forward(i, inputs, target if is_last else None)
            trainer.backward(i, None if is_last else torch.zeros_like(out))


def run_rank(
    station: Station,
    schedule: Schedule,
    policy: Policy,
    *,
    num_microbatches: int,
    num_batches: int,
    pace: Pace,
) -> RankRun:
    """Train a copy of the initial weights under a schedule. All ranks have to call this together.

    Raises StageLostError when a peer is gone.
    """
    trainers = {
        stage: build_trainer(
            station,
            stage,
            policy,
            num_microbatches=num_microbatches,
            num_batches=num_batches,
            cut=schedule.cuts_backward,
        )
        for stage in station.modules
    }
    route = _Route(schedule, station)
    on_gpu = station.device.type == "cuda"
    with _no_garbage_collection():
        station.clock.start()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(station.device)
        with connection_to("the other stages"):
            dist.barrier()
        spans, outboxes = _run_order(station, route, trainers, pace)
        for outbox in outboxes:
            outbox.drain()
        station.clock.finish()
    return RankRun(
        events=_events(station, spans),
        trainers=trainers,
        peak_memory_bytes=torch.cuda.max_memory_allocated(station.device) if on_gpu else None,
        waited_for_host=_waited_for_host(station.clock, spans),
    )


def _events(station: Station, spans: list[_Span]) -> list[MeasuredEvent]:
    read = station.clock.read
    return [
        MeasuredEvent(
            rank=station.rank,
            kind=op.kind,
            stage=op.stage,
            microbatch=op.microbatch,
            start_ns=read(start),
            end_ns=read(end),
            thread=thread,
        )
        for thread, op, start, end in spans
    ]


class _Route:
    """A rank's operations, and where what they take in comes from and what they give goes."""

    def __init__(self, schedule: Schedule, station: Station) -> None:
        ranks, own = schedule.ranks(), station.rank
        self.ops = [op for item in schedule.orders[own] for op in item.parts]
        self.source: dict[Op, tuple[Op, int]] = {}
        """operation -> (the one whose result it takes in, the rank of that one)"""
        self.target: dict[Op, int] = {}
        """operation -> the rank that takes its result in"""
        self.arriving: dict[int, list[tuple[Op, Form]]] = {peer: [] for peer in station.peers}
        """peer -> what it sends, in its order"""
        takes = dict(handed_on(schedule))
        for giver, taker in takes.items():
            if ranks[taker] == own:
                self.source[taker] = giver, ranks[giver]
            if ranks[giver] == own:
                self.target[giver] = ranks[taker]
        for peer, arriving in self.arriving.items():
            for op in (op for item in schedule.orders[peer] for op in item.parts):
                if op in takes and ranks[takes[op]] == own:
                    arriving.append((op, station.form))


_Span = tuple[str, Op, Any, Any]

AT_ONCE_NS = 100_000  # above the error of the clocks' tie, below any operation worth measuring


def _waited_for_host(clock: Clock, spans: list[_Span]) -> float | None:
    ends = [end for thread, _, _, end in spans if thread == "compute"]
    lags = [lag for lag in map(clock.lag, ends) if lag is not None]
    return sum(lag < AT_ONCE_NS for lag in lags) / len(lags) if lags else None


def _run_order(
    station: Station, route: _Route, trainers: Mapping[int, StageTrainer], pace: Pace
) -> tuple[list[_Span], list[Outbox]]:
    """Run the rank's operations; (thread, operation, mark at its start, mark at its end) of each,
    and what may still be on its way."""
    spans: list[_Span] = []
    mark = station.clock.mark
    inboxes = {
        rank: Inbox(peer, route.arriving[rank], station.receive_depth)
        for rank, peer in station.peers.items()
    }
    outboxes = {rank: Outbox(peer) for rank, peer in station.peers.items()}
    kept: dict[Op, torch.Tensor] = {}  # for another stage of this rank
    for op in route.ops:
        received = None
        giver, rank = route.source.get(op, (op, station.rank))
        if rank != station.rank:
            begun = mark()
            received = inboxes[rank].take(giver)
            spans.append(("receive", giver, begun, mark()))
        elif giver != op:
            received = kept.pop(giver)
        begun = mark()
        result = _compute(op, station, trainers[op.stage], received)
        if pace[op.kind] > 0:
            time.sleep(pace[op.kind])
        spans.append(("compute", op, begun, mark()))
        to = route.target.get(op)
        if result is None or to is None:
            continue
        if to == station.rank:
            kept[op] = result
        else:
            begun = mark()
            outboxes[to].send(result)
            spans.append(("send", op, begun, mark()))
    return spans, list(outboxes.values())


def _compute(
    op: Op, station: Station, trainer: StageTrainer, received: torch.Tensor | None
) -> torch.Tensor | None:
    if op.kind == FORWARD:
        inputs, target = station.task.microbatch(op.microbatch)
        x = inputs if received is None else received
        return trainer.forward(op.microbatch, x, None if trainer.loss is None else target)
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
