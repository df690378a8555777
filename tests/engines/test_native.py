"""The native engine on one process, where a GPU would keep its gradients in place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distributed_training.data.samples import StepBatch
from distributed_training.engines.native import NativeEngine
from distributed_training.models.gpt2 import SIZES
from distributed_training.models.gpt2 import build as build_model
from tests.support import cpu_topology, small_plan


@pytest.fixture(scope="module", autouse=True)
def _group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return small_plan(folder, learning_rate=1e-3, batch_size=2, grad_accum_steps=2)


def build_engine(plan, keep_gradients):
    model = build_model(SIZES["gpt2-tiny"], dropout=0.0, seed=1)
    engine = NativeEngine(model, plan, cpu_topology(plan))
    engine.keep_gradients = keep_gradients
    return engine


def train(engine, *seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(0, 2048, (2, 8), generator=generator).numpy() for _ in range(4)]
        engine.train_step(StepBatch([(ids[0], ids[1]), (ids[2], ids[3])], 32, 32))


def assert_same_weights(one, other):
    for ours, theirs in zip(one.parameters, other.parameters, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("keep_gradients", [False, True])
def test_resuming_restores_adams_moments(keep_gradients, plan, tmp_path):
    engine, resumed = build_engine(plan, keep_gradients), build_engine(plan, keep_gradients)
    train(engine, 0, 1)
    engine.save(tmp_path)
    resumed.load(tmp_path)
    train(engine, 2)
    train(resumed, 2)
    assert_same_weights(engine, resumed)


def test_gradients_kept_in_place_train_the_same(plan):
    fresh, kept = build_engine(plan, False), build_engine(plan, True)
    train(fresh, 0, 1, 2)
    train(kept, 0, 1, 2)
    assert_same_weights(fresh, kept)
