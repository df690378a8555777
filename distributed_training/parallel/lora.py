"""Add LoRA adapters (Hu et al., arXiv 2106.09685) to the matrices of a model's blocks.

The weights W are frozen. An adapter changes the output of a matrix to
`W x + (alpha / rank) B A dropout(x)`. A is [rank, in], and B is [out, rank]. B is initialized to 0,
so training starts from the outputs of the base model."""

import zlib
from collections.abc import Mapping

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from distributed_training.models.decoder import Decoder, Linear
from distributed_training.parallel.gradients import local_part
from distributed_training.parallel.tensor import call_with_rank_dropout
from distributed_training.settings.config import RunConfig


def apply_lora(
    model: Decoder,
    config: RunConfig,
    device: torch.device,
    initial_values: Mapping[str, torch.Tensor],
) -> set[str]:
    """Freeze a model or a pipeline stage, and add fp32 adapters on `device` to the matrices of its
    blocks, in place.

    If tp shards a matrix by rows, each rank has all of A and its own rows of B. If tp shards a
    matrix by columns, each rank has its own columns of A and all of B. `initial_values` (the
    `adapters` of InitialWeights) replace the random initialization. Return the names of the
    parameters whose gradients must be summed over tp."""
    model.requires_grad_(False)
    tp_partial_names = set()
    targets = model.size.adapted_matrices(config.lora_targets)
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, Linear) or name.split(".", 2)[-1] not in targets:
            continue
        weight = linear.weight
        # Use the sizes of the layer, because a quantized weight has a different shape.
        rows = linear.out_features
        columns = linear.in_features
        # The initial values depend only on the name and the seed, and are rounded like the weights.
        generator = torch.Generator().manual_seed(config.seed * 100_003 + zlib.crc32(name.encode()))
        a = torch.empty(config.lora_rank, columns)
        a.uniform_(-(columns**-0.5), columns**-0.5, generator=generator)
        a = initial_values.get(f"{name}.adapter.a", a)
        b = initial_values.get(f"{name}.adapter.b", torch.zeros(rows, config.lora_rank))
        a, b = (x.to(model.compute_dtype or x.dtype).float().to(device) for x in (a, b))
        mask = initial_values.get(f"{name}.adapter.mask")
        mask_rank = None
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            by_columns = weight.placements[0].is_shard(1)
            placement_a, placement_b = Replicate(), Shard(0)
            if by_columns:
                placement_a, placement_b = Shard(1), Replicate()
            a = distribute_tensor(a, mesh, [placement_a], src_data_rank=None)
            b = distribute_tensor(b, mesh, [placement_b], src_data_rank=None)
            if mask is not None:
                mask = distribute_tensor(mask, mesh, [placement_b], src_data_rank=None).to_local()
            tp_partial_names.add(f"{name}.adapter.{'b' if by_columns else 'a'}")
            if by_columns and config.lora_dropout and not config.sequence_parallel:
                mask_rank = mesh.get_local_rank()
        linear.adapter = Adapter(a, b, config, mask_rank)
        if mask is not None:
            linear.adapter.mask = mask.to(device)
    return tp_partial_names


class Adapter(nn.Module):
    """LoRA adapter for one matrix."""

    mask: torch.Tensor | None  # factors for B, [out, lora_rank]; a 0 keeps a value at 0

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, config: RunConfig, mask_rank: int | None = None
    ) -> None:
        """Create the adapter from the matrices `a`, [lora_rank, in], and `b`, [out, lora_rank]. Set
        `mask_rank` to this rank's position along tp if the ranks have the same random state but
        different columns of the input. Each rank then draws a different dropout mask."""
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)
        self.scale = config.lora_alpha / config.lora_rank
        self.dropout = config.lora_dropout
        self.mask_rank = mask_rank
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the adapter's output for the input x [.., in] to the matrix's output y [.., out]."""
        inputs = x
        if isinstance(x, DTensor):
            # If x is replicated, each rank computes only one term of the gradient of x.
            placements = [
                Partial() if placement.is_replicate() else placement for placement in x.placements
            ]
            inputs = x.to_local(grad_placements=placements)
        if self.mask_rank is None:
            inputs = self._apply_dropout(inputs)
        else:
            inputs = call_with_rank_dropout(self._apply_dropout, self.mask_rank, inputs)
        hidden = F.linear(inputs, local_part(self.a).to(x.dtype)) * self.scale
        b = local_part(self.b).to(x.dtype)
        delta = F.linear(hidden, b if self.mask is None else b * self.mask.to(x.dtype))
        if isinstance(y, DTensor):
            delta = DTensor.from_local(delta, y.device_mesh, y.placements, run_check=False)
        return y + delta

    def _apply_dropout(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)
