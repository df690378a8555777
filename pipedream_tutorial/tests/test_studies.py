"""Gradient errors: zero where theory says so to the last bit, and of the right size elsewhere."""

from typing import Any

import pytest
import torch
from pipedream.train.gradients import MicrobatchGradients, watch_gradients
from pipedream.train.oracle import train
from pipedream.train.studies import TRAINED, compare_training

from results.lab.tutorial.staleness import gradient_errors


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
