"""Test the commands that a run prints for the user."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed_training.supervise import commands


@pytest.mark.parametrize(
    ("typed", "changes", "expected"),
    [
        ("--strategy zero2 --num_gpus 2", {"resume": "runs/a"},
         "--strategy zero2 --num_gpus 2 --resume=runs/a"),
        ("--resume_from_checkpoint old --epochs=3", {"resume": "runs/a"},
         "--epochs=3 --resume=runs/a"),
        ("--num-train-epochs 3 --dataset 'my notes.txt'", {"epochs": 6},
         "--dataset 'my notes.txt' --epochs=6"),
        ("--set epochs=1 resume=auto lr=1e-3", {"epochs": 2}, "--set lr=1e-3 --epochs=2"),
        ("--set epochs=1 --set resume=auto --set lr=1e-3 --set resume=a", {"epochs": 2},
         "--set lr=1e-3 --epochs=2"),
        ("train --preset words", {"max_steps": 8}, "train --preset words --max_steps=8"),
    ],
)  # fmt: skip
def test_command_that_repeats_a_run_with_other_values(typed, changes, expected):
    plan = SimpleNamespace(command=f"python real_model_example.py {typed}")
    assert (
        commands.build_repeat_command(plan, **changes) == f"python real_model_example.py {expected}"
    )


@pytest.mark.parametrize(
    ("resume", "max_steps", "expected"),
    [
        (None, -1, "--epochs=4"),
        (None, 1200, "--epochs=4"),  # a preset's limit, which the epochs do not reach
        (None, 45, "--max_steps=90"),
        ("runs/a", -1, "--epochs=4 --resume=runs/a"),
    ],
)
def test_the_command_that_trains_longer(resume, max_steps, expected, monkeypatch):
    monkeypatch.setattr(commands, "best_if_overfitted", lambda record: None)
    typed = f" --resume {resume}" if resume else ""
    plan = SimpleNamespace(
        command=f"python real_model_example.py{typed}",
        config=SimpleNamespace(generate=None, epochs=2, max_steps=max_steps),
        num_steps=45,
        requested=SimpleNamespace(resume=resume),
        run_dir=Path("runs/a"), output_dir=Path("runs"), num_processes=1,
    )  # fmt: skip
    finished = SimpleNamespace(best=None, step=45, num_steps=45)
    *_, longer = commands.suggest_commands(plan, finished).values()
    assert longer == f"python real_model_example.py {expected}"
    stopped_early = SimpleNamespace(best=None, step=30, num_steps=45)
    assert list(commands.suggest_commands(plan, stopped_early)) == ["compare runs"]


def test_under_a_launcher_the_resume_option_is_printed():
    plan = SimpleNamespace(run_dir=Path("runs/a"), num_processes=2)
    assert commands.build_continue_command(plan)[1] == "--resume runs/a"
