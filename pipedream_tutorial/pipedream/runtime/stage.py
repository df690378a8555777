"""Run the order of one rank in its own process, exchange messages and measure times.

The runtime does not depend on the schedule. For each operation, it waits for the input from a
neighbor, runs the operation on the StageTrainer and sends its result.

NCCL matches messages only by their order, without tags, and may serialize the work of a group.
Therefore each pair of ranks that exchange messages has one group per direction, even with gloo.
Receives follow the order in which the other rank's schedule sends.
"""

import datetime
import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from pipedream.errors import UserError
from pipedream.runtime.launch import STORE_ENV, StageLostError
from pipedream.runtime.record import Case, Report
from pipedream.schedules.ops import Op, Schedule, find_input_ops, transfers
from pipedream.train.models import Config, Workload
from pipedream.train.trainer import Trainers, Weights, build_trainers


@contextmanager
def connection_to(whom: str) -> Iterator[None]:
    """Context manager that turns the RuntimeErrors of the communication backend into
    StageLostErrors that name `whom`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise StageLostError(f"the connection to {whom} broke ({reason})") from error


class Peer:
    """Another rank with which this rank exchanges messages. Each direction has its own process
    group."""

    incoming: Any = None
    outgoing: Any = None

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = f"stage {rank}"
        self.unfinished_sends: deque[tuple[torch.Tensor, Any]] = deque()

    def post_receives(self, arriving: Iterable[Op], like: torch.Tensor, depth: int) -> None:
        """Prepare to receive the peer's results during a run. `arriving` lists the operations that
        produce these results, in sending order. All results have the shape and dtype of `like`.
        `depth` receives are posted ahead."""

        def post(op: Op) -> tuple[Op, torch.Tensor, Any]:
            buffer = torch.empty_like(like)
            return op, buffer, dist.irecv(buffer, self.rank, group=self.incoming)

        self.depth = depth
        self.upcoming = map(post, arriving)
        self.results: dict[Op, torch.Tensor] = {}
        with connection_to(self.name):
            self.posted = deque(islice(self.upcoming, depth))

    def receive(self, wanted: Op) -> torch.Tensor:
        """Wait for the result of the peer's operation `wanted`, and return the result. On a GPU,
        only the CUDA stream waits, not the host."""
        with connection_to(self.name):
            while wanted not in self.results:
                op, buffer, work = self.posted.popleft() if self.posted else next(self.upcoming)
                work.wait()
                self.results[op] = buffer
                self.posted.extend(islice(self.upcoming, self.depth - len(self.posted)))
        return self.results.pop(wanted)

    def send(self, tensor: torch.Tensor) -> None:
        """Start sending a tensor, and keep the tensor until it has been sent."""
        # NCCL reports when a send has finished. gloo reports this only in wait(), so its sends are
        # kept until drain().
        while self.unfinished_sends and self.unfinished_sends[0][1].is_completed():
            self.unfinished_sends.popleft()
        tensor = tensor.contiguous()
        with connection_to(self.name):
            work = dist.isend(tensor, self.rank, group=self.outgoing)
        self.unfinished_sends.append((tensor, work))

    def drain(self) -> None:
        """Wait until all messages have been sent. On a GPU, only the CUDA stream waits, not the
        host."""
        with connection_to(self.name):
            for _, work in self.unfinished_sends:
                work.wait()
        self.unfinished_sends.clear()


class Clock:
    """Clock that marks points in a stage's work and later returns the times at which these points
    were reached.

    On a CPU, calls return when their computation has finished, so the clock is the raw counter that
    all processes on a host share. A zero point set after a barrier would differ between processes,
    because they leave the barrier at different times.

    On a GPU, calls return before their computation has finished, so the clock uses CUDA events. A
    new clock records 20 events and waits for each. The event with the shortest wait becomes the
    zero point, and the middle of that wait is taken as its host time."""

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        """`new_event` creates an event like torch.cuda.Event(enable_timing=True). The event has the
        methods record(), synchronize() and elapsed_time()."""
        self.new_event = new_event
        self.spans: list[tuple[str, Op, Any, Any]] = []  # thread, operation, marks at both ends
        if new_event is not None:
            candidates = []
            for _ in range(20):
                event = new_event()
                before = time.perf_counter_ns()
                event.record()
                event.synchronize()
                after = time.perf_counter_ns()
                candidates.append((after - before, (before + after) // 2, event))
            _, self.zero_ns, self.zero = min(candidates, key=itemgetter(0))

    def mark(self) -> tuple[int, Any]:
        """Mark the point that the work has reached, and return the mark."""
        event = None
        if self.new_event is not None:
            event = self.new_event()
            event.record()
        return time.perf_counter_ns(), event

    def read(self, mark: tuple[int, Any]) -> int:
        """Return the mark's time on the perf_counter clock, in nanoseconds. On a GPU, call this
        method when the GPU is idle."""
        host_ns, event = mark
        if event is None:
            return host_ns
        return self.zero_ns + round(self.zero.elapsed_time(event) * 1e6)

    @contextmanager
    def span(self, thread: str, op: Op) -> Iterator[None]:
        """Context manager that records when its `with` block starts and ends."""
        start_mark = self.mark()
        yield
        self.spans.append((thread, op, start_mark, self.mark()))


class RankRunner:
    """Runs one rank in its own process, under any schedule."""

    def __init__(self, rank: int, config: Config) -> None:
        """Prepare the device and the workload. Raises UserError for settings that do not allow
        training."""
        self.rank = rank
        self.config = config
        self.device = set_up_device(config, rank)
        self.workload = Workload(config, self.device)
        self.on_gpu = self.device.type == "cuda"
        self.sleep_ms = (0.0, 0.0) if self.on_gpu else (config["forward_ms"], config["backward_ms"])
        self.peers: dict[int, Peer] = {}  # by rank

    def connect_and_warm_up(self, cases: Sequence[Case]) -> None:
        """Connect to the other ranks. Then warm up with two microbatches of each case, without
        sending any tensors. The first torch.autograd.grad call with grad_outputs takes hundreds of
        milliseconds, and the warm-up keeps this call out of the measured runs. It also loads the
        GPU kernels, because loading a kernel can wait forever while a receive is pending."""
        timeout = datetime.timedelta(seconds=self.config["timeout_s"])
        listen_on_loopback()
        size = self.config["num_stages"]
        # A gloo group for barriers and results, also on GPUs. torchrun has its own store.
        store = dist.FileStore(os.environ[STORE_ENV], size) if STORE_ENV in os.environ else None
        dist.init_process_group("gloo", None, timeout, size, self.rank, store)
        self._connect([case.schedule for case in cases], timeout)
        x = torch.zeros_like(self.workload.task.microbatch(0)[0])
        for case in cases:
            num_warmup = min(2, case.num_microbatches)
            trainers = self._trainers(case._replace(num_microbatches=num_warmup))
            for op in case.schedule.flat[self.rank]:
                trainer = trainers[op.stage]
                has_no_input = op.stage == 0 if op.kind == "F" else trainer.loss is not None
                if op.microbatch < num_warmup:
                    trainer.run(op, None if has_no_input else x, self.workload.task)

    def _connect(self, schedules: Sequence[Schedule], timeout: datetime.timedelta) -> None:
        """Connect to all ranks with which this rank exchanges messages under any of the schedules.

        Every process creates all groups in the same order, and immediately exchanges each group's
        first message. NCCL sets up communicators on first use, and this order prevents deadlocks
        during setup. A receive that is posted in advance occupies multiprocessors on its GPU until
        the message arrives. NCCL uses at most `nccl_max_ctas` multiprocessors for a receive, or any
        number if `nccl_max_ctas` is None.
        """
        directions = set()
        for schedule in schedules:
            ranks = schedule.rank_by_op()
            directions |= {
                (ranks[sender], ranks[receiver]) for sender, receiver in transfers(schedule)
            }
        for direction in sorted(directions):
            backend, options = "gloo", None
            if self.on_gpu:
                backend = "nccl"
                # Each group has its own options, because torch writes the group's name and ranks
                # into them.
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
                options._timeout = timeout
                if self.config["nccl_max_ctas"] is not None:
                    options.config.max_ctas = self.config["nccl_max_ctas"]
            group = dist.new_group(sorted(direction), timeout, backend, options)
            if not isinstance(group, dist.ProcessGroup):  # this rank is not a member
                continue
            other = sum(direction) - self.rank
            peer = self.peers.setdefault(other, Peer(other))
            tensor = torch.zeros(1, device=self.device)
            with connection_to(peer.name):
                if self.rank == direction[0]:
                    peer.outgoing = group
                    dist.send(tensor, other, group)
                else:
                    peer.incoming = group
                    dist.recv(tensor, other, group)
                tensor.item()  # on a GPU, wait until the message has arrived

    def _trainers(self, case: Case) -> Trainers:
        schedule = case.schedule
        stages = schedule.stages_by_rank()[self.rank]
        return build_trainers(self.workload, schedule, case.policy, case.num_microbatches, stages)

    def run(self, case: Case, *, emulated: bool = False) -> tuple[Report, dict[int, Weights]]:
        """Train from the initial weights under a schedule. If `emulated` is true, each pass on a
        CPU also sleeps, as CONFIG's `forward_ms` and `backward_ms` specify. Return the report and
        the final weights by stage. The returned weights are on the CPU, so that GPU memory is free
        for the next run. All ranks must call this method. Raises StageLostError if a peer has
        ended."""
        trainers = self._trainers(case)
        gc.disable()  # garbage collection would stop a stage for milliseconds
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        clock = Clock(partial(torch.cuda.Event, enable_timing=True) if self.on_gpu else None)
        with connection_to("the other stages"):
            dist.barrier()
        self._run_order(case, trainers, clock, self.sleep_ms if emulated else (0, 0))
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        gc.enable()
        report = {
            "slices": [(thread, op, *map(clock.read, marks)) for thread, op, *marks in clock.spans],
            "peak_versions": [
                (stage, trainer.peak_versions) for stage, trainer in trainers.items()
            ],
            "losses": [
                (i, float(x)) for trainer in trainers.values() for i, x in trainer.losses.items()
            ],
        }
        if self.on_gpu:
            ends = [end for thread, _, _, end in clock.spans if thread == "compute"]
            # 0.1 ms is more than the error between the clocks, and less than any operation that is
            # worth measuring.
            num_late = sum(clock.read(end) - end[0] < 100_000 for end in ends)
            report["waited_for_host"] = num_late / len(ends)
            report["peak_memory_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
        return report, {
            stage: {name: weight.detach().cpu() for name, weight in trainer.weights.items()}
            for stage, trainer in trainers.items()
        }

    def _run_order(
        self, case: Case, trainers: Trainers, clock: Clock, sleep_ms: tuple[float, float]
    ) -> None:
        """Run this rank's operations, and wait until all their results have been sent."""
        ranks = case.schedule.rank_by_op()
        orders = case.schedule.flat
        source = find_input_ops(case.schedule)
        target = {source_op: target_op for target_op, source_op in source.items()}
        task = self.workload.task
        example, _ = task.microbatch(0)
        for rank, peer in self.peers.items():
            incoming = [
                op for op in orders[rank] if op in target and ranks[target[op]] == self.rank
            ]
            peer.post_receives(incoming, example, self.config["receive_depth"])
        forward_s, backward_s = (ms / 1000 / case.schedule.stages_per_rank for ms in sleep_ms)
        local_results: dict[Op | None, torch.Tensor] = {}  # results for another stage of this rank
        for op in orders[self.rank]:
            source_op = source.get(op)
            received = local_results.pop(source_op, None)
            if source_op is not None and received is None:
                with clock.span("receive", source_op):
                    received = self.peers[ranks[source_op]].receive(source_op)
            with clock.span("compute", op):
                result = trainers[op.stage].run(op, received, task)
                sleep_s = {"F": forward_s, "B": backward_s}.get(op.kind, backward_s / 2)
                if sleep_s:  # emulate a device's work
                    time.sleep(sleep_s)
            if result is None or op not in target:
                continue
            receiver_rank = ranks[target[op]]
            if receiver_rank == self.rank:
                local_results[op] = result
            else:
                with clock.span("send", op):
                    self.peers[receiver_rank].send(result)
        for peer in self.peers.values():
            peer.drain()


def listen_on_loopback() -> None:
    """Make gloo and NCCL listen on the loopback interface. By default, they would listen on the
    host name's address, which other machines may reach."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")


def set_up_device(config: Config, rank: int) -> torch.device:
    """Set up and return the device of a stage. With device=auto, stages run on GPUs if there is one
    GPU for each stage. Raises UserError if device=cuda is set and there are too few GPUs."""
    torch.set_num_threads(1)  # one thread per stage, as in the one-process run
    stages = config["num_stages"]
    gpus = torch.cuda.device_count()
    if config["device"] == "cuda" and gpus < stages:
        raise UserError(
            f"device=cuda needs a GPU for each of {stages} stages, and this machine has {gpus}",
            "use a machine with enough GPUs, or add --set device=cpu",
        )
    if config["device"] == "cpu" or gpus < stages:
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if config["check_weights"]:  # sums in a different order give different bits
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires this
        torch.use_deterministic_algorithms(True, warn_only=True)
    return device
