"""Gradient errors: zero where theory says so to the last bit, and of the right size elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipedream.errors import UserError
from pipedream.schedules.ops import BACKWARD, Op
from pipedream.train.gradients import (
    MicrobatchGradients,
    exact_gradient,
    relative_difference,
    watch_gradients,
)
from pipedream.train.models import build_stages, build_task
from pipedream.train.oracle import train
from pipedream.train.studies import TRAINED, compare_training
from pipedream.train.trainer import StageTrainer

from results.lab.tutorial import staleness as studies
from results.lab.tutorial.staleness import final_losses, gradient_errors, save_study


def sizes(p: int, m: int = 4, num_batches: int = 3, rate: float = 0.5) -> dict[str, Any]:
    return {
        "num_stages": p, "num_microbatches": m, "layers_per_stage": 2, "learning_rate": rate,
        "num_batches": num_batches, "seed": 1,
    }  # fmt: skip


def gradients_of(name: str, p: int) -> list[MicrobatchGradients]:
    seen: list[MicrobatchGradients] = []
    watch_gradients(name, seen.append, **sizes(p))
    return seen


def equal_by_stage(seen: MicrobatchGradients) -> list[bool]:
    return [all(map(torch.equal, a, b)) for a, b in zip(seen.computed, seen.exact, strict=True)]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical", "pipedream-2bw", "zb-h2"])
def test_gradients_are_autograds_at_the_versions_used_bit_for_bit(name: str) -> None:
    p = 3
    seen = gradients_of(name, p)
    assert sorted(one.microbatch for one in seen) == list(range(12))
    assert all(equal_by_stage(one) == [True] * p for one in seen)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_stashed_gradients_are_not_those_at_the_current_weights(p: int) -> None:
    """Stashing makes a gradient valid, not fresh."""
    for one in gradients_of("pipedream", p):
        flat = [[g for stage in part for g in stage] for part in (one.computed, one.current)]
        assert (relative_difference(*flat) > 0) == (one.microbatch > 0)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-no-stash"])
def test_current_weights_are_those_after_the_updates_of_all_microbatches_before(name: str) -> None:
    p, m = 3, 4
    stages = build_stages(p, 2, seed=1)
    history = [[{n: w.detach() for n, w in stage.named_parameters()}] for stage in stages]

    def watch(op: Op, trainers: list[StageTrainer]) -> None:
        if op.kind == BACKWARD:
            weights = trainers[op.stage].weights
            history[op.stage].append({n: w.detach().clone() for n, w in weights.items()})

    train(name, **sizes(p), watch=watch)
    for one in gradients_of(name, p):
        i = one.microbatch
        inputs, target = build_task(seed=1).microbatch(i)
        expected = exact_gradient(stages, [own[i] for own in history], inputs, target, m)
        for a, b in zip(one.current, expected, strict=True):
            assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_in_place_is_wrong_everywhere_but_on_the_last_stage(p: int) -> None:
    for one in gradients_of("pipedream-no-stash", p):
        right = [True] * p if one.microbatch == 0 else [False] * (p - 1) + [True]
        assert equal_by_stage(one) == right, one.microbatch


def test_in_place_error_is_linear_in_the_learning_rate_and_falls_towards_the_end() -> None:
    small, large = gradient_errors([4], [0.005, 0.05], ["pipedream-no-stash"], num_batches=4)
    assert large.median_relative_error / small.median_relative_error == pytest.approx(10, rel=0.05)
    for row in (small, large):
        assert len(row.per_stage) == 4
        assert row.per_stage[0] > row.per_stage[1] > row.per_stage[2] > row.per_stage[3] == 0


def test_in_place_error_grows_with_depth() -> None:
    rows = gradient_errors([1, 2, 4], [0.05], num_batches=3)
    errors = {(row.num_stages, row.mode): row.median_relative_error for row in rows}
    assert [errors[p, "pipedream"] for p in (1, 2, 4)] == [0, 0, 0]
    one, two, four = (errors[p, "pipedream-no-stash"] for p in (1, 2, 4))
    assert one == 0 < two < four


def test_comparison_of_all_schedules() -> None:
    rows = {row.name: row for row in compare_training(every=1, **sizes(3, num_batches=6))}
    assert tuple(rows) == TRAINED
    assert rows["naive"].losses == rows["gpipe"].losses == rows["1f1b"].losses
    for name, row in rows.items():
        assert (row.median_gradient_error > 0) == (name == "pipedream-no-stash")
        assert (row.median_staleness_error > 0) == name.startswith("pipedream")
        # Six batches of 32 samples are less than one pass: the mean of all.
        assert row.final_loss == pytest.approx(sum(row.losses) / 6, rel=1e-12)
        assert row.losses == train(name, **sizes(3, num_batches=6)).losses  # watched or not
    assert rows["pipedream"].peak_versions == [3, 2, 1]


def test_stashing_is_critical_at_depth_times_learning_rate_only() -> None:
    def medians(p: int, learning_rate: float, **sizes: int) -> list[float]:
        names = ("1f1b", "pipedream", "pipedream-no-stash")
        rows = final_losses(names, [p], [learning_rate], seeds=[0], **sizes)
        return [row.median for row in rows]

    synchronous, stashed, in_place = medians(4, 0.1, num_batches=30)
    assert stashed == pytest.approx(synchronous, abs=0.03)
    assert in_place == pytest.approx(synchronous, abs=0.03)
    synchronous, stashed, in_place = medians(8, 1.0)
    assert stashed < synchronous + 0.1
    assert in_place > synchronous + 0.5


def test_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "gradient_errors": {"num_stages": [2], "learning_rates": [0.1], "num_batches": 1},
        "final_losses": {
            "schedule_names": ["1f1b"],
            "num_stages": [2],
            "learning_rates": [0.1, 1e200],
            "num_batches": 2,
            "seeds": [0],
        },
    }
    monkeypatch.setattr(studies, "STUDY", small)
    path = tmp_path / "record.json"
    monkeypatch.setattr("sys.argv", ["studies", str(path)])
    studies.main()
    assert "final loss infinite, diverged 1 of 1" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["settings"] == small
    assert record["torch"] == torch.__version__
    (expected,) = final_losses(["1f1b"], [2], [0.1], num_batches=2, seeds=[0])
    assert record["final_losses"][0]["losses"] == expected.losses
    assert record["final_losses"][1]["median"] is None
    assert record["final_losses"][1]["num_diverged"] == 1
    assert [row["mode"] for row in record["gradient_errors"]] == ["pipedream", "pipedream-no-stash"]


def test_a_record_needs_a_path_in_a_folder_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["studies"])
    with pytest.raises(UserError, match="one path is needed"):
        studies.main()
    with pytest.raises(UserError, match="is not a folder"):
        save_study(tmp_path / "nowhere" / "record.json")
