"""What ranks tell one another, as JSON: a pickle would be run by whoever reads it."""

import contextlib
import errno
import itertools
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.settings.errors import RunError, UserError
from distributed_training.settings.files import shown

PATIENCE_S = 24 * 3600.0  # of `gather_in`
_RAISED_ON_ALL = {kind.__name__: kind for kind in (OSError, FloatingPointError, RunError)}
Ask = Callable[[Any], list[Any]]
logger = logging.getLogger(__name__)


def gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank gives, by rank: whatever JSON can say, so that tuples come as lists.
    `group`: another one of all ranks. Collective."""
    text = json.dumps(mine).encode()
    longest = torch.tensor(len(text))
    dist.all_reduce(longest, dist.ReduceOp.MAX, group)
    padded = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)
    ranks = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, padded, group)
    return [json.loads(rank.numpy().tobytes()) for rank in ranks]


def from_rank_0(value: Any) -> Any:
    """Rank 0's `value`, as `gather` would give it, on all ranks. Collective."""
    return gather(value)[0]


def gather_in(store: dist.Store, rank: int, world_size: int) -> Ask:
    """`gather` by way of a store, for when a rank may take longer than process groups wait, as to
    tokenize. Raises RunError after PATIENCE_S."""
    numbers = itertools.count()

    def ask(mine: Any) -> list[Any]:
        number = next(numbers)
        keys = [f"answer {number} of rank {each}" for each in range(world_size)]
        store.set(keys[rank], json.dumps(mine))
        end = time.monotonic() + PATIENCE_S
        pause = 0.01
        while not store.check(keys):
            if time.monotonic() > end:
                raise RunError(f"another rank has not answered for {PATIENCE_S / 3600:g} hours")
            time.sleep(pause)
            pause = min(1.0, 1.2 * pause)
        return [json.loads(answer) for answer in store.multi_get(keys)]

    return ask


def check_ranks_agree(mine: Mapping[str, Any], ask: Ask) -> None:
    """Raise UserError on all where a rank has another value of a name than rank 0. Collective."""
    ranks = ask((socket.gethostname(), mine))
    host_0, first = ranks[0]
    for rank, (host, found) in enumerate(ranks):
        for name in {**first, **found}:
            if found.get(name) != first.get(name):
                what = f"rank {rank} on {host} has another {name} than rank 0 on {host_0}"
                why = f"{shown(found.get(name))} instead of {shown(first.get(name))}"
                fix = "type the same command on every node, with the same code, packages and data"
                raise UserError(what, why, fix)


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """What fails in the block on some rank is raised on all, the first rank's where several fail:
    an error of a disk, of numbers that are not finite, or the user's. Collective, as gather."""
    failure = None
    try:
        yield
    except OSError as error:
        failure = ("OSError", error.errno or errno.EIO, str(error.strerror or error))
    except FloatingPointError as error:
        failure = ("FloatingPointError", f"{error} on rank {dist.get_rank()}")
    except UserError as error:
        failure = (type(error).__name__, str(error))
    for found in filter(None, gather(failure, group)):
        name, *words = found
        raise _RAISED_ON_ALL.get(name, UserError)(*words)


def works_everywhere(attempt: Callable[[], Any], consequence: str) -> bool:
    """Whether `attempt` raises a RuntimeError on no rank; else each warns of the `consequence` for
    all. Collective over all processes."""
    failure = ""
    try:
        attempt()
    except RuntimeError as error:
        failure = str(error).partition("\n")[0]
    failures = [found for found in gather(failure) if found]
    if failures:
        logger.warning("%s: %s", consequence, failures[0])
    return not failures
