import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from distributed_training.config import build_config
from distributed_training.train import generate, learning_rate


def rates(schedule, num_steps, warmup, peak=2.0):
    config = build_config({"learning_rate": peak, "lr_schedule": schedule, "warmup_steps": warmup})
    return [learning_rate(config, step, num_steps) for step in range(num_steps + 1)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_rises_in_equal_steps_to_the_peak(schedule):
    assert rates(schedule, 20, 4)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_no_warmup_begins_at_the_peak(schedule):
    assert rates(schedule, 20, 0)[0] == 2.0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_shorter_than_its_warmup_only_rises(schedule):
    assert rates(schedule, 3, 10)[:3] == pytest.approx([0.2, 0.4, 0.6])


def test_constant_stays():
    assert rates("constant", 20, 4)[4:] == [2.0] * 17


def test_linear_falls_in_equal_steps_to_zero():
    assert rates("linear", 14, 4)[4:] == pytest.approx([2.0 - 0.2 * k for k in range(11)])


def test_cosine_is_half_a_wave_to_zero():
    found = rates("cosine", 14, 4)[4:]
    assert found == pytest.approx([1 + math.cos(math.pi * k / 10) for k in range(11)])
    assert (found[0], found[5]) == pytest.approx((2.0, 1.0))
    assert found[10] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rate_never_falls_below_zero(schedule):
    config = build_config({"learning_rate": 1.0, "lr_schedule": schedule, "warmup_steps": 2})
    assert learning_rate(config, 500, 10) == pytest.approx(0, abs=1e-12)


class FakeEngine:
    """Logits from a fixed table of one row per last token; remembers the windows it was given."""

    def __init__(self, num_tokens=100, seed=0):
        self.table = torch.randn(
            num_tokens, num_tokens, generator=torch.Generator().manual_seed(seed)
        )
        self.windows = []

    def logits(self, window):
        self.windows.append(window[0].tolist())
        return self.table[window]


def sample(engine, prompt=(5,), **changes):
    settings = {"num_tokens": 30, "context": 8, "eos_id": -1, "seed": 3, **changes}
    return generate(engine, list(prompt), **settings)


def test_generation_depends_on_the_seed_and_not_on_the_global_generator():
    torch.manual_seed(1)
    first = sample(FakeEngine())
    torch.manual_seed(2)
    assert sample(FakeEngine()) == first
    assert sample(FakeEngine(), seed=4) != first
    assert len(first) == 31


def test_generation_takes_one_of_the_forty_likeliest():
    engine = FakeEngine()
    ids = sample(engine, num_tokens=200)
    ranks = [
        int((engine.table[last] > engine.table[last, new]).sum())
        for last, new in itertools.pairwise(ids)
    ]
    assert max(ranks) < 40
    assert max(ranks) > 20


def test_generation_sees_no_more_than_the_context():
    engine = FakeEngine()
    ids = sample(engine, prompt=range(6))
    assert engine.windows == [ids[:end][-8:] for end in range(6, 36)]


def test_generation_ends_at_end_of_text():
    engine = FakeEngine()
    ids = sample(engine)
    eos = ids[10]
    again = sample(engine, eos_id=eos)
    assert again == ids[: ids.index(eos, 1) + 1]


def test_generation_copes_with_a_small_vocabulary():
    engine = SimpleNamespace(logits=lambda window: torch.zeros(1, window.shape[1], 3))
    assert set(sample(engine, prompt=(0,), num_tokens=60)) == {0, 1, 2}
