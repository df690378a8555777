import dataclasses
import json
import shlex
import signal
import sys
from types import SimpleNamespace

import pytest

from distributed_training import launch
from distributed_training.config import build_config
from distributed_training.errors import UserError
from distributed_training.launch import Process
from distributed_training.plan import make_plan
from distributed_training.record import LOST, load_record, start_record
from tests.unit.conftest import CPU_MACHINE, GPU_MACHINE, refused

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}


def parse(*argv):
    return launch.parse_arguments(list(argv), "about")


def plan_for(tmp_path, **config):
    built = build_config({"model": "gpt2-tiny", "output_dir": str(tmp_path / "runs"), **config})
    return make_plan(built, CPU_MACHINE, num_processes=2, processes_here=2)


def test_short_forms_come_last():
    arguments = parse("--strategy", "dp", "--set", "strategy=zero1", "--set", "a=b", "--model", "m")
    assert launch.overrides(arguments) == ["strategy=zero1", "a=b", "strategy=dp", "model=m"]
    assert launch.overrides(parse()) == []


@pytest.mark.parametrize("argv", [["--unknown"], ["--strat", "dp"], ["extra"], ["--set"]])
def test_usage_errors_are_one_line(argv):
    with pytest.raises(UserError, match=r"--help|did you mean") as caught:
        parse(*argv)
    assert caught.value.exit_code == 2


def test_help_lists_the_strategies(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    assert "dp, zero1, zero2, zero3, offload, infinity, fsdp" in " ".join(
        capsys.readouterr().out.split()
    )


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
        (None, GPU_MACHINE, {}, None),
        ("3", CPU_MACHINE, {}, 3),
        ("all", GPU_MACHINE, {}, 4),
        ("all", CPU_MACHINE, {"dp_shard": -1}, 2),
        ("all", CPU_MACHINE, {"pp": 2, "dp_shard": -1, "tp": 2}, 4),
        ("all", CPU_MACHINE, {"tp": 3, "dp_shard": -1}, 3),
    ],
)
def test_number_of_processes(text, machine, mesh, count):
    assert launch.requested_processes(text, machine, mesh) == count


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5", "²"])
def test_a_number_of_processes_that_is_none(text):
    with refused(f"--num_gpus {text!r}", "positive number or all"):
        launch.requested_processes(text, CPU_MACHINE, {})


