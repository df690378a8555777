"""One rank in its own process: runs its order, with messages in and out, and times it.

The runtime knows no schedule by name. It takes operations one after the other, waits for what an
operation needs from a neighbour, runs it on the StageTrainer and sends on what it gives.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream.runtime.channels import Form, Inbox, Outbox, Peer, connection_to
from pipedream.schedules.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Op, Schedule
from pipedream.schedules.policies import POLICIES, Policy
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
        self.new_event, self.synchronize = new_event, synchronize
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
                self.zero, self.zero_ns = event, (before + after) // 2

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

    @property
    def form(self) -> Form:
        """Of every stage's input, and so of all that is sent."""
        example, _ = self.task.microbatch(0)
        return tuple(example.shape), example.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRun:
    """What one rank brings home from a run: plain data, which rank 0 gathers."""

    events: list[MeasuredEvent]
    peak_versions: dict[int, int]
    """By stage."""
    losses: dict[int, float]
    """microbatch -> mean loss, on the rank with the last stage."""
    peak_memory_bytes: int | None
    waited_for_host: float | None
    """Share of the operations that the GPU had done within AT_ONCE_NS of their being handed over, 0
    to 1: at their end it waited for the host. None on a CPU, where to call is to compute."""
    weights: dict[int, Weights]
    """Final ones by stage, on the CPU, where they were asked for."""


AT_ONCE_NS = 100_000  # above the error of the clocks' tie, below any operation worth measuring

Pace = Mapping[str, float]
"""kind of operation -> seconds that are slept in it, to stand in for a device's work."""


def pace_from_ms(
    forward_ms: float | Fraction, backward_ms: float | Fraction, stages_per_rank: int = 1
) -> Pace:
    """Durations to sleep, of one stage; I and W take half of a whole backward pass each."""
    forward, half = (float(ms) / 1000 / stages_per_rank for ms in (forward_ms, backward_ms / 2))
    return {FORWARD: forward, BACKWARD: 2 * half, INPUT_GRADIENT: half, WEIGHT_GRADIENT: half}


def _build_trainer(
    station: Station, stage: int, policy: Policy, m: int, num_batches: int, *, cut: bool
) -> StageTrainer:
    return StageTrainer(
        copy.deepcopy(station.modules[stage]).to(station.device),
        policy,
        stage=stage,
        num_stages=station.num_stages,
        batch_size=m,
        num_microbatches=m * num_batches,
        learning_rate=station.learning_rate,
        loss=station.loss if stage == station.num_stages - 1 else None,
        cut=cut,
    )


def warm_up_compute(station: Station) -> None:
    """Run every kind of operation once by itself, with nothing sent.

    The first torch.autograd.grad with grad_outputs takes hundreds of milliseconds, and a GPU loads
    each kernel on first use, which can wait for ever while a receive is pending.
    """
    inputs, target = station.task.microbatch(0)
    for stage, policy, cut in product(station.modules, ("flush", "in-place"), (False, True)):
        is_last = stage == station.num_stages - 1
        trainer = _build_trainer(station, stage, POLICIES[policy], 2, 1, cut=cut)
        for i in range(2):
            x = inputs if stage == 0 else torch.zeros_like(inputs)
            out = trainer.forward(i, x, target if is_last else None)
            trainer.backward(i, None if is_last else torch.zeros_like(out))


def run_rank(
    station: Station,
    schedule: Schedule,
    policy: Policy,
    *,
    num_microbatches: int,
    num_batches: int,
    pace: Pace,
    keep_weights: bool = False,
) -> RankRun:
    """Train a copy of the initial weights under a schedule. All ranks have to call this together.

    Raises StageLostError when a peer is gone.
    """
    cut = schedule.cuts_backward
    trainers = {
        stage: _build_trainer(station, stage, policy, num_microbatches, num_batches, cut=cut)
        for stage in station.modules
    }
    clock, device = station.clock, station.device
    on_gpu = device.type == "cuda"
    route = _Route(schedule, station)
    gc.disable()  # Python's collector would stop a stage for milliseconds, anywhere
    try:
        clock.start()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        with connection_to("the other stages"):
            dist.barrier()
        spans = _run_order(station, route, trainers, pace)
        clock.finish()
    finally:
        gc.enable()
    lags = [clock.lag(end) for thread, _, _, end in spans if thread == "compute"]
    at_once = [lag < AT_ONCE_NS for lag in lags if lag is not None]
    weights = {}
    if keep_weights:
        weights = {
            stage: {name: w.detach().cpu() for name, w in trainer.weights.items()}
            for stage, trainer in trainers.items()
        }
    return RankRun(
        events=[_event(station, *span) for span in spans],
        peak_versions={stage: trainer.peak_versions for stage, trainer in trainers.items()},
        losses={i: float(x) for trainer in trainers.values() for i, x in trainer.losses.items()},
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        waited_for_host=sum(at_once) / len(at_once) if at_once else None,
        weights=weights,
    )


_Span = tuple[str, Op, Any, Any]
"""Thread, operation, and marks at its start and end."""


def _event(station: Station, thread: str, op: Op, start: Any, end: Any) -> MeasuredEvent:
    return MeasuredEvent(
        rank=station.rank,
        kind=op.kind,
        stage=op.stage,
        microbatch=op.microbatch,
        start_ns=station.clock.read(start),
        end_ns=station.clock.read(end),
        thread=thread,
    )


class _Route:
    """A rank's operations, and where what they take in comes from and what they give goes."""

    def __init__(self, schedule: Schedule, station: Station) -> None:
        ranks, own = schedule.ranks(), station.rank
        takes = dict(handed_on(schedule))
        self.ops = _ops_of(schedule, own)
        self.source = {b: (a, ranks[a]) for a, b in takes.items() if ranks[b] == own}
        """operation -> (the one whose result it takes in, the rank of that one)"""
        self.target = {a: ranks[b] for a, b in takes.items() if ranks[a] == own}
        """operation -> the rank that takes its result in"""
        self.arriving = {
            peer: [op for op in _ops_of(schedule, peer) if op in takes and ranks[takes[op]] == own]
            for peer in station.peers
        }
        """peer -> the operations whose results it sends here, in its order"""


def _ops_of(schedule: Schedule, rank: int) -> list[Op]:
    return [op for item in schedule.orders[rank] for op in item.parts]


def _run_order(
    station: Station, route: _Route, trainers: Mapping[int, StageTrainer], pace: Pace
) -> list[_Span]:
    """Run the rank's operations, until all that they send is through."""
    spans: list[_Span] = []
    mark = station.clock.mark
    inboxes = {
        rank: Inbox(peer, route.arriving[rank], station.form, station.receive_depth)
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
    for outbox in outboxes.values():
        outbox.drain()
    return spans


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
