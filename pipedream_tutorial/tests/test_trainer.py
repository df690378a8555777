"""Compare StageTrainer with torch's optimizer and with the counts of policies.weight_use."""

import weakref

import pytest
import torch
from pipedream.schedules.orders import build_schedule
from pipedream.schedules.policies import POLICIES
from pipedream.train.models import build_stages, build_task
from pipedream.train.oracle import train
from pipedream.train.trainer import StageTrainer
from torch import nn
from torch.profiler import ProfilerActivity, profile


def one_stage(
    module: nn.Module, stage: int, num_stages: int, policy: str, schedule: str = "1f1b"
) -> StageTrainer:
    orders = build_schedule(schedule, num_stages, 2)
    return StageTrainer(
        module, orders, POLICIES[policy], stage=stage, batch_size=1, learning_rate=0.1
    )


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 8), (4, 1), (4, 6)])
def test_microbatched_equals_full_batch(p: int, m: int) -> None:
    model = nn.Sequential(*build_stages(p, 2, seed=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    task = build_task(seed=3)
    for batch in range(4):
        rows = slice(batch * 8 * m, (batch + 1) * 8 * m)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(task.inputs[rows]), task.targets[rows]).backward()
        optimizer.step()
    expected = torch.cat([w.detach().flatten() for w in model.parameters()])
    result = train(
        "1f1b", num_stages=p, num_microbatches=m, layers_per_stage=2, learning_rate=0.3,
        num_batches=4, seed=3,
    )  # fmt: skip
    found = torch.cat([w.detach().flatten() for own in result.weights for w in own.values()])
    assert float((found - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize(
    ("policy", "kept"), [("flush", False), ("stash", False), ("in-place", True)]
)
def test_first_weight_version_is_freed_after_its_last_use(policy: str, kept: bool) -> None:
    """The trainer's module does not keep the first version of the weights in memory. The tensors of
    this version remain only if updates are in place."""
    (module,) = build_stages(1, 1, seed=1)
    trainer = one_stage(module, 0, 1, policy)
    assert all(parameter.is_meta for parameter in trainer.module.parameters())
    assert not any(parameter.is_meta for parameter in module.parameters())
    first = weakref.ref(next(iter(trainer.weights.values())))
    trainer.forward(0, *build_task(seed=1).microbatch(0))
    trainer.input_gradient(0, None)
    trainer.weight_gradient(0)
    assert (first() is not None) == kept


def test_split_backward_needs_as_many_matmuls_as_an_unsplit_one() -> None:
    """Two half backward passes need the same number of matrix multiplications as one whole pass."""
    layers, linears, matmuls_per_linear = 2, 2, 3  # y, dX and dW
    x = torch.randn(8, 32, dtype=torch.float64)
    for schedule in ("zb-h1", "1f1b"):
        trainer = one_stage(build_stages(3, layers, seed=0)[1], 1, 3, "flush", schedule)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            trainer.forward(0, x, x)
            trainer.input_gradient(0, x)
            trainer.weight_gradient(0)
        num_matmuls = sum(event.name in ("aten::mm", "aten::addmm") for event in profiled.events())
        assert num_matmuls == layers * linears * matmuls_per_linear
