"""Connect the ranks that a launcher such as torchrun started, and check that all nodes have the
run's folder.

Launchers pass the address of rank 0 to every process. By default, gloo announces the address to
which the host's name resolves. On many machines, this is a loopback address (127.0.1.1 on Debian).
`connect_ranks` therefore sets the network interface for gloo and NCCL."""

import ipaddress
import os
import platform
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from distributed_training.checkpoint import resume
from distributed_training.parallel import agree
from distributed_training.plan.plan import PLAN_FILE, Plan
from distributed_training.settings.errors import UserError, first_line
from distributed_training.start import run_dir
from distributed_training.start.ranks import LOOPBACK, LOOPBACK_INTERFACES
from distributed_training.supervise import claims
from distributed_training.supervise.process import Process

_RANK_0_ADDRESS_KEY = "address of rank 0"  # at which other machines reach rank 0


def connect_ranks(process: Process, limit_s: float) -> dist.Store:
    """Wait up to `limit_s` seconds for all ranks and return their shared store. Set the interface
    through which gloo and NCCL reach the other ranks. Raises UserError if ranks are missing. All
    ranks must call this function."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=limit_s)
    is_served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: dist.Store
    try:
        if process.rank == 0 and host in ("localhost", LOOPBACK) and not is_served_by_agent:
            # By default, a store listens on all interfaces.
            fd = socket.create_server((host, port)).detach()
            store = dist.TCPStore(
                host, port, process.world_size, is_master=True, timeout=limit, master_listen_fd=fd
            )
        else:
            store, _, _ = next(rendezvous("env://", timeout=limit))
        if is_served_by_agent:  # torchrun's agent serves one store for all attempts
            store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        if process.local_world_size == process.world_size:
            os.environ.update(LOOPBACK_INTERFACES)
        else:
            _use_interface(host, port, store)
    except (dist.DistError, OSError) as error:
        what = f"rank {process.rank} on {socket.gethostname()} cannot connect to {host}:{port}"
        why = f"{first_line(error).rstrip('.')} (rendezvous_timeout_s={limit_s:g})"
        fix = "start the same command on every node, with the address of the first node and a "
        raise UserError(what, why, f"{fix}port that no other run uses") from None
    return store


def _use_interface(host: str, port: int, store: dist.Store) -> None:
    """Make gloo and NCCL use the interface through which this machine reaches other machines. An
    interface that the user has named is kept."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends no packet
        own_address, rank_0_address = probe.getsockname()[0], probe.getpeername()[0]
    if not ipaddress.ip_address(rank_0_address).is_loopback:
        store.set(_RANK_0_ADDRESS_KEY, rank_0_address)
    else:  # this is rank 0's machine, which only the other machines know by a useful address
        own_address = store.get(_RANK_0_ADDRESS_KEY).decode()
    for name, entries in psutil.net_if_addrs().items():
        if own_address in (entry.address.partition("%")[0] for entry in entries):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            # Without "=", eth1 would match eth10.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def check_disks(plan: Plan, process: Process, gather_values: agree.Gather) -> None:
    """Check that all nodes have the run's folder. The folder is shared or, with
    `shared_disk=False`, each node claims its own folder and writes the plan into it. To resume,
    each node's own folder must contain the checkpoint files of that node. Raises an error on every
    rank if a node lacks the folder or a file. All ranks must call this function."""
    label = f"rank {process.rank} on {socket.gethostname()}"
    with agree.raise_on_all_ranks(gather_values):
        if process.local_rank or not process.rank:  # rank 0 checked its node when it planned
            pass
        elif plan.has_node_local_files:
            plan.run_dir.mkdir(parents=True, exist_ok=True)
            owner = claims.read_owner(plan.run_dir)
            if owner.get("run_id") == plan.run_id and owner.get("host") != platform.node():
                what = f"{label} shares {plan.run_dir} with another node"
                raise UserError(what, fix="set shared_disk to True")
            claims.claim(plan.run_dir, plan.run_id)
            run_dir.write_plan(plan)
            if plan.checkpoint is not None:
                meta = resume.read_meta(plan.checkpoint)
                resume.check_files(plan.checkpoint, meta, plan, process.rank)
        elif not (plan.run_dir / PLAN_FILE).is_file():
            what = f"{label} does not see {plan.run_dir}"
            fix = "set output_dir to a folder on a disk that all nodes share, or set shared_disk "
            raise UserError(what, "rank 0 has created this folder", f"{fix}to False")
