"""What stages send each other: receives posted ahead, sends kept alive until they are done.

NCCL matches messages by their order alone (tags are ignored), and work within one of its groups
may be serialised. So each pair of ranks that exchange messages has a group of its own for each
direction, and who receives follows the order in which the other side's schedule sends. Gloo is
driven the same way.
"""

from __future__ import annotations

import datetime
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pipedream.runtime.launch import StageLostError
from pipedream.schedules.ops import Op
from pipedream.train.trainer import Weights


@contextmanager
def connection_to(whom: str) -> Iterator[None]:
    """Turn what the backend raises inside into a StageLostError that says who was waited for."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise StageLostError(f"the connection to {whom} broke ({reason})") from error


class Peer:
    """Another rank that messages come from or go to, each way in a process group of its own."""

    def __init__(self, rank: int, incoming: Any, outgoing: Any) -> None:
        self.rank = rank
        self.name = f"stage {rank}"
        self.incoming = incoming
        self.outgoing = outgoing
        self.under_way: deque[tuple[torch.Tensor, Any]] = deque()

    def expect(self, arriving: Sequence[Op], like: torch.Tensor, depth: int) -> None:
        """Begin a run. `arriving`: the peer's operations whose results come here, in the order in
        which it sends, all of one form. `depth` receives are posted before they are asked for; with
        0 each is posted when it is."""
        self.like = like
        self.depth = depth
        self.to_post = deque(arriving)
        self.posted: deque[tuple[Op, torch.Tensor, Any]] = deque()
        self.arrived: dict[Op, torch.Tensor] = {}
        self._post(depth)

    def _post(self, depth: int) -> None:
        while self.to_post and len(self.posted) < depth:
            op = self.to_post.popleft()
            buffer = torch.empty_like(self.like)
            with connection_to(self.name):
                work = dist.irecv(buffer, self.rank, group=self.incoming)
            self.posted.append((op, buffer, work))

    def take(self, wanted: Op) -> torch.Tensor:
        """The result of one of the peer's operations; waits for it.

        On a GPU the wait is the stream's, and this returns at once.
        """
        while wanted not in self.arrived:
            self._post(max(1, self.depth))
            op, buffer, work = self.posted.popleft()
            with connection_to(self.name):
                work.wait()
            self.arrived[op] = buffer
            self._post(self.depth)
        return self.arrived.pop(wanted)

    def send(self, tensor: torch.Tensor) -> None:
        """Start to send; the tensor is kept until it is through."""
        # NCCL says when a send is done; gloo's say so only in wait(), so they stay until drain().
        while self.under_way and self.under_way[0][1].is_completed():
            self.under_way.popleft()
        tensor = tensor.contiguous()
        with connection_to(self.name):
            work = dist.isend(tensor, self.rank, group=self.outgoing)
        self.under_way.append((tensor, work))

    def drain(self) -> None:
        """Wait until all is through (on a GPU: have the stream wait)."""
        with connection_to(self.name):
            for _, work in self.under_way:
                work.wait()
        self.under_way.clear()


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
    others = set()
    for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
        for sender, receiver in ((low, high), (high, low)):
            group = _new_group([low, high], device, timeout, max_ctas)
            if rank not in (sender, receiver):
                continue
            groups[sender, receiver] = group
            tensor = torch.zeros(1, device=device)
            other = receiver if rank == sender else sender
            others.add(other)
            with connection_to(f"stage {other}"):
                if rank == sender:
                    dist.send(tensor, receiver, group=group)
                else:
                    dist.recv(tensor, sender, group=group)
                tensor.item()  # on a GPU: wait until the message is through
    return {other: Peer(other, groups[other, rank], groups[rank, other]) for other in others}


def _new_group(
    ranks: list[int], device: torch.device, timeout: datetime.timedelta, max_ctas: int | None
) -> Any:
    if device.type == "cpu":
        return dist.new_group(ranks, backend="gloo", timeout=timeout)
    # Of their own: torch writes the group's name and ranks into them.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return dist.new_group(ranks, backend="nccl", timeout=timeout, pg_options=options)


def exchange(value: Any) -> list[Any]:
    """What every rank gives, by rank: as JSON, for what one process unpickles it also runs."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    with connection_to("the other stages"):
        dist.all_gather(sizes, torch.tensor([len(own)]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(own)] = own
        texts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(texts, padded)
    return [
        json.loads(text[: int(size)].numpy().tobytes())
        for text, size in zip(texts, sizes, strict=True)
    ]


def gather_weights(own: Mapping[int, Weights]) -> list[Weights]:
    """On rank 0 every stage's weights, of all ranks; on the others nothing."""
    forms = exchange(
        [
            [stage, name, list(w.shape), str(w.dtype).removeprefix("torch.")]
            for stage, weights in own.items()
            for name, w in weights.items()
        ]
    )
    found: dict[int, Weights] = {}
    for rank, of_rank in enumerate(forms):
        for stage, name, shape, dtype in of_rank:
            if rank == dist.get_rank():
                weight = own[stage][name].contiguous()
                if rank > 0:
                    dist.send(weight, 0)
            elif dist.get_rank() == 0:
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                dist.recv(weight, rank)
            else:
                continue
            found.setdefault(stage, {})[name] = weight
    return [weights for _, weights in sorted(found.items())] if dist.get_rank() == 0 else []
