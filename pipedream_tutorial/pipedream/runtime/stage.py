"""One rank in its own process: runs its order, with messages in and out, and times it.

The runtime knows no schedule by name. It takes operations one after the other, waits for what an
operation needs from a neighbour, runs it on the StageTrainer and sends on what it gives.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipedream.runtime.channels import Inbox, Outbox, Peer, connection_to
from pipedream.runtime.prediction import Case
from pipedream.schedules.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Op
from pipedream.schedules.policies import POLICIES
from pipedream.simulate.trace import MeasuredEvent, handed_on
from pipedream.train.models import Task
from pipedream.train.trainer import Loss, StageTrainer, Weights


class HostClock:
    """Marks points of a stage's work and later tells when they were reached, for work that is done
    when the call returns. The raw counter, which all processes of a host share: zeros that each
    takes after a barrier differ by how long it took to leave it."""

    def start(self) -> None:
        """Called before a run."""

    def mark(self) -> Any:
        """The point that the work has come to."""
        return time.perf_counter_ns()

    def finish(self) -> None:
        """Wait until all work is done; marks can be read from here on."""

    def read(self, mark: Any) -> int:
        """Nanoseconds of perf_counter."""
        return mark

    def lag(self, mark: Any) -> int | None:
        """Nanoseconds by which a GPU came to this point after the host had; None on a CPU."""
        return None


class EventClock(HostClock):
    """For a GPU, which works after the call has returned: its own events, tied to the host's time.

    Before each run the device is idle, an event is recorded and waited for, and the host's time
    around it is taken: of 20 tries the one in the tightest bracket, halfway.
    """

    def __init__(self, new_event: Callable[[], Any], synchronize: Callable[[], None]) -> None:
        """`new_event` as torch.cuda.Event with timing: record(), synchronize(), elapsed_time()."""
        self.new_event = new_event
        self.synchronize = synchronize
        self.zero: Any = None
        self.zero_ns = 0

    def start(self) -> None:
        self.synchronize()
        tightest = None
        for _ in range(20):
            event = self.new_event()
            before = time.perf_counter_ns()
            event.record()
            event.synchronize()
            after = time.perf_counter_ns()
            if tightest is None or after - before < tightest:
                tightest = after - before
                self.zero = event
                self.zero_ns = (before + after) // 2

    def mark(self) -> tuple[Any, int]:
        event = self.new_event()
        event.record()
        return event, time.perf_counter_ns()

    def finish(self) -> None:
        self.synchronize()

    def read(self, mark: tuple[Any, int]) -> int:
        return self.zero_ns + round(self.zero.elapsed_time(mark[0]) * 1e6)

    def lag(self, mark: tuple[Any, int]) -> int:
        return self.read(mark) - mark[1]


def build_clock(device: torch.device) -> HostClock:
    """The clock for work on this device."""
    if device.type == "cpu":
        return HostClock()
    return EventClock(
        lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.synchronize(device)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Station:
    """All that one process needs to be a rank, whatever the schedule."""

    rank: int
    modules: Mapping[int, nn.Module]
    """stage -> initial weights, on the CPU, for this rank's stages; every run trains copies."""
    num_stages: int
    """Of the whole model, on all ranks."""
    loss: Loss
    """Of the last stage."""
    task: Task
    peers: Mapping[int, Peer]
    clock: HostClock
    receive_depth: int
    """How many receives are posted before they are asked for."""
    learning_rate: float
    device: torch.device

    def trainers(self, case: Case, *, cut: bool) -> dict[int, StageTrainer]:
        """By stage, with copies of the initial weights."""
        last = self.num_stages - 1
        m = case.num_microbatches
        return {
            stage: StageTrainer(
                copy.deepcopy(module).to(self.device),
                case.policy,
                stage=stage,
                num_stages=self.num_stages,
                batch_size=m,
                num_microbatches=m * case.num_batches,
                learning_rate=self.learning_rate,
                loss=self.loss if stage == last else None,
                cut=cut,
            )
            for stage, module in self.modules.items()
        }


class RankRun(NamedTuple):
    """What one rank brings home from a run: plain data, which rank 0 gathers as JSON."""

    events: list[MeasuredEvent]
    peak_versions: list[tuple[int, int]]
    """(stage, versions)"""
    losses: list[tuple[int, float]]
    """(microbatch, mean loss), on the rank with the last stage."""
    peak_memory_bytes: int | None
    waited_for_host: float | None
    """Share of the operations that the GPU had done within AT_ONCE_NS of their being handed over, 0
    to 1: at their end it waited for the host. None on a CPU, where to call is to compute."""
    weights: dict[int, Weights]
    """Final ones by stage, on the CPU, where they were asked for."""


AT_ONCE_NS = 100_000  # above the error of the clocks' tie, below any operation worth measuring

