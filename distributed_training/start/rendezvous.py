"""Connect the ranks of a run. If a launcher such as torchrun started the ranks, they also agree on
rank 0's plan and check that all nodes have the run's folder.

Launchers pass the address of rank 0 to every process. By default, gloo announces the address to
which the host's name resolves. On many machines, this is a loopback address (127.0.1.1 on Debian).
`connect_ranks` therefore sets the network interface for gloo and NCCL."""

import contextlib
import errno
import ipaddress
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from distributed_training.checkpoint import resume
from distributed_training.parallel import agree
from distributed_training.plan.plan import PLAN_FILE, Plan, load_plan
from distributed_training.planner import data as plan_data
from distributed_training.planner.make_plan import keep_global_batch, make_plan
from distributed_training.predict.predict import local_cluster
from distributed_training.records.record import code_checksums, versions
from distributed_training.settings.config import Request
from distributed_training.settings.errors import UserError, first_line, print_stderr
from distributed_training.settings.files import shown
from distributed_training.settings.machine import detect_machine
from distributed_training.start import run_dir
from distributed_training.start.ranks import LOOPBACK
from distributed_training.supervise.process import Process, format_numbers

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
RETRY_S = 0.2
SHARED_FOLDER_TIMEOUT_S = 10.0  # time until a network disk shows a new folder on other machines
# Key in the store: the address at which other machines reach rank 0
_RANK_0_ADDRESS_KEY = "address of rank 0"
_HOST_KEY = "host of rank {}"
_READERS_KEY = "ranks that have read all hosts"


def connect_ranks(process: Process, limit_s: float) -> dist.Store:
    """Wait up to `limit_s` seconds for all ranks and return their shared store. Set the interface
    through which gloo and NCCL reach the other ranks. Raises UserError if ranks are missing. All
    ranks must call this function."""
    end = time.monotonic() + limit_s
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    label = f"rank {process.rank} on {socket.gethostname()}"
    try:
        try:
            server = _listen(host, port, process)
            address, rank_0_address = _connect(host, port, label, end, limit_s)
            limit = timedelta(seconds=max(1.0, end - time.monotonic()))
            tcp_store = dist.TCPStore(host, port, timeout=limit, wait_for_workers=False, **server)
            # If torchrun's agent serves the store, the prefix separates the attempts of restarted
            # processes. Otherwise, agents on different nodes may count attempts differently, so the
            # prefix is constant.
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if _is_agent_store() else "0"
            store = dist.PrefixStore(f"attempt {attempt}", tcp_store)
            if not _is_loopback(rank_0_address):
                store.set(_RANK_0_ADDRESS_KEY, rank_0_address)
            _wait_for_all(store, process, end, limit_s)
        except dist.DistNetworkError as error:
            what = f"{label} lost its connection to rank 0 at {host}:{port}"
            why = first_line(error)
            raise UserError(what, why, "see the output of the first node") from None
    except UserError as error:
        if process.rank and not process.local_rank:  # the command line prints rank 0's error
            print_stderr(error.terminal_text)
        raise
    keys = [_HOST_KEY.format(rank) for rank in range(process.world_size)]
    reports = [json.loads(text) for text in store.multi_get(keys)]
    num_readers = store.add(_READERS_KEY, 1)
    try:
        process = assign_local_rank(process, reports)
    except UserError:  # rank 0 serves the store until all ranks have read the hosts
        while process.rank == 0 and num_readers < process.world_size and time.monotonic() < end:
            time.sleep(RETRY_S)
            num_readers = store.add(_READERS_KEY, 0)
        raise
    if process.on_one_machine:
        use_loopback()
        return store
    # On rank 0's machine, use the address at which other machines reach rank 0.
    if _is_loopback(address) and store.check([_RANK_0_ADDRESS_KEY]):
        address = store.get(_RANK_0_ADDRESS_KEY).decode()
    if name := _find_interface(address):  # an interface that the user has named is kept
        os.environ.setdefault(GLOO_INTERFACE, name)
        os.environ.setdefault(NCCL_INTERFACE, f"={name}")  # without "=", eth1 would match eth10
    return store


