"""The native engine on one process, where a GPU would keep its gradients in place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distributed_training.config import build_config
from distributed_training.data import StepBatch
from distributed_training.engines.native import NativeEngine
from distributed_training.layout import build_layout
from distributed_training.model import build_model
from distributed_training.sizes import SIZES
from distributed_training.strategy import load_strategy
from distributed_training.topology import build_topology


@pytest.fixture(scope="module", autouse=True)
def _group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build_engine(keep_gradients):
    config = build_config({"strategy": "dp", "learning_rate": 1e-3, "grad_accum_steps": 2})
    strategy = load_strategy(config)
    topology = build_topology(strategy, world_size=1, rank=0, local_rank=0, device_type="cpu")
    model = build_model(SIZES["gpt2-tiny"], dropout=0.0, seed=1)
    layout = build_layout(config, strategy, SIZES["gpt2-tiny"], topology)
    engine = NativeEngine(model, config, topology, layout)
    engine.keep_gradients = keep_gradients
    engine._prepare_gradients()
    return engine


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 2048, (2, 8), generator=generator).numpy() for _ in range(4)]
    return StepBatch([(ids[0], ids[1]), (ids[2], ids[3])], 32)


@pytest.mark.parametrize("keep_gradients", [False, True])
def test_resuming_restores_adams_moments(keep_gradients, tmp_path):
    engine = build_engine(keep_gradients)
    for seed in range(2):
        engine.train_step(batch(seed))
    engine.save(tmp_path)
    resumed = build_engine(keep_gradients)
    resumed.load(tmp_path)
    for one in (engine, resumed):
        one.train_step(batch(2))
    for ours, theirs in zip(
        engine.parts[0].parameters(), resumed.parts[0].parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_gradients_kept_in_place_train_the_same():
    engines = [build_engine(keep) for keep in (False, True)]
    for engine in engines:
        for seed in range(3):
            engine.train_step(batch(seed))
    for ours, theirs in zip(*(engine.parts[0].parameters() for engine in engines), strict=True):
        assert torch.equal(ours, theirs)
