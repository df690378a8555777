"""Connect the ranks of a run. If torchrun, deepspeed or srun started them, they also agree on the
plan that rank 0 makes, and on the folders in which nodes keep their files.

Launchers tell every process the address of rank 0. By default, gloo and NCCL announce the
address of the host's name, which on many machines is loopback (127.0.1.1 on Debian)."""

import contextlib
import ipaddress
import json
import os
import shlex
import socket
import sys
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
from distributed_training.planner.make_plan import make_plan, share_batch
from distributed_training.predict.predict import this_machine
from distributed_training.records.record import code, versions
from distributed_training.settings.config import Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown
from distributed_training.settings.machine import detect_machine
from distributed_training.start import run_dir
from distributed_training.start.ranks import LOOPBACK, STORE_SOCKET
from distributed_training.supervise.process import Process, numbered

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
RETRY_S = 0.2
SHARED_WITHIN_S = 10.0  # until a network disk shows a new folder to other machines
_AS_RANK_0_IS_SEEN = "address of rank 0"  # a key of the store
_HOST = "host of rank {}"
_READERS = "ranks that have read all hosts"


def meet(process: Process, limit_s: float) -> dist.Store:
    """Wait for all ranks and return their shared store. Sets the interface on which gloo and NCCL
    reach the other ranks. Raises UserError that names the ranks missing after `limit_s`.
    Collective."""
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
            # The prefix separates attempts if torchrun restarts the processes and its agent serves
            # the store. Otherwise agents of several nodes may count attempts differently.
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if _agent_serves() else "0"
            store = dist.PrefixStore(f"attempt {attempt}", opened)
            if not _is_loopback(other):
                store.set(_AS_RANK_0_IS_SEEN, other)
            _wait_for_all(store, process, end, limit_s)
        except dist.DistNetworkError as error:
            what = f"{who} lost rank 0 at {host}:{port}"
            why = str(error).partition("\n")[0]
            raise UserError(what, why, "read what the first node printed") from None
    except UserError as error:
        if process.rank and not process.local_rank:  # the command line prints rank 0's error
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise
    keys = [_HOST.format(rank) for rank in range(process.world_size)]
    ranks = [json.loads(text) for text in store.multi_get(keys)]
    num_readers = store.add(_READERS, 1)
    try:
        process = locate(process, ranks)
    except UserError:  # all ranks raise it, after they have read the hosts
        while process.rank == 0 and num_readers < process.world_size and time.monotonic() < end:
            time.sleep(RETRY_S)
            num_readers = store.add(_READERS, 0)
        raise
    if process.on_one_machine:
        use_loopback()
        return store
    if _is_loopback(address) and store.check([_AS_RANK_0_IS_SEEN]):  # by other machines
        address = store.get(_AS_RANK_0_IS_SEEN).decode()
    if name := _interface(address):  # unless the user named an interface
        os.environ.setdefault(GLOO_INTERFACE, name)
        os.environ.setdefault(NCCL_INTERFACE, f"={name}")  # without "=", eth1 would also mean eth10
    return store


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _serve(host: str, port: int, process: Process) -> dict[str, Any]:
    """Return the arguments with which rank 0 opens its store. It listens on the launcher's
    socket, or on MASTER_ADDR alone. It listens on all addresses only if other machines must
    connect and MASTER_ADDR does not tell at which address. By default a store listens on all
    interfaces."""
    if process.rank or _agent_serves():  # torchrun's agent has started a server
        return {}
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        resolved = str(address[0])
        if STORE_SOCKET in os.environ:
            listener = socket.socket(fileno=int(os.environ.pop(STORE_SOCKET)))
        elif (
            process.on_one_machine
            or (_interface(resolved) and not _is_loopback(resolved))
            or (_is_loopback(resolved) and host in ("localhost", resolved))
        ):
            listener = socket.create_server((resolved, port), family=family)
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
    """Wait until the store listens. Return this host's address on the way to it, and its
    address."""
    while True:
        left = max(RETRY_S, end - time.monotonic())
        try:
            with socket.create_connection((host, port), left) as connection:
                ends = connection.getsockname(), connection.getpeername()
                ours, theirs = (name[0].partition("%")[0] for name in ends)
                return ours, theirs
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