def test_the_launcher_must_deliver():
    process = Process(rank=0, world_size=4, local_rank=0, local_world_size=4)
    launch.check_world_size(None, process, GPU_MACHINE)
    launch.check_world_size(4, process, GPU_MACHINE)
    with refused("--num_gpus 8", "started 4"):
        launch.check_world_size(8, process, GPU_MACHINE)
    fifth = Process(rank=4, world_size=5, local_rank=4, local_world_size=5)
    launch.check_world_size(None, fifth, CPU_MACHINE)
    with refused("5 processes", "4 GPUs", "start 4"):
        launch.check_world_size(None, fifth, GPU_MACHINE)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_torchrun_starts_every_strategy(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_for(tmp_path, strategy=strategy)
    script, arguments = str(tmp_path / "x.py"), ["--set", "generate=two words"]
    command, shown = launch.launch_command(plan, script, arguments)
    assert command == [
        sys.executable, str(launch.TORCHRUN), str(plan.run_dir / launch.KILLED_FILE),
        "--standalone", "--nproc_per_node=2", script, *arguments, "--run_dir", str(plan.run_dir),
    ]  # fmt: skip
    assert shown == "torchrun --standalone --nproc_per_node=2 x.py --set 'generate=two words'"
    assert shlex.split(shown)[-2:] == arguments
    alone = dataclasses.replace(plan, num_processes=1)  # starts nothing
    _, shown = launch.launch_command(alone, script, arguments)
    assert shown == "python x.py --set 'generate=two words'"


def test_described_plan_shows_what_was_resolved(tmp_path):
    text = launch.describe_plan(plan_for(tmp_path, batch_size=3, grad_accum_steps=5), "the command")
    assert "'fp32'    (was 'auto')" in text
    assert "global 30 = micro 3 x accum 5 x data-parallel 2" in text
    assert "the command" in text
    assert '"train_micro_batch_size_per_gpu": 3' in text
    native = launch.describe_plan(plan_for(tmp_path, strategy="fsdp"), "c")
    assert "DeepSpeed JSON" not in native
    assert "mesh (from strategies/7_fsdp/config.json): dp_shard 2" in native


@pytest.fixture
def _environment(monkeypatch):
    """What prepare_environment sets is undone afterwards."""
    for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.mark.usefixtures("_environment")
def test_cpu_processes_share_the_cores(monkeypatch):
    import os

    launch.prepare_environment(CPU_MACHINE, 1)
    assert (os.environ["DS_ACCELERATOR"], os.environ["OMP_NUM_THREADS"]) == ("cpu", "2")
    monkeypatch.delenv("OMP_NUM_THREADS")
    launch.prepare_environment(CPU_MACHINE, 4)
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.usefixtures("_environment")
def test_architecture_is_one_that_deepspeeds_builder_reads(monkeypatch):
    import os

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a")
    launch.prepare_environment(GPU_MACHINE, 4)
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert "DS_ACCELERATOR" not in os.environ


def spawn(code, run_dir, offload_dir=None):
    plan = SimpleNamespace(run_dir=run_dir, offload_dir=offload_dir)
    return launch.spawn([sys.executable, "-c", code], plan)


@pytest.mark.parametrize("code", [0, 2, 7])
def test_exit_code_of_a_launcher_that_left_no_record(code, tmp_path):
    assert spawn(f"raise SystemExit({code})", tmp_path) == code


def test_a_killed_launcher_is_128_and_the_signal(tmp_path):
    assert spawn("import os; os.kill(os.getpid(), 9)", tmp_path) == 128 + signal.SIGKILL


def writes_record(run_dir):
    """Code of a child that comes to writing the record that is there."""
    return f"import os; os.utime({str(run_dir / 'record.json')!r}); "


def test_a_process_that_ended_without_a_word_is_recorded(tmp_path, capsys):
    start_record(tmp_path)
    assert spawn(writes_record(tmp_path) + "os.kill(os.getpid(), 9)", tmp_path) == 1
    record = load_record(tmp_path)
    assert record["status"] == "failed"
    assert "memory" in record["error"]
    assert "exit code -9" in capsys.readouterr().err


def test_an_earlier_starts_note_is_not_this_ones(tmp_path):
    start_record(tmp_path)
    (tmp_path / launch.KILLED_FILE).write_text('{"ranks": [0], "signal": "SIGSEGV"}')
    assert spawn(writes_record(tmp_path) + "raise SystemExit(1)", tmp_path) == 1
    assert "without a word" in load_record(tmp_path)["error"]


def test_whom_the_launcher_saw_killed_is_the_cause(tmp_path, capsys):
    """And its note is gone afterwards."""
    start_record(tmp_path).update(status="failed", error=f"rank 0 {LOST}: closed")
    note = tmp_path / launch.KILLED_FILE
    text = json.dumps({"ranks": [1, 3], "signal": "SIGKILL"})
    child = f"open({str(note)!r}, 'w').write({text!r}); raise SystemExit(1)"
    assert spawn(writes_record(tmp_path) + child, tmp_path) == 1
    reason = "rank 1, 3: killed by SIGKILL; most often memory ran out"
    assert load_record(tmp_path)["error"] == reason
    assert capsys.readouterr().err == f"failed: {reason}\n"
    assert not note.exists()


@pytest.mark.parametrize(
    ("status", "child", "code"),
    [("ok", 0, 0), ("interrupted", 1, 130), ("failed", 0, 1), ("oom", 1, 1)],
)
def test_exit_code_follows_the_record(status, child, code, tmp_path):
    start_record(tmp_path).update(status=status)
    assert spawn(writes_record(tmp_path) + f"raise SystemExit({child})", tmp_path) == code
    assert load_record(tmp_path)["status"] == status


def test_the_record_of_an_earlier_attempt_does_not_count(tmp_path):
    start_record(tmp_path).update(status="interrupted")
    assert spawn("raise SystemExit(2)", tmp_path) == 2


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


def test_a_free_port_can_be_bound():
    import socket

    port = launch.free_port()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_a_number_of_processes_that_python_cannot_read():
    with refused("--num_gpus"):
        launch.requested_processes("9" * 5000, CPU_MACHINE, {})
    with refused("--num_gpus"):
        launch.requested_processes("1" * 10, CPU_MACHINE, {})
    assert launch.requested_processes("1" * 9, CPU_MACHINE, {}) == 111_111_111
