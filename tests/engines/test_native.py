"""The native engine on one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distributed_training.data.samples import StepBatch
from distributed_training.engines.native import NativeEngine
from distributed_training.models.gpt2 import SIZES
from distributed_training.models.gpt2 import build as build_model
from distributed_training.models.loss import ChunkedCrossEntropy
from distributed_training.parallel.tensor_files import TensorFiles, write_parts
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


def build_engine(plan):
    model = build_model(SIZES["gpt2-tiny"], dropout=0.0, seed=1)
    return NativeEngine(model, plan, cpu_topology(plan))


def train(engine, *seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(0, 2048, (2, 8), generator=generator).numpy() for _ in range(4)]
        engine.train_step(StepBatch([(ids[0], ids[1]), (ids[2], ids[3])], 32, 32))


def test_resuming_restores_adams_moments(plan, tmp_path):
    engine, resumed = build_engine(plan), build_engine(plan)
    train(engine, 0, 1)
    write_parts(tmp_path / "state", engine.state_parts())
    resumed.load(TensorFiles([tmp_path / "state"]), engine.counters())
    train(engine, 2)
    train(resumed, 2)
    for ours, theirs in zip(engine.parameters, resumed.parameters, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tokens", [0, 8])
@pytest.mark.parametrize("compiled", [False, True, "whole"])
def test_what_is_compiled_and_which_loss_is_used(tokens, compiled, tmp_path, monkeypatch):
    """Methods that are replaced lie in the modules' own dictionaries."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    plan = small_plan(tmp_path, compile=compiled, loss_chunk_tokens=tokens)
    (part,) = build_engine(plan).parts.values()
    blocks = ["forward" in vars(block) for block in part.blocks.values()]
    assert blocks == [compiled is True] * len(blocks)
    assert ("hidden" in vars(part)) == (compiled == "whole")
    assert ("leave" in vars(part)) == (compiled is not False and not tokens)
    assert ("forward" in vars(part.norm_out)) == (compiled is not False and tokens > 0)
    assert isinstance(part.loss, ChunkedCrossEntropy) == (tokens > 0)