def _is_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listen(host: str, port: int, process: Process) -> dict[str, Any]:
    """Return the TCPStore arguments of the process that serves the store. Return {} in other
    processes.

    By default, a store listens on all interfaces. This store listens only on the launcher's socket
    or on MASTER_ADDR. It listens on all interfaces only if other machines must connect and
    MASTER_ADDR does not identify an address of this machine."""
    if process.rank or _is_agent_store():  # rank 0 or torchrun's agent serves the store
        return {}
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        resolved = str(address[0])
        if (
            process.on_one_machine
            or (_find_interface(resolved) and not _is_loopback(resolved))
            or (_is_loopback(resolved) and host in ("localhost", resolved))
        ):
            listener = socket.create_server((resolved, port), family=family)
        else:
            is_dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if is_dual else socket.AF_INET
            listener = socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    except (OSError, UnicodeError) as error:
        what = f"rank 0 on {socket.gethostname()} cannot listen on {host}:{port}"
        fix = _address_advice(host, error) or (
            "wait until the run that uses this port ends, or pass another --master_port to the "
            "launcher"
        )
        raise UserError(what, _reason(error), fix) from None
    return {"is_master": True, "master_listen_fd": listener.detach()}


def _address_advice(host: str, error: OSError | UnicodeError) -> str:
    """Return advice on setting MASTER_ADDR if its value `host` caused the error. Otherwise, return
    ""."""
    if isinstance(error, (socket.gaierror, UnicodeError)):
        why = f"this machine cannot resolve MASTER_ADDR={shown(host)}"
        return f"{why}. Set it to the name or the IP address of the first node"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"MASTER_ADDR={shown(host)} is not an address of this machine. Set it to the address "
            "of the machine with rank 0"
        )
    return ""


def _reason(error: OSError | UnicodeError) -> str:
    return str(getattr(error, "strerror", None) or error)


def _connect(host: str, port: int, label: str, end: float, limit_s: float) -> tuple[str, str]:
    """Wait until the store accepts connections. Return the local address and the remote address of
    the connection. Raises UserError if no connection is established by the time `end`."""
    while True:
        timeout_s = max(RETRY_S, end - time.monotonic())
        try:
            with socket.create_connection((host, port), timeout_s) as connection:
                ends = connection.getsockname(), connection.getpeername()
                own_address, peer_address = (name[0].partition("%")[0] for name in ends)
                return own_address, peer_address
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end or isinstance(error, UnicodeError):
                what = f"{label} cannot reach rank 0 at {host}:{port}"
                attempts = f"every attempt within {limit_s:g} s (rendezvous_timeout_s)"
                why = f"{attempts} failed: {_reason(error)}"
                fix = _address_advice(host, error) or (
                    f"start the same command on the first node. If {host} does not resolve to that "
                    "node, add --local_addr=ADDRESS to its torchrun command"
                )
                raise UserError(what, why, fix) from None
            time.sleep(RETRY_S)


