"""Test the command line: options for every key, commands, hints, and which processes plan, print
and train."""

import json
import re
import sys
from pathlib import Path

import pytest

import real_model_example
from distributed_training import cli
from distributed_training.plan.plan import Plan
from distributed_training.settings.config import KEYS
from distributed_training.settings.keys import Parser
from distributed_training.settings.strategies import list_strategies
from distributed_training.start import launch
from distributed_training.supervise.process import Process
from tests.conftest import ROOT, light_pool
from tests.settings.test_config import OTHER
from tests.support import CPU_MACHINE, GPU_MACHINE, refused, small_text

SCRIPT = Path(real_model_example.__file__).resolve()


def parse(argv):
    parser = Parser()
    cli.add_keys(parser)
    return cli.read_options(parser, argv)


def overrides(*argv):
    return parse([str(word) for word in argv]).overrides


@pytest.mark.parametrize("name", KEYS)
def test_every_key_is_an_option(name):
    value, dashed = OTHER[name], name.replace("_", "-")
    for argv in ([f"--{name}={value}"], [f"--{dashed}={value}"], [f"--{name}", value]):
        assert overrides(*argv) == {name: str(value)}


def test_the_last_of_several_options_counts():
    argv = ("--strategy", "dp", "--strategy=tp", "--seed=1", "--seed", "3")
    assert overrides(*argv) == {"strategy": "tp", "seed": "3"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--stratgy", "dp"], ["'--stratgy'", " strategy?"]),
        (["--temperature", "1"], ["'--temperature'", "--help"]),
        (["--fp16"], ["'--fp16'", "--precision fp16"]),
        (["--per_device_train_batch_size=8"], ["Use --batch_size"]),
        (["--max-step=1"], ["'--max-step=1'", " max_steps?"]),
        (["--zzzz"], ["See --help"]),
        (["--seed"], ["--seed", "See --help"]),
        (["--seed", "1", "extra"], ["'extra'"]),
    ],
)
def test_unknown_options_are_refused_with_the_nearest_option(argv, words):
    with refused(*words):
        parse(argv)


def test_options_of_other_programs_give_advice_that_is_accepted():
    table = json.loads((ROOT / "distributed_training/settings/foreign.json").read_text())
    assert list(table) == sorted(table)
    assert not KEYS.keys() & table
    for advice in table.values():
        named = re.findall(r"--(\w+)", advice)
        assert set(named) <= {*KEYS, "num_gpus"}
        other_advice = (
            "leave it out, ",
            "set CUDA_VISIBLE_DEVICES",
            "use generate",
            "use hf upload",
        )
        assert named or advice.startswith(other_advice)


@pytest.mark.processes
def test_help_is_complete_grouped_and_narrow():
    answer = light_pool().script(["--help", "all"], COLUMNS="80")
    lines = answer.stdout.splitlines()
    text = " ".join(answer.stdout.split()).replace("- ", "-")  # argparse breaks lines at hyphens
    assert [line for line in lines if len(line) > 80] == []
    for name, key in KEYS.items():
        assert f"  --{name} " in answer.stdout
        assert f"{key.group}:" in lines
        assert f"default {key.default!r})" in text
        for choice in key.choices if any("enum" in schema for schema in key.schemas) else ():
            assert choice in text
    assert ", ".join(list_strategies()) in text
    for option in ("--preset", "--num_gpus", "--dry-run"):
        assert f"  {option}" in answer.stdout


