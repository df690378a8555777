"""What the processes of a test of compressed gradients do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distributed_training.parallel.compression import apply_compression, bucket_mib
from distributed_training.plan.topology import process_group
from distributed_training.settings.config import RunConfig, build_config


def exchange(arguments: dict[str, Any]) -> torch.Tensor:
    """The gradient of one matrix after the exchange of each step, [steps, rows, columns], where
    those before it are `gradients`, [processes, steps, rows, columns]."""
    with process_group(torch.device("cpu"), minutes=1):
        own = arguments["gradients"][dist.get_rank()]
        return _take_steps(own, build_config(arguments["config"]))


def _take_steps(gradients: torch.Tensor, config: RunConfig) -> torch.Tensor:
    _, rows, columns = gradients.shape
    layer = torch.nn.Linear(columns, rows, bias=False)
    module = DistributedDataParallel(layer, bucket_cap_mb=bucket_mib(config, "cpu"))

    def step(gradient: torch.Tensor) -> torch.Tensor:
        module.zero_grad()
        weight = module(torch.eye(columns)).t()
        (weight * gradient).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    step(torch.zeros(rows, columns))  # in which DDP arranges its buckets
    apply_compression(module, config)
    return torch.stack([step(gradient) for gradient in gradients])
