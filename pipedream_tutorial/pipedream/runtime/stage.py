"""One rank in its own process: runs its order, with messages in and out, and times it.

The runtime knows no schedule by name. It takes operations one after the other, waits for what an
operation needs from a neighbour, runs it on the StageTrainer and sends on what it gives.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipedream.runtime.channels import Peer, connection_to
from pipedream.runtime.prediction import Case
from pipedream.runtime.workload import Config, emulated_ms
from pipedream.schedules.ops import BACKWARD, FORWARD, Op
from pipedream.schedules.policies import POLICIES
from pipedream.simulate.trace import MeasuredEvent, handed_on
from pipedream.train.models import Task
from pipedream.train.trainer import Loss, StageTrainer, Weights


class Clock:
    """Marks points of a stage's work and later tells when they were reached.

    On a CPU, where to call is to compute, by the raw counter, which all processes of a host share:
    zeros that each takes after a barrier differ by how long it took to leave it. A GPU works after
    the call has returned: there by its own events, tied to the host's time. Before each run an
    event is recorded and waited for, and the time around it is taken: of 20 tries the one in the
    tightest bracket, halfway.
    """

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        """`new_event` as torch.cuda.Event with timing: record(), synchronize(), elapsed_time()."""
        self.new_event = new_event
        if new_event is None:
            return
        tightest = math.inf
        for _ in range(20):
            event = new_event()
            before = time.perf_counter_ns()
            event.record()
            event.synchronize()
            after = time.perf_counter_ns()
            if after - before < tightest:
                tightest = after - before
                self.zero = event
                self.zero_ns = (before + after) // 2

    def mark(self) -> tuple[int, Any]:
        """The point that the work has come to."""
        event = None
        if self.new_event is not None:
            event = self.new_event()
            event.record()
        return time.perf_counter_ns(), event

    def read(self, mark: tuple[int, Any]) -> int:
        """Nanoseconds of perf_counter; on a GPU once it is idle."""
        host_ns, event = mark
        if event is None:
            return host_ns
        return self.zero_ns + round(self.zero.elapsed_time(event) * 1e6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Station:
    """All that one process needs to be a rank, whatever the schedule."""

    rank: int
    config: Config
    device: torch.device
    modules: Mapping[int, nn.Module]
    """stage -> initial weights, on the CPU, for this rank's stages; every run trains copies."""
    num_stages: int
    """Of the whole model, on all ranks."""
    loss: Loss
    task: Task
    peers: Mapping[int, Peer]

    def trainers(self, case: Case, *, cut: bool) -> dict[int, StageTrainer]:
        """By stage, with copies of the initial weights."""
        return {
            stage: StageTrainer(
                copy.deepcopy(module).to(self.device),
                case.policy,
                stage=stage,
                num_stages=self.num_stages,
                batch_size=case.num_microbatches,
                num_microbatches=case.num_microbatches * case.num_batches,
                learning_rate=self.config["learning_rate"],
                loss=self.loss,
                cut=cut,
            )
            for stage, module in self.modules.items()
        }


class RankRun(NamedTuple):
    """What one rank brings home from a run: but for its weights plain data, which go as JSON."""

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


def run_rank(
    station: Station, case: Case, *, emulated: bool = False, keep_weights: bool = False
) -> RankRun:
    """Train a copy of the initial weights under a schedule, with CONFIG's sleeps if `emulated`. All
    ranks have to call this together.

    Raises StageLostError when a peer is gone.
    """
    trainers = station.trainers(case, cut=case.schedule.cuts_backward)
    device = station.device
    on_gpu = device.type == "cuda"
    new_event = None
    memory = None
    waited = None
    gc.disable()  # Python's collector would stop a stage for milliseconds, anywhere
    try:
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            new_event = partial(torch.cuda.Event, enable_timing=True)
        clock = Clock(new_event)
        with connection_to("the other stages"):
            dist.barrier()
        spans = _run_order(station, case, trainers, clock, emulated=emulated)
        if on_gpu:
            torch.cuda.synchronize(device)
    finally:
        gc.enable()
    if on_gpu:
        memory = torch.cuda.max_memory_allocated(device)
        ends = [end for thread, _, _, end in spans if thread == "compute"]
        waited = sum(clock.read(end) - end[0] < AT_ONCE_NS for end in ends) / len(ends)
    return RankRun(
        events=[
            MeasuredEvent(station.rank, *op, clock.read(start), clock.read(end), thread)
            for thread, op, start, end in spans
        ],
        peak_versions=[(stage, trainer.peak_versions) for stage, trainer in trainers.items()],
        losses=[(i, float(x)) for trainer in trainers.values() for i, x in trainer.losses.items()],
        peak_memory_bytes=memory,
        waited_for_host=waited,
        weights={
            stage: {name: w.detach().cpu() for name, w in trainer.weights.items()}
            for stage, trainer in trainers.items()
            if keep_weights
        },
    )


def _slept_s(station: Station, case: Case, kind: str) -> float:
    """What stands in for a device's work, of one stage; I and W take half of a whole backward pass
    each."""
    forward_ms, backward_ms = emulated_ms(station.config, station.device)
    ms = {FORWARD: forward_ms, BACKWARD: backward_ms}.get(kind, backward_ms / 2)
    return ms / 1000 / case.schedule.stages_per_rank


_Span = tuple[str, Op, Any, Any]
"""Thread, operation, and marks at its start and end."""


def _run_order(
    station: Station,
    case: Case,
    trainers: Mapping[int, StageTrainer],
    clock: Clock,
    *,
    emulated: bool,
) -> list[_Span]:
    """Run the rank's operations, until all that they send is through."""
    ranks = case.schedule.ranks()
    own = station.rank
    orders = case.schedule.orders
    source = {taker: giver for giver, taker in handed_on(case.schedule)}
    target = {giver: taker for taker, giver in source.items()}
    peers = station.peers
    example, _ = station.task.microbatch(0)
    for rank, peer in peers.items():
        sent = [op for item in orders[rank] for op in item.parts if op in target]
        arriving = [op for op in sent if ranks[target[op]] == own]
        peer.expect(arriving, example, station.config["receive_depth"])
    spans: list[_Span] = []
    kept: dict[Op, torch.Tensor] = {}  # for another stage of this rank
    mark = clock.mark
    for op in (op for item in orders[own] for op in item.parts):
        received = None
        giver = source.get(op)
        if giver in kept:
            received = kept.pop(giver)
        elif giver is not None:
            begun = mark()
            received = peers[ranks[giver]].take(giver)
            spans.append(("receive", giver, begun, mark()))
        begun = mark()
        result = trainers[op.stage].run(op, received, station.task)
        slept_s = _slept_s(station, case, op.kind) if emulated else 0
        if slept_s:
            time.sleep(slept_s)
        spans.append(("compute", op, begun, mark()))
        if result is None or op not in target:
            continue
        to = ranks[target[op]]
        if to == own:
            kept[op] = result
        else:
            begun = mark()
            peers[to].send(result)
            spans.append(("send", op, begun, mark()))
    for peer in peers.values():
        peer.drain()
    return spans
