"""Test how runs end."""

from pathlib import Path
from types import SimpleNamespace

from distributed_training.supervise import ending


def test_the_command_that_continues_a_run_is_the_same_command_with_resume(monkeypatch):
    monkeypatch.setattr(ending, "list_checkpoints", lambda _: ["step-00000001"])
    typed = "python real_model_example.py --dataset 'my notes.txt'"
    plan = SimpleNamespace(command=typed, run_dir=Path("runs/a"), num_processes=1)
    assert ending.explain_continuing(plan).endswith(f"\n  {typed} --resume runs/a")
    continued = SimpleNamespace(**{**vars(plan), "command": f"{typed} --resume auto"})
    assert ending.explain_continuing(continued) == ending.explain_continuing(plan)
    plan.num_processes = 2  # started by another launcher
    assert ending.explain_continuing(plan).endswith("\n  --resume runs/a")