Pace = Mapping[str, float]
"""kind of operation -> seconds that are slept in it, to stand in for a device's work."""


def pace_from_ms(forward_ms: float, backward_ms: float, stages_per_rank: int = 1) -> Pace:
    """Durations to sleep, of one stage; I and W take half of a whole backward pass each."""
    forward, half = (ms / 1000 / stages_per_rank for ms in (forward_ms, backward_ms / 2))
    return {FORWARD: forward, BACKWARD: 2 * half, INPUT_GRADIENT: half, WEIGHT_GRADIENT: half}


def warm_up_compute(station: Station, case: Case) -> None:
    """Run every kind of operation once by itself, with nothing sent.

    The first torch.autograd.grad with grad_outputs takes hundreds of milliseconds, and a GPU loads
    each kernel on first use, which can wait for ever while a receive is pending.
    """
    inputs, _ = station.task.microbatch(0)
    for policy, cut in product(("flush", "in-place"), (False, True)):
        small = replace(case, policy=POLICIES[policy], num_microbatches=2, num_batches=1)
        for stage, trainer in station.trainers(small, cut=cut).items():
            for i in range(2):
                x = torch.zeros_like(inputs) if stage else None
                out = trainer.run(Op(FORWARD, stage, i), x, station.task)
                gradient = None if trainer.loss else torch.zeros_like(inputs)
                assert out is not None
                trainer.run(Op(BACKWARD, stage, i), gradient, station.task)


def run_rank(station: Station, case: Case, pace: Pace, *, keep_weights: bool = False) -> RankRun:
    """Train a copy of the initial weights under a schedule. All ranks have to call this together.

    Raises StageLostError when a peer is gone.
    """
    trainers = station.trainers(case, cut=case.schedule.cuts_backward)
    clock = station.clock
    device = station.device
    memory = None
    gc.disable()  # Python's collector would stop a stage for milliseconds, anywhere
    try:
        clock.start()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with connection_to("the other stages"):
            dist.barrier()
        spans = _run_order(station, case, trainers, pace)
        clock.finish()
    finally:
        gc.enable()
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device)
    lags = [clock.lag(end) for thread, _, _, end in spans if thread == "compute"]
    at_once = [lag < AT_ONCE_NS for lag in lags if lag is not None]
    return RankRun(
        events=[
            MeasuredEvent(station.rank, *op, clock.read(start), clock.read(end), thread)
            for thread, op, start, end in spans
        ],
        peak_versions=[(stage, trainer.peak_versions) for stage, trainer in trainers.items()],
        losses=[(i, float(x)) for trainer in trainers.values() for i, x in trainer.losses.items()],
        peak_memory_bytes=memory,
        waited_for_host=sum(at_once) / len(at_once) if at_once else None,
        weights={
            stage: {name: w.detach().cpu() for name, w in trainer.weights.items()}
            for stage, trainer in trainers.items()
            if keep_weights
        },
    )


_Span = tuple[str, Op, Any, Any]
"""Thread, operation, and marks at its start and end."""


def _run_order(
    station: Station, case: Case, trainers: Mapping[int, StageTrainer], pace: Pace
) -> list[_Span]:
    """Run the rank's operations, until all that they send is through."""
    ranks = case.schedule.ranks()
    own = station.rank
    orders = case.schedule.orders
    source = {taker: giver for giver, taker in handed_on(case.schedule)}
    target = {giver: taker for taker, giver in source.items()}
    example, _ = station.task.microbatch(0)
    inboxes = {}
    outboxes = {}
    for rank, peer in station.peers.items():
        sent = [op for item in orders[rank] for op in item.parts if op in target]
        arriving = [op for op in sent if ranks[target[op]] == own]
        inboxes[rank] = Inbox(peer, arriving, example, station.receive_depth)
        outboxes[rank] = Outbox(peer)
    spans: list[_Span] = []
    kept: dict[Op, torch.Tensor] = {}  # for another stage of this rank
    mark = station.clock.mark
    for op in (op for item in orders[own] for op in item.parts):
        received = None
        giver = source.get(op)
        if giver in kept:
            received = kept.pop(giver)
        elif giver is not None:
            begun = mark()
            received = inboxes[ranks[giver]].take(giver)
            spans.append(("receive", giver, begun, mark()))
        begun = mark()
        result = trainers[op.stage].run(op, received, station.task)
        if pace[op.kind] > 0:
            time.sleep(pace[op.kind])
        spans.append(("compute", op, begun, mark()))
        if result is None or op not in target:
            continue
        to = ranks[target[op]]
        if to == own:
            kept[op] = result
        else:
            begun = mark()
            outboxes[to].send(result)
            spans.append(("send", op, begun, mark()))
    for outbox in outboxes.values():
        outbox.drain()
    return spans
