"""Connect the ranks that a launcher such as torchrun started, agree on rank 0's plan, and check
that all nodes have the run's folder.

Launchers pass the address of rank 0 to every process. By default, gloo announces the address to
which the host's name resolves. On many machines, this is a loopback address (127.0.1.1 on Debian).
`connect_ranks` therefore sets the network interface for gloo and NCCL."""

import contextlib
import ipaddress
import json
import os
import platform
import socket
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from distributed_training.checkpoint import resume
from distributed_training.parallel import agree
from distributed_training.plan.plan import PLAN_AS_JSON, PLAN_FILE, Plan, load_plan
from distributed_training.planner import data as plan_data
from distributed_training.planner.make_plan import keep_global_batch, make_plan
from distributed_training.predict.predict import local_cluster
from distributed_training.records.record import code_checksums, has_finished, versions
from distributed_training.settings.config import Request
from distributed_training.settings.errors import UserError, first_line
from distributed_training.settings.machine import detect_machine
from distributed_training.start import run_dir
from distributed_training.start.ranks import LOOPBACK
from distributed_training.supervise import claims
from distributed_training.supervise.process import Process

SHARED_FOLDER_TIMEOUT_S = 10.0  # time until a network disk shows a new folder on other machines
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
            use_loopback()
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


def use_loopback() -> None:
    """Make gloo and NCCL connect the ranks on one machine over loopback. This overrides interfaces
    that the environment names."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="=lo")


def agree_on_plan(config: Request, process: Process, gather_values: agree.Gather) -> Plan:
    """Make the plan on rank 0 and return it on all ranks. If torchrun has restarted the processes
    of a run, the plan continues that run. All ranks raise rank 0's UserError. They also raise
    UserError if settings or code differ between ranks. All ranks must call this function."""
    settings = config.to_key_values()
    del settings["output_dir"]  # paths of checkouts may differ
    agree.check_ranks_agree({**settings, **versions(), **code_checksums()}, gather_values)

    text = ""
    with agree.raise_on_all_ranks(gather_values):
        if process.rank == 0:
            cluster = local_cluster(detect_machine(), process.world_size, process.local_world_size)
            continued_config, notes = continue_run(config, process.world_size)
            plan = make_plan(continued_config, cluster, plan_data.read_data)
            text = PLAN_AS_JSON.dump_json(run_dir.reserve_run_dir(plan, notes)).decode()
    return PLAN_AS_JSON.validate_json(gather_values(text)[0])


def continue_run(config: Request, num_processes: int) -> tuple[Request, list[str]]:
    """If this torchrun has already started a run that has not finished, return a copy of `config`
    that continues the run from its last checkpoint with `num_processes` processes. Also return a
    list of notes. If there is no such run, return `config` unchanged and an empty list."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    folders = []
    for file in sorted(Path(config.output_dir).glob(f"*/{PLAN_FILE}")):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a foreign or damaged file
            if file.is_file() and json.loads(file.read_bytes()).get("run_id") == run_id != "none":
                folders.append(file.parent.resolve())
    if not folders or has_finished(folders[-1]):
        return config, []
    old_plan = load_plan(folders[-1])
    checkpoint, note = run_dir.plan_restart(old_plan)
    if checkpoint:
        config = config.model_copy(update={"resume": str(checkpoint)})
    notes = [note]
    config = keep_global_batch(config, old_plan, num_processes, notes)
    return config, ["; ".join(notes)]


def check_disks(plan: Plan, process: Process) -> None:
    """Check that all nodes have the run's folder. The folder is shared or, with
    `shared_disk=False`, each node has its own folder. To resume, each node's own folder must
    contain the checkpoint files of that node. Raises an error on every rank if a node lacks the
    folder or a file. All ranks must call this function."""
    label = f"rank {process.rank} on {socket.gethostname()}"
    with agree.raise_on_all_ranks():
        if process.local_rank or not process.rank:  # rank 0 checked its node when it planned
            pass
        elif plan.has_node_local_files:
            _create_own_folder(plan, process, label)
        else:
            _wait_for_shared_folder(plan, label)


def _wait_for_shared_folder(plan: Plan, label: str) -> None:
    """Wait until rank 0's plan in the run's shared folder is visible on this node. Raises UserError
    after SHARED_FOLDER_TIMEOUT_S seconds."""
    fix = "set output_dir to a folder on a disk that all nodes share, or set shared_disk to False"
    end = time.monotonic() + SHARED_FOLDER_TIMEOUT_S
    while not (plan.run_dir / PLAN_FILE).is_file():
        if time.monotonic() > end:
            what = f"{label} does not see {plan.run_dir}, which rank 0 has created"
            raise UserError(what, "with shared_disk=True, all nodes write to the same folder", fix)
        time.sleep(0.2)


def _create_own_folder(plan: Plan, process: Process, label: str) -> None:
    """Claim this node's own folder for the run, write the plan into it, and check this node's
    checkpoint files. Raises UserError if nodes share the disk."""
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    owner = claims.read_owner(plan.run_dir)
    if owner.get("run_id") == plan.run_id and owner.get("host") != platform.node():
        what = f"{label} shares {plan.run_dir} with another node"
        why = "shared_disk=False needs a separate folder on each node"
        raise UserError(what, why, "set shared_disk to True")
    claims.claim(plan.run_dir, plan.run_id)
    run_dir.write_plan(plan)
    if plan.checkpoint is not None:
        meta = resume.read_meta(plan.checkpoint)
        resume.check_files(plan.checkpoint, meta, plan, process.rank)
