"""What stages send each other: receives posted ahead, sends kept alive until they are done.

NCCL matches messages by their order alone (tags are ignored), and work within one of its groups
may be serialised. So each pair of ranks that exchange messages has a group of its own for each
direction, and who receives follows the order in which the other side's schedule sends. Gloo is
driven the same way.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipedream.runtime.launch import StageLostError
from pipedream.schedules.ops import Op


@contextmanager
def connection_to(whom: str) -> Iterator[None]:
    """Turn what the backend raises inside into a StageLostError that says who was waited for."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise StageLostError(f"the connection to {whom} broke ({reason})") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another rank that messages come from or go to, each way in a process group of its own."""

    rank: int
    incoming: Any
    outgoing: Any
    device: torch.device

    @property
    def name(self) -> str:
        return f"stage {self.rank}"


def connect(
    rank: int,
    pairs: Iterable[tuple[int, int]],
    *,
    device: torch.device,
    timeout: datetime.timedelta,
    max_ctas: int | None,
) -> dict[int, Peer]:
    """rank -> peer, for all that this one exchanges messages with; `pairs` has all such pairs.

    Every process makes all groups in the same order, and a pair's first message follows at once:
    communicators that NCCL sets up on first use then cannot wait for each other in a circle.
    A receive that is posted ahead keeps multiprocessors of its GPU from computing until its message
    comes: NCCL takes no more than `max_ctas` of them for one (None: as many as it likes).
    """
    groups = {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
        for sender, receiver in ((low, high), (high, low)):
            options = _nccl_options(timeout, max_ctas) if backend == "nccl" else None
            group = dist.new_group(
                [low, high], backend=backend, timeout=timeout, pg_options=options
            )
            if rank not in (sender, receiver):
                continue
            groups[sender, receiver] = group
            tensor = torch.zeros(1, device=device)
            with connection_to(f"stage {receiver if rank == sender else sender}"):
                if rank == sender:
                    dist.send(tensor, receiver, group=group)
                else:
                    dist.recv(tensor, sender, group=group)
                tensor.item()  # on a GPU: wait until the message is through
    others = {receiver for _, receiver in groups} - {rank}
    return {
        other: Peer(
            rank=other, incoming=groups[other, rank], outgoing=groups[rank, other], device=device
        )
        for other in others
    }


def _nccl_options(timeout: datetime.timedelta, max_ctas: int | None) -> Any:
    """For one group: torch writes the group's name and ranks into them."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


class Inbox:
    """What one peer sends, received in the order in which it sends."""

    def __init__(self, peer: Peer, arriving: Sequence[Op], like: torch.Tensor, depth: int) -> None:
        """`arriving`: the peer's operations whose results come here, all of one shape and dtype.
        `depth` receives are posted before they are asked for; with 0 each is posted when it is."""
        self.peer = peer
        self.like = like
        self.depth = depth
        self.to_post = deque(arriving)
        self.posted: deque[tuple[Op, torch.Tensor, Any]] = deque()
        self.arrived: dict[Op, torch.Tensor] = {}
        self._post(depth)

    def _post(self, depth: int) -> None:
        peer = self.peer
        while self.to_post and len(self.posted) < depth:
            op = self.to_post.popleft()
            buffer = torch.empty_like(self.like, device=peer.device)
            with connection_to(peer.name):
                work = dist.irecv(buffer, peer.rank, group=peer.incoming)
            self.posted.append((op, buffer, work))

    def take(self, wanted: Op) -> torch.Tensor:
        """The result of one of the peer's operations; waits for it.

        On a GPU the wait is the stream's, and this returns at once.
        """
        while wanted not in self.arrived:
            self._post(max(1, self.depth))
            op, buffer, work = self.posted.popleft()
            with connection_to(self.peer.name):
                work.wait()
            self.arrived[op] = buffer
            self._post(self.depth)
        return self.arrived.pop(wanted)


class Outbox:
    """What goes to one peer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.under_way: deque[tuple[torch.Tensor, Any]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Start to send; the tensor is kept until it is through."""
        peer = self.peer
        # NCCL says when a send is done; gloo's say so only in wait(), so they stay until drain().
        while self.under_way and self.under_way[0][1].is_completed():
            self.under_way.popleft()
        tensor = tensor.contiguous()
        with connection_to(peer.name):
            work = dist.isend(tensor, peer.rank, group=peer.outgoing)
        self.under_way.append((tensor, work))

    def drain(self) -> None:
        """Wait until all is through (on a GPU: have the stream wait)."""
        with connection_to(self.peer.name):
            for _, work in self.under_way:
                work.wait()
        self.under_way.clear()


def gather(value: Any) -> list[Any]:
    """On rank 0 what every rank gives, by rank; on the others nothing."""
    found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    with connection_to("the other stages"):
        dist.gather_object(value, found)
    return found or []
