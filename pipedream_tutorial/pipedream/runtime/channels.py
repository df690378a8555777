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
from pipedream.schedules.ops import Op, Schedule
from pipedream.simulate.trace import transfers
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
            buffer = torch.empty_like(self.like)
            with connection_to(self.name):
                work = dist.irecv(buffer, self.rank, group=self.incoming)
            self.posted.append((self.to_post.popleft(), buffer, work))

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
    schedules: Iterable[Schedule],
    device: torch.device,
    timeout: datetime.timedelta,
    max_ctas: int | None,
) -> dict[int, Peer]:
    """rank -> peer, for all that this one exchanges messages with under some schedule.

    Every process makes all groups in the same order, and a pair's first message follows at once:
    communicators that NCCL sets up on first use then cannot wait for each other in a circle.
    A receive that is posted ahead keeps multiprocessors of its GPU from computing until its message
    comes: NCCL takes no more than `max_ctas` of them for one (None: as many as it likes).
    """
    pairs = set()
    for schedule in schedules:
        ranks = schedule.ranks()
        ends = ((ranks[sender], ranks[receiver]) for sender, receiver in transfers(schedule))
        pairs |= {(min(pair), max(pair)) for pair in ends}
    groups: dict[tuple[int, int], Any] = {}
    for low, high in sorted(pairs):
        for sender, receiver in ((low, high), (high, low)):
            backend, options = "gloo", None
            if device.type == "cuda":
                backend = "nccl"
                # Of their own: torch writes the group's name and ranks into them.
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
                options._timeout = timeout
                if max_ctas is not None:
                    options.config.max_ctas = max_ctas
            group = dist.new_group([low, high], timeout, backend, options)
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
    return {
        other: Peer(other, incoming, groups[rank, other])
        for (other, receiver), incoming in groups.items()
        if receiver == rank
    }


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
    both = zip(texts, sizes, strict=True)
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in both]


def gather_weights(own: Mapping[int, Weights]) -> list[Weights]:
    """On rank 0 every stage's weights, of all ranks; on the others nothing."""
    forms: list[Any] = [
        [stage, name, list(w.shape), str(w.dtype).removeprefix("torch.")]
        for stage, weights in own.items()
        for name, w in weights.items()
    ]
    of_all = exchange(forms)
    if dist.get_rank() > 0:
        for stage, name, _, _ in forms:
            dist.send(own[stage][name].contiguous(), 0)
        return []
    found = dict(own)
    for rank, theirs in enumerate(of_all[1:], 1):
        for stage, name, shape, dtype in theirs:
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.recv(weight, rank)
            found.setdefault(stage, {})[name] = weight
    return [weights for _, weights in sorted(found.items())]
