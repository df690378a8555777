"""How the processes of a run find each other, and over which interface they talk.

Launchers tell every process where rank 0 is. To be found themselves, gloo and NCCL take the address
of the host's name, which on many machines is loopback: Debian has it at 127.0.1.1.
"""

import contextlib
import ipaddress
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from distributed_training.run.ranks import LOOPBACK, STORE_SOCKET, Process, numbered
from distributed_training.settings.errors import UserError

RETRY_S = 0.2
_AS_RANK_0_IS_SEEN = "address of rank 0"


def meet(process: Process, limit_s: float) -> dist.Store:
    """The store that all processes share, once all of them are there; gloo and NCCL are told which
    interface leads to the others: loopback on one machine. Raises UserError naming who has not come
    within `limit_s` seconds. Collective."""
    end = time.monotonic() + limit_s
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    who = f"rank {process.rank} on {socket.gethostname()}"
    try:
        try:
            server = _serve(host, port, process)
            address, other = _connect(host, port, who, end, limit_s)
            limit = timedelta(seconds=max(1.0, end - time.monotonic()))
            opened = dist.TCPStore(host, port, timeout=limit, wait_for_workers=False, **server)
            # Apart from what was written before torchrun started the processes again: where its
            # agent serves, the server stays. Agents of several nodes may count differently.
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if _agent_serves() else "0"
            store = dist.PrefixStore(f"attempt {attempt}", opened)
            if not _is_loopback(other):
                store.set(_AS_RANK_0_IS_SEEN, other)
            hosts = _wait_for_all(store, process, end, limit_s)
        except dist.DistNetworkError as error:
            what = f"{who} lost rank 0 at {host}:{port}"
            why = str(error).partition("\n")[0]
            raise UserError(what, why, "read what the first node printed") from None
    except UserError as error:
        if process.rank and not process.local_rank:  # what rank 0 raises, the command line prints
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise
    if process.on_one_machine:
        address = LOOPBACK
    elif len(set(hosts)) == 1:
        address = ""
    elif _is_loopback(address):  # rank 0's host, as the others see it
        address = store.get(_AS_RANK_0_IS_SEEN).decode()
    if address and (name := _interface(address)):  # unless the user has named one
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # or eth1 is eth10, too
    return store


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _serve(host: str, port: int, process: Process) -> dict[str, Any]:
    """The words with which rank 0 opens its store: on the launcher's socket, or one at MASTER_ADDR
    alone; at any address only for other machines, where that name does not say which of this one's
    they reach. By itself a store would listen on every interface."""
    if process.rank or _agent_serves():  # torchrun's agent has started a server
        return {}
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        own = str(address[0])
        if STORE_SOCKET in os.environ:
            listener = socket.socket(fileno=int(os.environ.pop(STORE_SOCKET)))
        elif process.on_one_machine or (_interface(own) and not _is_loopback(own)):
            listener = socket.create_server((own, port), family=family)
        else:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        what = f"rank 0 on {socket.gethostname()} cannot listen at {host}:{port}"
        fix = "wait for the run that has it, or give the launcher another --master_port"
        raise UserError(what, str(error.strerror or error), fix) from None
    return {"is_master": True, "master_listen_fd": listener.detach()}


def _connect(host: str, port: int, who: str, end: float, limit_s: float) -> tuple[str, str]:
    """This host's address on the way to the store, and the store's, once it listens."""
    while True:
        left = max(RETRY_S, end - time.monotonic())
        try:
            with socket.create_connection((host, port), left) as connection:
                ends = connection.getsockname(), connection.getpeername()
                own, other = (name[0].partition("%")[0] for name in ends)
                return own, other
        except OSError as error:
            if time.monotonic() > end:
                what = f"{who} does not reach rank 0 at {host}:{port}"
                why = f"{error.strerror or error}, for {limit_s:g} s (rendezvous_timeout_s)"
                fix = (
                    "start the same command on the first node, and give torchrun there "
                    f"--local_addr=ADDRESS where {host} does not lead to it"
                )
                raise UserError(what, why, fix) from None
            time.sleep(RETRY_S)


def _wait_for_all(store: dist.Store, process: Process, end: float, limit_s: float) -> list[str]:
    """The host of every rank."""
    keys = [f"host of rank {rank}" for rank in range(process.world_size)]
    store.set(keys[process.rank], socket.gethostname())
    with contextlib.suppress(dist.DistStoreError):  # the time is over
        store.wait(keys, timedelta(seconds=max(1.0, end - time.monotonic())))
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    hosts = [store.get(key).decode() for rank, key in enumerate(keys) if rank not in missing]
    if missing:
        here = process.local_world_size
        away = sorted({rank // here for rank in missing})
        ranks = numbered("rank", missing)
        what = f"{ranks} did not come within {limit_s:g} s (rendezvous_timeout_s)"
        nodes = f"{numbered('node', away)} of {process.world_size // here} is missing"
        why = f"{nodes}, {', '.join(dict.fromkeys(hosts))} is here"
        raise UserError(what, why, "type there what you typed here, or read what it printed")
    return hosts


def _interface(address: str) -> str | None:
    """The name of this host's interface that has the address."""
    for name, entries in psutil.net_if_addrs().items():
        if address in (entry.address.partition("%")[0] for entry in entries):
            return name
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
