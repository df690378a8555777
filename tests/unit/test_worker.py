"""The parts of a worker that need no second process."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from distributed_training import assemble, outcome
from distributed_training.config import build_config
from distributed_training.engines import deepspeed, native
from distributed_training.model import build_model
from distributed_training.plan import make_plan
from distributed_training.sizes import SIZES
from distributed_training.topology import build_topology
from tests.unit.conftest import CPU_MACHINE, GPU_MACHINE

SEED = 7


def plan_for(tmp_path, strategy="dp", machine=CPU_MACHINE, num_processes=1, **config):
    config = {"model": "gpt2-tiny", "seed": SEED, "output_dir": str(tmp_path), **config}
    plan = make_plan(
        build_config({"strategy": strategy, **config}),
        machine,
        num_processes=num_processes,
        processes_here=num_processes,
    )
    topology = build_topology(
        plan.strategy, world_size=num_processes, rank=0, local_rank=0, device_type="cpu"
    )
    return plan, topology


@pytest.fixture
def handed_over(monkeypatch):
    """build_engine returns the model that it hands to an engine."""
    monkeypatch.setattr(native, "NativeEngine", lambda model, *_: model)
    monkeypatch.setattr(deepspeed, "DeepSpeedEngine", lambda model, *_: model)


@pytest.mark.usefixtures("handed_over")
@pytest.mark.parametrize("strategy", ["dp", "fsdp", "zero2", "zero3"])
def test_initial_weights_are_those_of_the_compute_dtype(strategy, tmp_path):
    """DeepSpeed starts from rounded weights, so every strategy does, in fp32."""
    expected = dict(build_model(SIZES["gpt2-tiny"], dropout=0.0, seed=SEED).named_parameters())
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        plan, topology = plan_for(tmp_path, strategy, precision=precision)
        parameters = dict(assemble.build_engine(plan, topology).named_parameters())
        assert parameters.keys() == expected.keys()
        for name, parameter in parameters.items():
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, expected[name].to(dtype).float()), name


@pytest.mark.usefixtures("handed_over")
def test_fp16_rounds_as_well(tmp_path):
    plan, topology = plan_for(tmp_path, machine=GPU_MACHINE, precision="fp16")
    for parameter in assemble.build_engine(plan, topology).parameters():
        assert torch.equal(parameter, parameter.half().float())


@pytest.mark.usefixtures("handed_over")
def test_rounding_keeps_the_output_layer_the_embedding(tmp_path):
    plan, topology = plan_for(tmp_path, precision="bf16")
    model = assemble.build_engine(plan, topology)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = model(ids)
        model.token_embedding.weight *= 2
        assert not torch.equal(model(ids), before)
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in build_model(SIZES["gpt2-tiny"], dropout=0.0, seed=SEED).parameters()
    )


@pytest.mark.parametrize(
    ("strategy", "num_processes", "advised"),
    [
        ("dp", 2, True),
        ("dp", 1, False),
        ("zero2", 2, True),
        ("zero3", 2, False),
        ("fsdp", 2, False),
    ],
)
def test_dividing_is_advised_where_it_would_help(
    strategy, num_processes, advised, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 2**30)
    plan, topology = plan_for(tmp_path, strategy, GPU_MACHINE, num_processes)
    text = outcome.explain_out_of_memory(plan, topology, "tried to allocate")
    assert ("strategy=zero3 or fsdp" in text) == advised
    assert "batch_size=2 with grad_accum_steps=2" in text
    later = dataclasses.replace(topology, rank=1)
    assert "on rank 1: tried to allocate" in outcome.explain_out_of_memory(
        plan, later, "tried to allocate"
    )
