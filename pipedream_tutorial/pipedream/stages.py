"""A small model that is cut into stages, and the data that it learns from.

Layers are numbered through the whole model and drawn from their own seeds, so the same model comes
out however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

WIDTH, NUM_CLASSES = 32, 8


class ResidualLayer(nn.Module):
    """x + down(tanh(up(norm(x)))): deep stacks of it train, deep stacks of plain tanh do not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, width] -> [batch, width]
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build_stages(
    num_stages: int, layers_per_stage: int, *, seed: int, dtype: torch.dtype = torch.float64
) -> list[nn.Module]:
    """Stages of `layers_per_stage` layers each; the last one ends in a classifier."""
    stages: list[nn.Module] = []
    for stage in range(num_stages):
        layers: list[nn.Module] = []
        for layer in range(stage * layers_per_stage, (stage + 1) * layers_per_stage):
            torch.manual_seed(seed * 10_000 + layer)
            layers.append(ResidualLayer(WIDTH))
        if stage == num_stages - 1:
            torch.manual_seed(seed * 10_000 + 9_999)
            layers += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_CLASSES)]
        stages.append(nn.Sequential(*layers).to(dtype))
    return stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Points and the classes that a hidden network gives them."""

    inputs: torch.Tensor
    """[samples, WIDTH]"""
    targets: torch.Tensor
    """[samples]"""
    microbatch_size: int

    def microbatch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the microbatch, counted from the start of training; the samples
        come round again in the same order."""
        first = index * self.microbatch_size % len(self.targets)
        rows = slice(first, first + self.microbatch_size)
        return self.inputs[rows], self.targets[rows]


def build_task(
    *,
    seed: int,
    num_microbatches: int = 64,
    microbatch_size: int = 8,
    dtype: torch.dtype = torch.float64,
) -> Task:
    """Normal inputs, classified by a random two-layer network."""
    num_samples = num_microbatches * microbatch_size
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)
    first = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    second = torch.randn(WIDTH, NUM_CLASSES, generator=generator, dtype=torch.float64)
    targets = (torch.tanh(inputs @ first) @ second).argmax(dim=1)
    return Task(inputs=inputs.to(dtype), targets=targets, microbatch_size=microbatch_size)


def evaluate(
    stages: Sequence[nn.Module], weights: Sequence[dict[str, torch.Tensor]], task: Task
) -> float:
    """Mean cross-entropy over all samples, in nats, of stages run with the given weights."""
    x = task.inputs
    with torch.no_grad():
        for stage, own in zip(stages, weights, strict=True):
            x = torch.func.functional_call(stage, own, (x,))
        return float(nn.functional.cross_entropy(x, task.targets))