def _wait_for_all(store: dist.Store, process: Process, end: float, limit_s: float) -> None:
    """Publish this rank's host, and wait for all ranks. Raises UserError that names the ranks that
    have not joined by `end` and the hosts that have."""
    keys = [_HOST.format(rank) for rank in range(process.world_size)]
    facts = {
        "host": socket.gethostname(),
        "machine": _machine(),
        "local_rank": os.environ.get("LOCAL_RANK", ""),
        "local_world_size": process.local_world_size,
        "wrong_interface": find_wrong_interface(list(psutil.net_if_addrs())),
    }
    store.set(keys[process.rank], json.dumps(facts))
    with contextlib.suppress(dist.DistStoreError):  # the time is over
        store.wait(keys, timedelta(seconds=max(1.0, end - time.monotonic())))
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        present = [json.loads(store.get(key)) for i, key in enumerate(keys) if i not in missing]
        hosts = list(dict.fromkeys(facts["host"] for facts in present))
        why = f"{', '.join(hosts)} {'is' if len(hosts) == 1 else 'are'} here"
        here = process.local_world_size
        nodes = [rank // here for rank in missing] if here else []
        if away := sorted(node for node in set(nodes) if nodes.count(node) == here):
            why = f"{numbered('node', away)} of {process.world_size // here} is missing, {why}"
        ranks = numbered("rank", missing)
        what = f"{ranks} did not come within {limit_s:g} s (rendezvous_timeout_s)"
        raise UserError(what, why, "type there what you typed here, or read what it printed")


def locate(process: Process, ranks: Sequence[Mapping[str, Any]]) -> Process:
    """Return the process with its local numbers, and set them in the environment. If the
    launcher did not set them, they follow from the facts about all `ranks`. Raises UserError on
    all ranks unless each machine has the same number of consecutive ranks and the interfaces
    that it names."""
    machines = [facts["machine"] for facts in ranks]
    here = ranks[0]["local_world_size"] or machines.count(machines[0])
    for rank, facts in enumerate(ranks):
        host = facts["host"]
        local_rank = facts["local_rank"]
        told = facts["local_world_size"]
        first = rank // here * here
        together = machines[first : first + here].count(machines[rank])
        alone = together == here and machines.count(machines[rank]) == here
        what = ""
        if not (told == here if told else alone):
            what = f"rank {rank} is not process {rank % here} of the {here} on {host}"
        elif local_rank not in ("", str(rank % here)):
            what = f"rank {rank} on {host} has LOCAL_RANK={local_rank} instead of {rank % here}"
        if what:
            hosts = ", ".join(dict.fromkeys(facts["host"] for facts in ranks))
            why = "each machine needs as many ranks as the others, and they follow one another"
            raise UserError(what, f"{why} (here: {hosts})", "start it so, or with torchrun")
    local = {"local_rank": process.rank % here, "local_world_size": here}
    os.environ.update({name.upper(): str(number) for name, number in local.items()})
    faults = [facts["wrong_interface"] for facts in ranks if facts["wrong_interface"]]
    if faults and here < process.world_size:  # one machine needs none of them
        raise UserError(faults[0], fix="name one of these, or unset it")
    return replace(process, **local)


def find_wrong_interface(present: Sequence[str]) -> str:
    """Return the error in the interfaces that the environment names for gloo and NCCL, or "".
    `present`: the interfaces of this machine. gloo takes names. NCCL takes prefixes of names, exact
    names after "=", and names to exclude after "^"."""
    for variable in (GLOO_INTERFACE, NCCL_INTERFACE):
        given = os.environ.get(variable, "")
        names = [name.lstrip("=").partition(":")[0] for name in given.lstrip("^").split(",")]
        if variable == GLOO_INTERFACE:
            right = set(given.split(",")).issubset(present)
        elif given.startswith("="):
            right = bool(set(names).intersection(present))
        else:
            matching = {name for name in present if name.startswith(tuple(names))}
            right = bool(set(present) - matching if given.startswith("^") else matching)
        if given and not right:
            host = socket.gethostname()
            return f"{variable}={shown(given)} names no interface of {host}: {', '.join(present)}"
    return ""


def use_loopback() -> None:
    """Let gloo and NCCL connect the ranks of one machine over loopback, whatever the environment
    says."""
    if name := _interface(LOOPBACK):
        os.environ.update({GLOO_INTERFACE: name, NCCL_INTERFACE: f"={name}"})


def _machine() -> tuple[str, int]:
    """Return an identity that is equal for processes that reach each other over loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.stat("/proc/self/ns/net").st_ino


def _interface(address: str) -> str | None:
    """Return the name of this host's interface with the address, or None."""
    for name, entries in psutil.net_if_addrs().items():
        if address in (entry.address.partition("%")[0] for entry in entries):
            return name
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def current_agent() -> str | None:
    """Return the torchrun agent that started this process (host, pid, start time), or None."""
    agent = psutil.Process().parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return agent and f"{socket.gethostname()} {agent.pid} {agent.create_time()}"


def standalone_note(process: Process) -> list[str]:
    """Return how to start the same run safely, if `torchrun --standalone` started this process."""
    agent = psutil.Process().parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
    with contextlib.suppress(psutil.Error):
        if agent and "--standalone" in agent.cmdline():
            words = ["python", *sys.argv, "--num_gpus", str(process.world_size)]
            why = "torchrun --standalone listens on all interfaces and runs pickles that it gets"
            return [f"{why}; this does not: {shlex.join(words)}"]
    return []


def agree_on_plan(
    config: Request, process: Process, ask: agree.Ask, agent: str | None = None
) -> Plan:
    """Make the plan on rank 0 and return it on all ranks. Raises rank 0's UserError on all
    ranks, and if ranks have different settings or code. A run that this process's `agent` began
    is continued. Collective."""
    typed = config.to_user_words()
    del typed["output_dir"]  # checkouts may be in different folders
    agree.check_ranks_agree({**typed, **versions(), **code()}, ask)
    launchers = sorted(set(ask(agent))) if agent else []

    def make() -> Plan:
        cluster = this_machine(detect_machine(), process.world_size, process.local_world_size)
        going_on, notes = go_on(config, launchers, process.world_size)
        plan = make_plan(going_on, cluster, plan_data.read_data)
        return run_dir.reserve_run_dir(plan, launchers, [*notes, *standalone_note(process)])

    return run_dir.plan_from_text(ask(run_dir.plan_as_text(make) if process.rank == 0 else "")[0])


def go_on(
    config: Request, launchers: Iterable[str], num_processes: int
) -> tuple[Request, list[str]]:
    """Return CONFIG to continue, with `num_processes`, the run that one of `launchers` began,
    from its last checkpoint, and a note. Without such a run CONFIG is unchanged."""
    begun = None
    files = Path(config.output_dir).glob(f"*/{PLAN_FILE}") if launchers else ()
    for file in sorted(files):
        with contextlib.suppress(OSError, ValueError):
            if set(launchers).intersection(json.loads(file.read_bytes()).get("launchers", ())):
                begun = file.parent.resolve()  # the newest
    if begun is None:
        return config, []
    before = load_plan(begun)
    saved, note = run_dir.started_again(before)
    if saved:
        config = with_values(config, resume=str(saved))
    notes = [note]
    config = share_batch(config, before, num_processes, notes)
    return config, ["; ".join(notes)]


def check_disks(plan: Plan, process: Process) -> None:
    """Check that all nodes have the run's folder: a shared one or, with shared_disk=False, their
    own, with the files of the checkpoint to resume from. Raises UserError on every rank if not.
    Collective."""
    leads = process.local_rank == 0
    who = f"rank {process.rank} on {socket.gethostname()}"
    mark = plan.run_dir / agree.from_rank_0(f".disk-{uuid.uuid4().hex}")
    try:
        with agree.failing_together():
            if leads and plan.own_disks:
                _make_folder(plan, mark, who)
            elif leads:
                _see_folder(plan, who)
    finally:
        if leads:
            mark.unlink(missing_ok=True)
    if plan.own_disks and plan.checkpoint is not None:
        mine = resume.read_meta(plan.checkpoint) if process.rank == 0 else None
        host, values = agree.from_rank_0((socket.gethostname(), mine and mine.model_dump()))
        meta = resume.Meta(**values)
        meta.hosts = meta.hosts or dict.fromkeys(meta.files, host)
        with agree.failing_together():
            if leads and process.rank:  # the node that planned has read them
                resume.check_files(plan.checkpoint, meta, plan, process.rank)


def _see_folder(plan: Plan, who: str) -> None:
    """Wait until this node sees the shared folder of the run, in which rank 0 has written the
    plan."""
    fix = "set output_dir to a folder on a disk that all nodes share, or shared_disk to False"
    end = time.monotonic() + SHARED_WITHIN_S
    while not (plan.run_dir / PLAN_FILE).is_file():
        if time.monotonic() > end:
            what = f"{who} does not see {plan.run_dir}, which rank 0 has made"
            raise UserError(what, "a run is saved into one folder", fix)
        time.sleep(0.2)


def _make_folder(plan: Plan, mark: Path, who: str) -> None:
    """Make this node's own folder of the run and write the plan into it."""
    try:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)  # fails for all but the first of the nodes that share a disk
        run_dir.write_plan(plan)
    except FileExistsError:
        what = f"{who} sees another node's {plan.run_dir}"
        raise UserError(what, "with shared_disk=False each has its own", "set it to True") from None
    except OSError as error:
        what = f"{who} cannot make {plan.run_dir}"
        raise UserError(what, str(error.strerror), "set output_dir elsewhere") from None
