"""Test that gradient errors are exactly zero if theory predicts zero, and have the expected size
otherwise."""

from statistics import median
from typing import Any

import pytest
from pipedream.__main__ import SCHEDULES_TO_TRAIN
from pipedream.train.oracle import MicrobatchError, train, train_and_check


def sizes(p: int, m: int = 4, num_batches: int = 3, rate: float = 0.5) -> dict[str, Any]:
    return {
        "num_stages": p, "num_microbatches": m, "layers_per_stage": 2, "learning_rate": rate,
        "num_batches": num_batches, "seed": 1,
    }  # fmt: skip


def equal_by_stage(error: MicrobatchError) -> list[bool]:
    # An error of exactly 0 means equal bits.
    return [relative_error == 0 for relative_error in error.per_stage]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical", "pipedream-2bw", "zb-h2"])
def test_gradients_equal_autograd_at_the_weight_versions_used_bitwise(name: str) -> None:
    p = 3
    _, errors = train_and_check(name, **sizes(p))
    assert sorted(error.microbatch for error in errors) == list(range(12))
    assert all(equal_by_stage(error) == [True] * p for error in errors)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_in_place_updates_give_wrong_gradients_except_on_the_last_stage(p: int) -> None:
    for error in train_and_check("pipedream-no-stash", **sizes(p))[1]:
        expected = [True] * p if error.microbatch == 0 else [False] * (p - 1) + [True]
        assert equal_by_stage(error) == expected, error.microbatch


def test_in_place_error_is_linear_in_the_learning_rate_and_falls_towards_the_end() -> None:
    medians = []
    for rate in (0.005, 0.05):
        values = sizes(4, m=8, num_batches=4, rate=rate)
        _, errors = train_and_check("pipedream-no-stash", **values)
        errors = [error for error in errors if error.microbatch >= 4]  # the pipeline is full
        per_stage = [median(stages) for stages in zip(*(e.per_stage for e in errors), strict=True)]
        assert per_stage == sorted(set(per_stage), reverse=True)
        assert per_stage[-1] == 0
        medians.append(median(error.relative_error for error in errors))
    assert medians[1] / medians[0] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("name", SCHEDULES_TO_TRAIN)
def test_checking_gradients_does_not_change_training(name: str) -> None:
    result, errors = train_and_check(name, **sizes(3))
    assert result.losses == train(name, **sizes(3)).losses
    assert (max(e.relative_error for e in errors) > 0) == (name == "pipedream-no-stash")
    assert (max(e.staleness_error for e in errors) > 0) == name.startswith("pipedream")
