"""Run the commands from CONTRIBUTING.md: add an algorithm, train with it, and write a page that
compares it with dp."""

import json
import shlex

from tests.conftest import assert_ok, run_command
from tests.e2e.support import clone, find_command, metrics
from tests.test_contributing import EXAMPLES

DOCUMENT = "CONTRIBUTING.md"
FLOOR = 1e-3  # as in the document
# Without warm-up, the learning rate begins above the floor.
SHORT = shlex.split(
    "--num_gpus 1 --num_samples 80 --max_length 64 --epochs 1 --eval_samples 8 --warmup_steps 0"
)


def test_from_a_strategy_folder_to_a_comparison_page(tmp_path):
    repository = clone(tmp_path / "repository")
    for name in ("config.json", "engine.py"):  # as CONTRIBUTING.md prints them
        file = f"strategies/14_lr_floor/{name}"
        (repository / file).parent.mkdir(exist_ok=True)
        (repository / file).write_text(EXAMPLES[file])
    command = find_command(DOCUMENT, "python real_model_example.py compare")
    assert command[-2:] == ["--lr_floor", "1e-3"]
    result = run_command([*command, *SHORT], cwd=repository, PYTHONPATH="")
    assert_ok(result)
    (out,) = (repository / "runs").glob("compare-*")
    records = [json.loads(file.read_text()) for file in sorted(out.glob("runs/2*/record.json"))]
    assert [record["strategy"]["name"] for record in records] == ["dp", "lr-floor"]
    assert [record["config"].get("lr_floor") for record in records] == [None, FLOOR]

    # Both algorithms are equal until the learning rate of dp falls below the floor.
    dp, floor = ([loss for _, loss in record["loss_curve"]] for record in records)
    (rows,) = map(metrics, out.glob("runs/*-dp-*"))
    above = sum(row["learning_rate"] >= FLOOR for row in rows)
    assert 5 < above < len(rows) - 3
    # The learning rate of a step first affects the loss of the next step.
    assert dp[: above + 1] == floor[: above + 1]
    assert not {*dp[above + 1 :]} & {*floor[above + 1 :]}

    text = (out / "compare.txt").read_text()
    assert text in result.stdout
    rows = [line.split() for line in text.splitlines()]
    assert [row[-1] for row in rows if row[:1] in (["dp"], ["lr-floor"])][:2] == ["ok", "ok"]
    for record in records:
        assert f"{record['evaluations'][-1]['loss']:.4f}" in text
    assert "differ in lr_floor" in result.stdout
