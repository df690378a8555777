"""Test the native engine in one process."""

import dataclasses

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from distributed_training.data.samples import StepBatch
from distributed_training.engines import base, native
from distributed_training.engines.native import NativeEngine
from distributed_training.models import find_model
from distributed_training.models.decoder import COMPUTE_DTYPES
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.parallel.tensor_files import TensorFiles, write_parts
from distributed_training.settings.config import with_values
from tests.planner.helpers import plan_for
from tests.support import CPU_MACHINE, GPU_MACHINE, cpu_topology

pytestmark = pytest.mark.usefixtures("process_group")
WORK = {"strategy": "dp", "learning_rate": 1e-3, "batch_size": 2, "grad_accum_steps": 2}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return plan_for(folder, CPU_MACHINE, 1, **WORK)


def build_engine(plan):
    model = find_model("gpt2-tiny").build_meta_model()
    model.compute_dtype = COMPUTE_DTYPES[plan.config.precision]
    if plan.config.has_bf16_weights:
        model.to(torch.bfloat16)
    weights = InitialWeights(source=model.random_source(1, torch.device("cpu"), hashed=False))
    return NativeEngine(model, weights, plan, cpu_topology(plan))


def train(engine, *seeds):
    """For each seed, train for one step on random tokens. Return the results of the steps."""
    results = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(0, 2048, (2, 8), generator=generator).numpy() for _ in range(4)]
        batch = StepBatch([(ids[0], ids[1]), (ids[2], ids[3])], 32, 32)
        results.append(engine.train_step(batch))
    return results


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [("adamw", ()), *((name, (0, 1)) for name in ("adamw", "adamw-bf16", "adamw-bf16-weights"))],
)
def test_resuming_restores_adams_moments(optimizer, steps, plan, tmp_path):
    changes = {"precision": "bf16"} if optimizer == "adamw-bf16-weights" else {}
    plan = dataclasses.replace(
        plan, config=with_values(plan.config, optimizer=optimizer, **changes)
    )
    engine, resumed = build_engine(plan), build_engine(plan)
    train(engine, *steps)
    write_parts(tmp_path / "state", [*engine.state_parts()])
    train(resumed, 3)  # `load` must overwrite the resulting state
    resumed.load(TensorFiles([tmp_path / "state"]), engine.counters())
    train(engine, 4)
    train(resumed, 4)
    for parameter, resumed_parameter in zip(engine.parameters, resumed.parameters, strict=True):
        assert torch.equal(parameter, resumed_parameter)


def build_fp16_engine(folder, loss_scale):
    """Return an fp16 engine with the same loss scaling as on a GPU."""
    options = {"precision": "fp16", "cuda_graphs": False, "compile": False}
    engine = build_engine(plan_for(folder, GPU_MACHINE, 1, **WORK, **options))
    engine.loss_scale.fill_(loss_scale)
    return engine


def test_loss_scale_does_not_change_norms_and_weights(tmp_path):
    small, large = (build_fp16_engine(tmp_path, 2.0**power) for power in (4, 12))
    for ours, theirs in zip(train(small, 0, 1), train(large, 0, 1), strict=True):
        assert float(ours.grad_norm) == pytest.approx(float(theirs.grad_norm), rel=1e-3)
    ours, theirs = (parameters_to_vector(engine.parameters) for engine in (small, large))
    assert (ours - theirs).norm() <= 1e-3 * ours.norm()


def test_learning_rate_is_updated_in_place_for_cuda_graphs(plan):
    engine = build_engine(plan)
    engine.set_learning_rate(0.5)
    assert float(engine.lr_tensor) == 0.5
    assert all(group["lr"] is engine.lr_tensor for group in engine.optimizer.param_groups)


def test_a_loss_scale_falls_at_an_overflow_and_rises_again(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "LOSS_SCALE_WINDOW", 3)
    engine = build_fp16_engine(tmp_path, 2.0**40)
    weights_before = [parameter.clone() for parameter in engine.parameters]
    (overflow,) = train(engine, 0)
    assert overflow.skipped
    assert engine.loss_scale == 2.0**39
    assert all(map(torch.equal, engine.parameters, weights_before))
    engine.loss_scale.fill_(2.0**4)
    steps = train(engine, 0, 1, 2)
    assert not any(step.skipped for step in steps)
    assert engine.loss_scale == 2.0**5


def test_only_pairs_are_evaluated_with_the_code_that_training_compiles():
    """Code that is compiled without gradients rounds at other places, so that answers in bf16 would
    differ from their reference before the first step."""
    layer = torch.nn.Linear(2, 2)
    for compiles in (True, False):
        with base.evaluation_mode(layer, compiles=compiles):
            assert layer(torch.ones(2)).requires_grad == compiles
            assert not layer.training
