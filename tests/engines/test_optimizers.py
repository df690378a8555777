"""Test AdamW with bf16 Adam moments and with bf16 weights, and test gradient
clipping."""

from types import SimpleNamespace

import pytest
import torch

from distributed_training.engines import optimizers
from distributed_training.engines.native import NativeEngine
from distributed_training.engines.optimizers import AdamWBf16, build_optimizer, init_state
from tests.planner.helpers import merged

RATE = 1e-3


def build(name, parameter):
    config = merged({"optimizer": name, "weight_decay": 0.1, "compile": False})
    origins = {parameter: ("weight", parameter)}
    optimizer = build_optimizer(config, torch.tensor(RATE), origins)
    init_state(optimizer, torch.zeros(()))
    return optimizer


def train(name, gradients):
    """Run one optimizer step per gradient. Return the parameter and its optimizer state."""
    dtype = torch.bfloat16 if name == "adamw-bf16-weights" else torch.float32
    start = torch.linspace(-1, 1, gradients[0].numel()).view(-1, 512)
    parameter = torch.nn.Parameter(start.to(dtype))
    optimizer = build(name, parameter)
    for gradient in gradients:
        parameter.grad = gradient.to(dtype, copy=True)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def random_tensor(seed, *, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(16, 512, generator=generator)


def test_bf16_moments_follow_fp32_moments_on_average_despite_tiny_updates():
    """If optimizer state were rounded to nearest instead of stochastically, small decays would
    never shrink the second moment."""
    gradients = [random_tensor(seed) for seed in range(20)] + [random_tensor(0, scale=0.01)] * 700
    exact, state = train("adamw", gradients)
    rounded, moments = train("adamw-bf16", gradients)
    assert moments["exp_avg_sq"].dtype is torch.bfloat16
    ratio = moments["exp_avg_sq"].float() / state["exp_avg_sq"]
    assert float(ratio.mean()) == pytest.approx(1, abs=0.01)
    assert float(ratio.std()) < 0.1
    start = torch.linspace(-1, 1, 16 * 512).view(-1, 512)
    assert (rounded - exact).norm() < 0.02 * (exact - start).norm()


def test_bf16_weights_follow_fp32_weights_on_average_despite_tiny_updates():
    """An update of 1e-3 is smaller than half the distance between bf16 values near 1, so rounding
    to nearest would not change these weights. If the random bits of the steps were equal, errors
    would grow with the number of steps instead of its square root."""
    gradients = [torch.ones(16, 512)] * 100
    exact, _ = train("adamw", gradients)
    rounded, _ = train("adamw-bf16-weights", gradients)
    assert rounded.dtype is torch.bfloat16
    large = exact.abs() > 0.5
    errors = (rounded.float() - exact)[large]
    assert abs(float(errors.mean())) < 0.001  # of a change of 0.1
    assert float(errors.std()) < 0.03


def test_first_steps_are_close_to_adamw():
    gradients = [random_tensor(0).sign() * (0.5 + random_tensor(seed).abs()) for seed in range(3)]
    exact, _ = train("adamw", gradients)
    approximate, moments = train("adamw-bf16", gradients)
    start = torch.linspace(-1, 1, 16 * 512).view(-1, 512)
    assert (approximate - exact).norm() < 0.01 * (exact - start).norm()
    assert float(moments["step"]) == 3


def test_stochastic_rounding_does_not_depend_on_the_global_random_state(monkeypatch):
    torch.manual_seed(1)
    first, _ = train("adamw-bf16", [random_tensor(0), random_tensor(1)])
    torch.manual_seed(2)
    monkeypatch.setattr(optimizers, "MAX_CHUNK_SIZE", 1000)  # several chunks per tensor
    second, _ = train("adamw-bf16", [random_tensor(0), random_tensor(1)])
    assert torch.equal(first, second)


def test_a_skipped_update_changes_nothing():
    parameter = torch.nn.Parameter(random_tensor(0))
    optimizer = build("adamw-bf16", parameter)
    assert isinstance(optimizer, AdamWBf16)
    parameter.grad = random_tensor(1)
    optimizer.step()
    state_before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    weights = parameter.detach().clone()
    optimizer.found_inf = torch.tensor(1.0)
    parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.step()
    assert torch.equal(parameter, weights)
    assert all(
        torch.equal(state_before[key], now) for key, now in optimizer.state[parameter].items()
    )


def test_clipping_equals_clip_grad_norm():
    """Clipping gives the same weights as clip_grad_norm_, although the optimizer scales the
    gradients itself."""
    weights = []
    for engine_clips in (True, False):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 16 * 512).view(16, 512))
        optimizer = torch.optim.AdamW([parameter], RATE, fused=True)
        config = merged({"max_grad_norm": 3.0})
        engine = SimpleNamespace(
            config=config, optimizer=optimizer, local_params={parameter: parameter}
        )
        for seed in range(6):
            parameter.grad = random_tensor(seed, scale=0.02 * seed)  # norms from 0 to 9
            if engine_clips:
                NativeEngine._clip(engine, parameter.grad.norm())
            else:
                torch.nn.utils.clip_grad_norm_(parameter, 3.0)
            optimizer.step()
        weights.append(parameter.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-7)
