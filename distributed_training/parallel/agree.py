"""Exchange Python values between ranks as JSON, because unpickling could execute code that another
rank sent."""

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

from distributed_training.settings.errors import FinishedError, RunError, UserError, first_line
from distributed_training.settings.files import shown

_ERRORS = (OSError, FloatingPointError, RunError, FinishedError)
_ERROR_CLASSES = {error.__name__: error for error in _ERRORS}
Gather = Callable[[Any], list[Any]]
DAY_S = 86400.0
logger = logging.getLogger(__name__)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks in rank order. Values must be JSON-serializable, and tuples
    become lists. If given, `group` must contain all ranks and is used instead of the default group.
    All ranks must call this function."""
    text = json.dumps(value).encode()
    max_length = torch.tensor(len(text))
    dist.all_reduce(max_length, dist.ReduceOp.MAX, group)
    padded = torch.frombuffer(bytearray(text.ljust(int(max_length))), dtype=torch.uint8)
    buffers = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(buffers, padded, group)
    return [json.loads(buffer.numpy().tobytes()) for buffer in buffers]


def broadcast_from_rank_0(value: Any) -> Any:
    """Return rank 0's `value` on all ranks. As in `gather`, values must be JSON-serializable, and
    all ranks must call this function."""
    return gather(value)[0]


def build_store_gather(store: dist.Store, rank: int, world_size: int) -> Gather:
    """Return a function like `gather` that exchanges values through a store. The function can wait
    longer than a process group's timeout, for example for a rank that is still tokenizing. Waiting
    ranks handle signals, and their launcher ends them if another rank fails. They have no time
    limit, because rank 0 may read and tokenize data for hours."""
    call_indices = itertools.count()

    def gather_from_store(value: Any) -> list[Any]:
        call_index = next(call_indices)
        keys = [f"value {call_index} of rank {sender}" for sender in range(world_size)]
        store.set(keys[rank], json.dumps(value))
        while not store.check(keys):
            time.sleep(0.05)
        values = [json.loads(text) for text in store.multi_get(keys)]
        store.add(f"readers {call_index}", 1)
        # Rank 0 may serve the store, so it leaves last.
        while rank == 0 and store.add(f"readers {call_index}", 0) < world_size:
            time.sleep(0.05)
        return values

    return gather_from_store


def check_ranks_agree(values_by_name: Mapping[str, Any], gather_values: Gather) -> None:
    """Raise UserError on all ranks if any rank's `values_by_name` differs from rank 0's. All ranks
    must call this function."""
    reports = gather_values((socket.gethostname(), values_by_name))
    host_0, values_0 = reports[0]
    for rank, (host, values) in enumerate(reports):
        for name in {**values_0, **values}:
            if values.get(name) != values_0.get(name):
                what = f"rank {rank} on {host} and rank 0 on {host_0} differ in {name}"
                why = (
                    f"rank {rank} has {shown(values.get(name))}, but rank 0 has "
                    f"{shown(values_0.get(name))}"
                )
                fix = "start the same command on every node, with the same code, packages and data"
                raise UserError(what, why, fix)


@contextlib.contextmanager
def raise_on_all_ranks(gather_values: Gather = gather) -> Iterator[None]:
    """Raise an error on all ranks if any rank raises an OSError, FloatingPointError or UserError in
    the `with` block. If several ranks fail, all ranks raise the error of the lowest failing rank.
    All ranks must enter the block. They exchange their errors with `gather_values`."""
    failure = None
    cause: Exception | None = None
    try:
        yield
    except OSError as error:
        cause = error
        message = str(error.strerror or error)
        failure = ("OSError", error.errno or errno.EIO, message, str(error.filename or ""))
    except FloatingPointError as error:
        failure = ("FloatingPointError", f"{error} on rank {dist.get_rank()}")
    except UserError as error:
        failure = (type(error).__name__, str(error))
    for first_failure in filter(None, gather_values(failure)):
        name, *arguments = first_failure
        raise _ERROR_CLASSES.get(name, UserError)(*arguments) from cause


def succeeds_on_all_ranks(attempt: Callable[[], Any], consequence: str) -> bool:
    """Run `attempt`, and return whether it succeeded on all ranks. If `attempt` raised a
    RuntimeError on any rank, log `consequence` and the error as a warning. All ranks must call this
    function."""
    failure = ""
    try:
        attempt()
    except RuntimeError as error:
        failure = first_line(error)
    failures = [message for message in gather(failure) if message]
    if failures:
        logger.warning("%s: %s", consequence, failures[0])
    return not failures
