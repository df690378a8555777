"""FSDP2: parameters, gradients and optimizer state divided over the data-parallel processes."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distributed_training.models.decoder import Decoder


def apply_fsdp(
    model: Decoder,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    *,
    keep_gathered: bool = False,
) -> None:
    """Shard each block, then the rest, in place, over `mesh`.

    `mesh` has one axis to shard over, or two: copies and, within each, shards (HSDP). Forward
    all-gathers a block's parameters (in `compute_dtype`; None: fp32) and drops them after use;
    backward gathers them again and reduce-scatters gradients in fp32 (and, over two axes,
    all-reduces the shards between copies). The root holds the tied embedding, needed first and
    last, so it stays gathered; with `keep_gathered` so does every block, for pipeline stages,
    which run forward and backward many times a step.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in model.split().blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
