"""What stages send each other: receives posted ahead, sends kept alive until they are done.

NCCL matches messages by their order alone (tags are ignored), and work within one of its groups
may be serialised. So each pair of neighbours has a group of its own for each direction, and who
receives follows the order in which the other side's schedule sends. Gloo is driven the same way.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipedream.runtime.launch import StageLostError
from pipedream.schedules.ops import FORWARD, INPUT_GRADIENT, Op


@contextmanager
def connection_to(whom: str) -> Iterator[None]:
    """Turn what the backend raises inside into a StageLostError that says who was waited for."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise StageLostError(f"the connection to {whom} broke ({reason})") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """The stage before or after this one, and what travels between the two."""

    rank: int
    incoming: Any
    """Process group of the two ranks that carries what we receive."""
    outgoing: Any
    """The same for what we send."""
    shape: tuple[int, ...]
    """Of activations, and so of gradients: what crosses this cut of the model."""
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        return f"stage {self.rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """Both sides of a stage; None beyond the ends of the pipeline."""

    before: Neighbour | None
    after: Neighbour | None


def connect(
    stage: int,
    num_stages: int,
    *,
    backend: str,
    device: torch.device,
    timeout: datetime.timedelta,
    max_ctas: int | None = None,
) -> dict[tuple[int, int], Any]:
    """(sender, receiver) -> the process group of that pair and direction, each used once.

    Every process makes all groups in the same order, and a pair's first message follows at once:
    communicators that NCCL sets up on first use then cannot wait for each other in a circle.
    A receive that is posted ahead keeps multiprocessors of its GPU from computing until its message
    comes: NCCL takes no more than `max_ctas` of them for one (None: as many as it likes).
    """
    groups = {}
    for edge in range(num_stages - 1):
        for sender, receiver in ((edge, edge + 1), (edge + 1, edge)):
            options = _nccl_options(timeout, max_ctas) if backend == "nccl" else None
            group = dist.new_group(
                [edge, edge + 1], backend=backend, timeout=timeout, pg_options=options
            )
            if stage not in (sender, receiver):
                continue
            groups[sender, receiver] = group
            tensor = torch.zeros(1, device=device)
            with connection_to(f"stage {receiver if stage == sender else sender}"):
                if stage == sender:
                    dist.send(tensor, receiver, group=group)
                else:
                    dist.recv(tensor, sender, group=group)
                tensor.item()  # on a GPU: wait until the message is through
    return groups


def _nccl_options(timeout: datetime.timedelta, max_ctas: int | None) -> Any:
    """For one group: torch writes the group's name and ranks into them."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


def meet_neighbours(
    stage: int,
    num_stages: int,
    groups: dict[tuple[int, int], Any],
    module: torch.nn.Module,
    example: torch.Tensor,
) -> Neighbours:
    """Learn the shape and dtype of what crosses each cut: stage after stage runs a forward pass.

    example: the first stage's input. Shapes stay as they are for the whole run.
    """
    device = example.device

    def neighbour(rank: int, form: tuple[tuple[int, ...], torch.dtype]) -> Neighbour:
        incoming, outgoing = groups[rank, stage], groups[stage, rank]
        return Neighbour(
            rank=rank,
            incoming=incoming,
            outgoing=outgoing,
            shape=form[0],
            dtype=form[1],
            device=device,
        )

    before = after = None
    x = example
    if stage > 0:
        found: list[Any] = [None]
        with connection_to(f"stage {stage - 1}"):
            dist.recv_object_list(found, src=stage - 1)
        before = neighbour(stage - 1, found[0])
        x = torch.zeros(before.shape, dtype=before.dtype, device=device)
    if stage < num_stages - 1:
        with torch.no_grad():
            out = module(x)
        form = (tuple(out.shape), out.dtype)
        with connection_to(f"stage {stage + 1}"):
            dist.send_object_list([form], dst=stage + 1)
        after = neighbour(stage + 1, form)
    return Neighbours(before=before, after=after)


class Inbox:
    """What one neighbour sends, received in the order in which it sends."""

    def __init__(self, neighbour: Neighbour, arriving: Sequence[Op], depth: int) -> None:
        """`arriving`: the neighbour's operations whose results come here. `depth` receives are
        posted before they are asked for; with 0 each is posted when it is."""
        self.neighbour, self.depth = neighbour, depth
        self.to_post = deque(arriving)
        self.posted: deque[tuple[Op, torch.Tensor, Any]] = deque()
        self.arrived: dict[int, tuple[Op, torch.Tensor]] = {}
        self._post(depth)

    def _post(self, depth: int) -> None:
        near = self.neighbour
        while self.to_post and len(self.posted) < depth:
            buffer = torch.empty(near.shape, dtype=near.dtype, device=near.device)
            with connection_to(near.name):
                work = dist.irecv(buffer, near.rank, group=near.incoming)
            self.posted.append((self.to_post.popleft(), buffer, work))

    def take(self, microbatch: int) -> tuple[Op, torch.Tensor]:
        """The result for this microbatch and the operation that made it; waits for it.

        On a GPU the wait is the stream's, and this returns at once.
        """
        while microbatch not in self.arrived:
            self._post(max(1, self.depth))
            op, buffer, work = self.posted.popleft()
            with connection_to(self.neighbour.name):
                work.wait()
            self.arrived[op.microbatch] = (op, buffer)
            self._post(self.depth)
        return self.arrived.pop(microbatch)


class Outbox:
    """What goes to one neighbour."""

    def __init__(self, neighbour: Neighbour) -> None:
        self.neighbour = neighbour
        self.under_way: deque[tuple[torch.Tensor, Any]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Start to send; the tensor is kept until it is through."""
        near = self.neighbour
        # NCCL says when a send is done; gloo's say so only in wait(), so they stay until drain().
        while self.under_way and self.under_way[0][1].is_completed():
            self.under_way.popleft()
        tensor = tensor.contiguous()
        with connection_to(near.name):
            work = dist.isend(tensor, near.rank, group=near.outgoing)
        self.under_way.append((tensor, work))

    def drain(self) -> None:
        """Wait until all is through (on a GPU: have the stream wait)."""
        with connection_to(self.neighbour.name):
            for _, work in self.under_way:
                work.wait()
        self.under_way.clear()


def arriving_from(order: Sequence[Op], *, forward: bool) -> list[Op]:
    """A neighbour's operations that send us something: its forwards if it is before us, else
    those of its backwards that give an input gradient."""
    kinds = (FORWARD,) if forward else ("B", INPUT_GRADIENT)
    return [op for op in order if op.kind in kinds]
