"""Test which processes plan, print and train, and how a run ends."""

import importlib.metadata
import os
import signal
import socket
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from distributed_training.records.record import load_record
from distributed_training.settings import detect
from distributed_training.start import launch, local, rendezvous, run_dir, worker
from distributed_training.start.ranks import RanksOutcome, current_process, single_process
from distributed_training.supervise.process import Process
from tests.conftest import SCRIPT, SMALL, heavy_pool, only_record, settings
from tests.planner.helpers import plan_for
from tests.pool import run_script
from tests.support import CPU_MACHINE, GPU_MACHINE, edit_json, refused, start_test_record


def test_number_of_processes():
    for text, on, mesh, count in (
        (None, GPU_MACHINE, {}, 1),
        ("3", CPU_MACHINE, {}, 3),
        ("all", GPU_MACHINE, {}, 4),
        ("all", CPU_MACHINE, {"dp_shard": -1}, 2),
        ("all", CPU_MACHINE, {"pp": 2, "dp_shard": -1, "tp": 2}, 4),
        ("all", CPU_MACHINE, {"tp": 3, "dp_shard": -1}, 3),
    ):
        assert local.requested_processes(text, on, mesh) == count
    for wrong in ("0", "two", "1.5", "10000"):
        with refused(f"--num_gpus {wrong!r}", "all"):
            local.requested_processes(wrong, CPU_MACHINE, {})


def test_processes_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    for given, processes, threads in (
        ({}, 4, "1"), ({}, 2, "3"), ({"OMP_NUM_THREADS": "5"}, 2, "5")
    ):  # fmt: skip
        monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin:/bin", **given})
        launch.prepare_environment(processes)
        assert os.environ["OMP_NUM_THREADS"] == threads
        assert os.environ["PATH"] == f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"  # for ninja


SUCCEEDED = {0: 0, 1: 0}
KILLED = {1: -signal.SIGKILL}


@pytest.fixture
def spawn(tmp_path, monkeypatch):
    """Return a function that calls spawn() with fake ranks, which end with the given exit codes."""

    def call(codes, *, signum=0):
        def run_ranks(command, count, monitor):
            assert (command[:2], count) == (["x.py", str(tmp_path)], 2)
            return RanksOutcome(signum=signum, codes=codes)

        monkeypatch.setattr(launch, "run_ranks", run_ranks)
        config = SimpleNamespace(hang_timeout_s=None)
        plan = SimpleNamespace(
            run_dir=tmp_path, offload_dir=None, config=config, num_processes=2, notes=()
        )
        return launch.spawn(plan, ["x.py"])

    return call


def test_exit_code_of_processes_without_a_record(spawn):
    for codes, signum, code in ((SUCCEEDED, 0, 0), ({0: 2}, 0, 2), ({}, signal.SIGTERM, 143)):
        assert spawn(codes, signum=signum) == code


@pytest.mark.parametrize(
    ("status", "codes", "code", "message"),
    [
        ("running", {0: 1}, 1, "failed: a process ended without an error message"),
        ("ok", SUCCEEDED, 0, ""),
        ("ok", KILLED, 0, "note: after the run had finished: rank 1 was killed by SIGKILL"),
        ("ok", {0: 1}, 0, "note: after the run had finished: a process failed"),
    ],
)
def test_record_shows_how_the_ranks_ended(status, codes, code, message, spawn, tmp_path, capsys):
    start_test_record(tmp_path).update(status=status)
    assert spawn(codes) == code
    printed = capsys.readouterr().err
    assert printed.startswith(message)
    assert bool(printed) == bool(message)
    state = load_record(tmp_path)
    assert state.status == ("failed" if status == "running" else status)
    if status == "running":
        assert printed == f"failed: {state.error}\n"
    if status == "ok" and codes == KILLED:
        assert spawn({}, signum=signal.SIGTERM) == 0, "a job must not start it again"


def test_a_single_process_equals_a_launcher_with_one_process(monkeypatch):
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "eth7"})
    process = single_process()
    assert process == current_process()
    store = worker.open_store(process, 60)
    with worker.process_group(torch.device("cpu"), store):
        ends = psutil.Process().net_connections("inet")
        assert {end.laddr.ip for end in ends if end.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_an_address_that_cannot_be_used_is_named(host, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {
            "RANK": 0,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, str(value))
        first = Process(rank=0, world_size=2, local_rank=0, local_world_size=1)
        with refused(f"{host}:{port}", "rank 0"):
            rendezvous.connect_ranks(first, 1)


def run_without_planning(run_dir):
    """Start a planned run after removing all planning functions. Call this function only in a
    separate process."""
    launch.make_plan = detect.detect_machine = None
    launch.run_planned_rank(str(run_dir))


def test_a_process_follows_plan_json_without_planning(tmp_path):
    plan = plan_for(tmp_path, CPU_MACHINE, 1, **SMALL, strategy="dp", max_steps=9)
    plan = run_dir.reserve_run_dir(plan)
    edit_json(plan.run_dir / "plan.json", num_steps=1)
    heavy_pool().call("tests.start.test_launch:run_without_planning", plan.run_dir, num_processes=1)
    assert only_record(tmp_path / "runs")["num_steps"] == 1


def run_without_deepspeed(arguments):
    """Run the script as if DeepSpeed were not installed. Call this function only in a separate
    process."""
    find_version = importlib.metadata.version

    def version(package):
        if package == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(package)
        return find_version(package)

    importlib.metadata.version = version
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        sys.modules[name] = None
    run_script(*arguments)


def test_native_strategies_train_without_deepspeed_installed(tmp_path):
    values = {**SMALL, "strategy": "fsdp", "max_steps": 2, "output_dir": tmp_path}
    arguments = [str(SCRIPT), *settings(values)]
    function = "tests.start.test_launch:run_without_deepspeed"
    heavy_pool().call(function, arguments, num_processes=1)
    assert "deepspeed" not in only_record(tmp_path)["versions"]