@pytest.mark.processes
def test_the_first_help_is_one_page_with_all_commands():
    lines = light_pool().script(["--help"]).stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[4 : 4 + len(cli.COMMANDS)]] == list(cli.COMMANDS)
    assert "--help all" in lines[-1]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the script in this process, up to the start of training, as if on
    the given machine."""
    monkeypatch.setattr(launch, "prepare_environment", lambda *_: None)
    monkeypatch.setattr(launch, "single_process", lambda: rank_process(0, 1, local_world_size=1))

    parts = []

    def run_part(given, process, *_):
        parts.append(("planned" if isinstance(given, Plan) else "launched", given, process))
        return 0

    monkeypatch.setattr("distributed_training.start.worker.run", run_part)
    monkeypatch.setattr("distributed_training.start.launched.run", run_part)

    def call(*argv, machine=CPU_MACHINE, process=None):
        argv = [
            "--strategy", "dp", "--model", "gpt2-tiny", "--output_dir", tmp_path / "runs",
            f"--dataset={small_text()}", "--num_samples=4", *argv,
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, argv)])
        monkeypatch.setattr("distributed_training.start.local.detect_machine", lambda: machine)
        monkeypatch.setattr(launch, "current_process", lambda: process)
        code = real_model_example.main()
        return parts.pop() if parts else code

    return call


def rank_process(rank, world_size=2, local_world_size=2):
    return Process(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size,
        local_world_size=local_world_size,
    )


def test_a_dry_run_under_a_launcher_is_printed_once_and_trains_nothing(run, tmp_path, capsys):
    assert run("--dry-run", process=rank_process(0)) == 0
    out = capsys.readouterr().out
    assert "launch command" in out
    assert "2 replicas" in out
    assert run("--dry_run", process=rank_process(1)) == 0
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    assert run("--num_gpus", "3", process=rank_process(0)) == 2
    assert "--num_gpus" in capsys.readouterr().err
    # On several machines, the option is the number of processes per machine.
    assert (
        run("--dry-run", machine=GPU_MACHINE, process=rank_process(0, 8, local_world_size=4)) == 0
    )
    assert "8 replicas" in capsys.readouterr().out


def test_ctrl_c_before_training(run, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "start", interrupt)
    assert run() == 130
    assert capsys.readouterr().err.startswith("interrupted")


def test_an_unknown_error_keeps_its_traceback(run, monkeypatch):
    def fail(*_, **__):
        raise IndexError("bad index: 1")

    monkeypatch.setattr(launch, "start", fail)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(IndexError, match="bad index: 1"):
        run()


def test_one_process_trains_alone_and_reports_idle_gpus(run, capsys):
    kind, plan, process = run()
    assert (kind, plan.machine, process) == (
        "planned",
        CPU_MACHINE,
        rank_process(0, 1, local_world_size=1),
    )
    first = "planning the run and importing torch ...\n"
    assert capsys.readouterr().out == first
    assert run(machine=GPU_MACHINE)[1].num_processes == 1
    assert (
        capsys.readouterr().out
        == f"{first}note: this run uses 1 of 4 GPUs. To use all GPUs, add --num_gpus all.\n"
    )


def test_output_dir_of_config_is_relative_to_the_script(monkeypatch, tmp_path):
    def planned(config, *typed):
        monkeypatch.setattr(sys, "argv", ["script.py", *typed])
        return cli.main(config, "about", str(tmp_path / "script.py"))

    monkeypatch.setattr(launch, "start", lambda config, *_: config)
    assert planned({"output_dir": "here"}).output_dir == str(tmp_path / "here")
    assert planned({"output_dir": "here"}, "--output_dir", "there").output_dir == "there"
    assert planned({}).output_dir == str(tmp_path / "runs")


@pytest.mark.parametrize(
    ("platform", "argv", "words"),
    [
        ("linux", ["reprt"], ["'reprt'", "report"]),
        ("linux", ["zzzz"], ["Options begin with --", "See --help"]),
        ("linux", ["generate", "runs/latest", "--num_tokens", "0"], ["--num_tokens", "'0'"]),
        ("linux", ["key.json"], ["'key.json'", "--dataset key.json"]),
        ("linux", ["train", "key.json"], ["'key.json'", "--dataset key.json"]),
        ("darwin", ["train"], ["darwin", "WSL 2"]),
        ("linux", ["--preset", "key.json"], ["key.json", "'epoch'", "epochs"]),
        ("linux", ["--output_dir", "key.json"], ["key.json"]),
        ("linux", ["--tokenizer", "none"], ["tokenizer=", "vocab.json"]),
    ],
)
def test_startup_errors_are_one_line_and_create_no_files(
    platform, argv, words, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key.json").write_text('{"epoch": 2}')
    monkeypatch.setattr(sys, "platform", platform)
    if argv[0].startswith("-"):
        argv = ["--dataset", str(small_text()), "--output_dir", "runs", *argv]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *argv])
    assert real_model_example.main() == 2
    err = capsys.readouterr().err
    assert (err[:7], err.count("\n")) == ("error: ", 1)
    assert [word for word in words if word not in err] == []
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]
