import dataclasses
import importlib
import os
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from distributed_training.records.record import LOST, load_state, start_record
from distributed_training.run import launch
from distributed_training.run.launch import Process
from distributed_training.run.start import describe_plan
from tests.support import CPU_MACHINE, GPU_MACHINE, refused, small_plan

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}


@pytest.mark.parametrize("environment", [TORCHRUN, DEEPSPEED])
def test_both_launchers_are_understood(environment):
    expected = Process(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert launch.current_process(environment) == expected
    assert launch.current_process({}) is None


@pytest.mark.parametrize(
    "environment", [{"RANK": "0"}, {**TORCHRUN, "WORLD_SIZE": "x"}, {**TORCHRUN, "RANK": ""}]
)
def test_half_an_environment_is_refused(environment):
    with refused("RANK is set", "unset RANK"):
        launch.current_process(environment)


@pytest.mark.parametrize(
    ("text", "machine", "mesh", "count"),
    [
        (None, GPU_MACHINE, {}, 1),
        ("3", CPU_MACHINE, {}, 3),
        ("all", GPU_MACHINE, {}, 4),
        ("all", CPU_MACHINE, {"dp_shard": -1}, 2),
        ("all", CPU_MACHINE, {"pp": 2, "dp_shard": -1, "tp": 2}, 4),
        ("all", CPU_MACHINE, {"tp": 3, "dp_shard": -1}, 3),
    ],
)
def test_number_of_processes(text, machine, mesh, count):
    assert launch.requested_processes(text, machine, mesh) == count


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5"])
def test_a_number_of_processes_that_is_none(text):
    with refused(f"--num_gpus {text!r}", "positive number or all"):
        launch.requested_processes(text, CPU_MACHINE, {})


def test_the_launcher_must_deliver():
    process = Process(rank=0, world_size=4, local_rank=0, local_world_size=4)
    for asked in (None, "4", "all"):
        launch.check_world_size(asked, process)
    with refused("--num_gpus 8", "started 4"):
        launch.check_world_size("8", process)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_torchrun_starts_every_strategy(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = small_plan(tmp_path, num_processes=2, strategy=strategy)
    script, arguments = str(tmp_path / "x.py"), ["--set", "generate=two words"]
    assert launch.launch_command(plan, script) == [
        sys.executable, str(launch.TORCHRUN), str(plan.run_dir / launch.KILLED_FILE),
        "--standalone", "--nproc_per_node=2", script, "--run_dir", str(plan.run_dir),
    ]  # fmt: skip
    typed = "x.py --set 'generate=two words'"
    torchrun = f"torchrun --standalone --nproc_per_node=2 {typed}"
    assert launch.typed_command(plan, script, arguments) == torchrun
    plan = dataclasses.replace(plan, num_processes=1)
    assert launch.typed_command(plan, script, arguments) == f"python {typed}"


def test_described_plan_shows_what_was_resolved(tmp_path):
    config = {"batch_size": 3, "grad_accum_steps": 5}
    plan = small_plan(tmp_path, num_processes=2, strategy="zero2", **config)
    text = describe_plan(plan, "the command")
    assert "'fp32'    (was 'auto')" in text
    assert f"batch: {plan.batch.describe()}\n" in text
    assert "launch command\n  the command\n" in text
    micro = plan.batch.micro_batch_size
    assert f'"train_micro_batch_size_per_gpu": {micro}' in text
    native = describe_plan(small_plan(tmp_path, num_processes=2, strategy="fsdp"), "c")
    assert "DeepSpeed JSON" not in native
    assert "mesh (from strategies/7_fsdp/config.json): dp_shard 2" in native
    stages = describe_plan(small_plan(tmp_path, num_processes=2, strategy="pp", **config), "c")
    assert "blocks a stage 1, 1" in stages


@pytest.fixture
def _environment(monkeypatch):
    """What prepare_environment sets is undone afterwards."""
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize(
    ("given", "processes", "threads"),
    [(None, 1, "6"), (None, 4, "1"), (None, 9, "1"), ("5", 2, "5")],
)
def test_processes_share_the_cores(given, processes, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    launch.prepare_environment(processes)
    assert os.environ["OMP_NUM_THREADS"] == threads
    assert os.environ["PATH"] == f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"  # ninja's


def spawn(code, run_dir, offload_dir=None):
    plan = SimpleNamespace(run_dir=run_dir, offload_dir=offload_dir)
    return launch.spawn([sys.executable, "-c", code], plan)


@pytest.mark.parametrize(
    ("child", "code"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ],
)
@pytest.mark.parametrize("earlier", [False, True])
def test_exit_code_of_a_launcher_that_left_no_record(child, code, earlier, tmp_path):
    if earlier:  # the record of another attempt does not count
        start_record(tmp_path).update(status="interrupted")
    assert spawn(child, tmp_path) == code


def writes_record(run_dir):
    """Code of a child that comes to writing the record that is there."""
    return f"import os; os.utime({str(run_dir / 'record.json')!r}); "


def test_a_process_that_ended_without_a_message_is_recorded(tmp_path, capsys):
    start_record(tmp_path)
    assert spawn(writes_record(tmp_path) + "os.kill(os.getpid(), 9)", tmp_path) == 1
    state = load_state(tmp_path)
    assert state.status == "failed"
    assert "memory" in state.error
    assert "exit code -9" in capsys.readouterr().err


def test_an_earlier_starts_note_is_not_this_ones(tmp_path):
    start_record(tmp_path)
    (tmp_path / launch.KILLED_FILE).write_text("rank 0: killed by SIGSEGV")
    assert spawn(writes_record(tmp_path) + "raise SystemExit(1)", tmp_path) == 1
    assert "without a message" in load_state(tmp_path).error


def test_whom_the_launcher_saw_killed_is_the_cause(tmp_path, capsys):
    """And its note is gone afterwards."""
    start_record(tmp_path).update(status="failed", error=f"rank 0 {LOST}: closed")
    note = tmp_path / launch.KILLED_FILE
    reason = "rank 1, 3: killed by SIGKILL; most often memory ran out"
    child = f"open({str(note)!r}, 'w').write({reason!r}); raise SystemExit(1)"
    assert spawn(writes_record(tmp_path) + child, tmp_path) == 1
    assert load_state(tmp_path).error == reason
    assert capsys.readouterr().err == f"failed: {reason}\n"
    assert not note.exists()


@pytest.mark.parametrize(
    ("status", "child", "code"),
    [("ok", 0, 0), ("interrupted", 1, 130), ("failed", 0, 1), ("oom", 1, 1)],
)
def test_exit_code_follows_the_record(status, child, code, tmp_path):
    start_record(tmp_path).update(status=status)
    assert spawn(writes_record(tmp_path) + f"raise SystemExit({child})", tmp_path) == code
    assert load_state(tmp_path).status == status


@pytest.mark.parametrize("child", ["pass", "raise SystemExit(7)", "os.kill(os.getpid(), 9)"])
def test_files_of_offload_do_not_outlive_the_run(child, tmp_path):
    mine, others = tmp_path / "offload" / "mine", tmp_path / "offload" / "others"
    others.mkdir(parents=True)
    spawn(f"import os; os.makedirs({str(mine / 'rank0')!r}); {child}", tmp_path, mine)
    assert list(mine.parent.iterdir()) == [others]
    spawn(child, tmp_path, mine)  # a run that made none


def test_signals_are_as_before_afterwards(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    spawn("pass", tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_one_process_is_a_launchers_only_one(monkeypatch):
    environment = {}
    monkeypatch.setattr(os, "environ", environment)
    assert launch.single_process() == launch.current_process(environment)
    with socket.create_server(("127.0.0.1", int(environment["MASTER_PORT"]))):
        pass  # nobody listens there


@pytest.mark.parametrize(
    ("signals", "said"),
    [
        ({3: "SIGKILL", 1: "SIGKILL", 0: "SIGTERM"}, "rank 1, 3: killed by SIGKILL; most often"),
        ({2: "SIGSEGV", 0: "<N/A>"}, "rank 2: killed by SIGSEGV"),
        ({0: "<N/A>", 1: "SIGTERM"}, None),  # failed by itself, and was ended by torchrun
    ],
)
def test_torchrun_notes_who_was_killed(signals, said, tmp_path, monkeypatch):
    failures = {rank: SimpleNamespace(signal_name=lambda name=name: name)
                for rank, name in signals.items()}  # fmt: skip

    def fail(_):
        error = ChildFailedError.__new__(ChildFailedError)
        error.failures = failures
        raise error

    monkeypatch.setattr(sys, "path", list(sys.path))  # it changes the first
    torchrun = importlib.import_module("distributed_training.run.torchrun")
    monkeypatch.setattr(torchrun.run, "main", fail)
    monkeypatch.setattr(sys, "argv", ["torchrun.py", str(tmp_path / ".killed")])
    with pytest.raises(ChildFailedError):
        torchrun.main()
    if said is None:
        assert list(tmp_path.iterdir()) == []
    else:
        assert (tmp_path / ".killed").read_text().startswith(said)