def _wait_for_all(store: dist.Store, process: Process, end: float, limit_s: float) -> None:
    """Publish this rank's host and wait for all ranks. If ranks have not joined by `end`, raise a
    UserError that names these ranks and the hosts that have joined."""
    keys = [_HOST_KEY.format(rank) for rank in range(process.world_size)]
    report = {
        "host": socket.gethostname(),
        "machine": _machine_id(),
        "local_rank": os.environ.get("LOCAL_RANK", ""),
        "local_world_size": process.local_world_size,
        "wrong_interface": find_wrong_interface(list(psutil.net_if_addrs())),
    }
    store.set(keys[process.rank], json.dumps(report))
    with contextlib.suppress(dist.DistStoreError):  # the time limit has passed
        store.wait(keys, timedelta(seconds=max(1.0, end - time.monotonic())))
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        joined = [json.loads(store.get(key)) for i, key in enumerate(keys) if i not in missing]
        hosts = list(dict.fromkeys(report["host"] for report in joined))
        why = f"connected hosts: {', '.join(hosts)}"
        num_local = process.local_world_size
        nodes = [rank // num_local for rank in missing] if num_local else []
        if missing_nodes := sorted(node for node in set(nodes) if nodes.count(node) == num_local):
            is_or_are = "is" if len(missing_nodes) == 1 else "are"
            missing_nodes_text = (
                f"{format_numbers('node', missing_nodes)} of {process.world_size // num_local}"
            )
            why = f"{missing_nodes_text} {is_or_are} missing; {why}"
        ranks = format_numbers("rank", missing)
        what = f"{ranks} did not connect within {limit_s:g} s (rendezvous_timeout_s)"
        fix = "start the same command on the nodes of these ranks, or check their output"
        raise UserError(what, why, fix)


def assign_local_rank(process: Process, reports: Sequence[Mapping[str, Any]]) -> Process:
    """Return `process` with its local rank and local world size, and set both in the environment.
    If the launcher did not set these numbers, derive them from `reports`, one per rank. Raises
    UserError on all ranks unless all machines have the same number of ranks and each machine's
    ranks are consecutive. Also raises UserError if a machine lacks an interface that its
    environment names."""
    machines = [report["machine"] for report in reports]
    num_local = reports[0]["local_world_size"] or machines.count(machines[0])
    for rank, report in enumerate(reports):
        host = report["host"]
        local_rank = report["local_rank"]
        local_world_size = report["local_world_size"]
        first = rank // num_local * num_local
        num_neighbors = machines[first : first + num_local].count(machines[rank])
        fills_machine = num_neighbors == num_local and machines.count(machines[rank]) == num_local
        what = ""
        if not (local_world_size == num_local if local_world_size else fills_machine):
            what = f"rank {rank} is not one of {num_local} consecutive ranks on {host}"
        elif local_rank not in ("", str(rank % num_local)):
            what = (
                f"rank {rank} on {host} has LOCAL_RANK={local_rank} instead of {rank % num_local}"
            )
        if what:
            hosts = ", ".join(dict.fromkeys(report["host"] for report in reports))
            why = "every machine needs the same number of ranks, numbered consecutively"
            raise UserError(
                what,
                f"{why} (the hosts are {hosts})",
                "number the ranks consecutively on each machine, or use torchrun",
            )
    local = {"local_rank": process.rank % num_local, "local_world_size": num_local}
    os.environ.update({name.upper(): str(number) for name, number in local.items()})
    interface_errors = [
        report["wrong_interface"] for report in reports if report["wrong_interface"]
    ]
    if interface_errors and num_local < process.world_size:  # ranks on one machine use loopback
        raise UserError(
            interface_errors[0], fix="name one of these interfaces, or unset the variable"
        )
    return replace(process, **local)


def find_wrong_interface(interfaces: Sequence[str]) -> str:
    """Describe an error in the interfaces that the environment names for gloo and NCCL. Return ""
    if there is none. `interfaces` lists the interfaces of this machine. gloo's variable contains
    exact names. NCCL's variable contains prefixes of names, exact names after "=", or excluded
    prefixes after "^"."""
    for variable in (GLOO_INTERFACE, NCCL_INTERFACE):
        value = os.environ.get(variable, "")
        names = [name.lstrip("=").partition(":")[0] for name in value.lstrip("^").split(",")]
        if variable == GLOO_INTERFACE:
            is_valid = set(value.split(",")).issubset(interfaces)
        elif value.startswith("="):
            is_valid = bool(set(names).intersection(interfaces))
        else:
            matching = {name for name in interfaces if name.startswith(tuple(names))}
            is_valid = bool(set(interfaces) - matching if value.startswith("^") else matching)
        if value and not is_valid:
            host = socket.gethostname()
            available = ", ".join(interfaces)
            return f"{variable}={shown(value)} names no interface of {host}, which has {available}"
    return ""


def use_loopback() -> None:
    """Make gloo and NCCL connect the ranks on one machine over loopback. This overrides interfaces
    that the environment names."""
    if name := _find_interface(LOOPBACK):
        os.environ.update({GLOO_INTERFACE: name, NCCL_INTERFACE: f"={name}"})


def _machine_id() -> tuple[str, int]:
    """Return an identifier that is the same for all processes that can reach each other over
    loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.stat("/proc/self/ns/net").st_ino


def _find_interface(address: str) -> str | None:
    """Return the name of this host's network interface with the given address. Return None if there
    is none."""
    for name, entries in psutil.net_if_addrs().items():
        if address in (entry.address.partition("%")[0] for entry in entries):
            return name
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def current_agent() -> str | None:
    """Return the host, pid and start time of the torchrun agent that started this process, as a
    string. Return None if torchrun did not start this process."""
    agent = psutil.Process().parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return agent and f"{socket.gethostname()} {agent.pid} {agent.create_time()}"


def standalone_note(process: Process) -> list[str]:
    """If `torchrun --standalone` started this process, return a list with a note that suggests a
    safer command for the same run. Otherwise, return []."""
    agent = psutil.Process().parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
    with contextlib.suppress(psutil.Error):
        if agent and "--standalone" in agent.cmdline():
            why = (
                "torchrun --standalone listens on all interfaces and unpickles the data it receives"
            )
            return [
                f"{why}. To avoid this risk, start the command with "
                f"python and --num_gpus {process.world_size}"
            ]
    return []


def agree_on_plan(
    config: Request, process: Process, gather_values: agree.Gather, agent: str | None = None
) -> Plan:
    """Make the plan on rank 0 and return it on all ranks. If the ranks' torchrun agents have
    already started a run, the plan continues that run. `agent` identifies this process's agent. All
    ranks raise rank 0's UserError. They also raise UserError if settings or code differ between
    ranks. All ranks must call this function."""
    settings = config.to_key_values()
    del settings["output_dir"]  # paths of checkouts may differ
    agree.check_ranks_agree({**settings, **versions(), **code_checksums()}, gather_values)
    launchers = sorted(set(gather_values(agent))) if agent else []

    def make() -> Plan:
        cluster = local_cluster(detect_machine(), process.world_size, process.local_world_size)
        continued_config, notes = continue_run(config, launchers, process.world_size)
        plan = make_plan(continued_config, cluster, plan_data.read_data)
        return run_dir.reserve_run_dir(plan, launchers, [*notes, *standalone_note(process)])

    return run_dir.plan_from_text(
        gather_values(run_dir.plan_as_text(make) if process.rank == 0 else "")[0]
    )


def continue_run(
    config: Request, launchers: Iterable[str], num_processes: int
) -> tuple[Request, list[str]]:
    """If one of `launchers` has already started a run, return a copy of `config` that continues
    that run from its last checkpoint with `num_processes` processes. Also return a list of notes.
    If there is no such run, return `config` unchanged and an empty list."""
    run_folder = None
    files = Path(config.output_dir).glob(f"*/{PLAN_FILE}") if launchers else ()
    for file in sorted(files):
        with contextlib.suppress(OSError, ValueError):
            if set(launchers).intersection(json.loads(file.read_bytes()).get("launchers", ())):
                run_folder = file.parent.resolve()  # the newest of these folders
    if run_folder is None:
        return config, []
    old_plan = load_plan(run_folder)
    checkpoint, note = run_dir.plan_restart(old_plan)
    if checkpoint:
        config = config.model_copy(update={"resume": str(checkpoint)})
    notes = [note]
    config = keep_global_batch(config, old_plan, num_processes, notes)
    return config, ["; ".join(notes)]


def check_disks(plan: Plan, process: Process) -> None:
    """Check that all nodes have the run's folder. The folder is shared or, with
    `shared_disk=False`, each node has its own folder. To resume, each node's own folder must
    contain the checkpoint files of that node. Raises UserError on every rank if a node lacks the
    folder or a file. All ranks must call this function."""
    is_local_rank_0 = process.local_rank == 0
    label = f"rank {process.rank} on {socket.gethostname()}"
    disk_marker = plan.run_dir / agree.broadcast_from_rank_0(f".disk-{uuid.uuid4().hex}")
    try:
        with agree.raise_on_all_ranks():
            if is_local_rank_0 and plan.has_node_local_files:
                _create_own_folder(plan, disk_marker, label)
            elif is_local_rank_0:
                _wait_for_shared_folder(plan, label)
    finally:
        if is_local_rank_0:
            disk_marker.unlink(missing_ok=True)
    if plan.has_node_local_files and plan.checkpoint is not None:
        local_meta = resume.read_meta(plan.checkpoint) if process.rank == 0 else None
        host, values = agree.broadcast_from_rank_0(
            (socket.gethostname(), local_meta and local_meta.model_dump())
        )
        meta = resume.Meta(**values)
        meta.hosts = meta.hosts or dict.fromkeys(meta.files, host)
        with agree.raise_on_all_ranks():
            if is_local_rank_0 and process.rank:  # rank 0 read its node's files when it planned
                resume.check_files(plan.checkpoint, meta, plan, process.rank)


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


def _create_own_folder(plan: Plan, disk_marker: Path, label: str) -> None:
    """Create this node's own folder for the run, and write the plan into it. Raises UserError if
    nodes share the disk or the folder cannot be created."""
    try:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        # If nodes share the disk, this fails on all nodes but the first.
        disk_marker.touch(exist_ok=False)
        run_dir.write_plan(plan)
    except FileExistsError:
        what = f"{label} shares {plan.run_dir} with another node"
        raise UserError(
            what,
            "shared_disk=False needs a separate folder on each node",
            "set shared_disk to True",
        ) from None
    except OSError as error:
        what = f"{label} cannot create {plan.run_dir}"
        raise UserError(what, str(error.strerror), "set output_dir to another folder") from None
