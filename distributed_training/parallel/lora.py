"""LoRA (Hu et al., 2106.09685): weights stay as they are, and blocks' matrices W get a trained
product of two narrow ones beside them: y = W x + (alpha / rank) B A dropout(x).
A is [rank, in], B [out, rank]. B begins at 0, so that the first step sees the weights of the base.
"""

import zlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from distributed_training.models.decoder import Decoder, Linear
from distributed_training.parallel.gradients import local_part
from distributed_training.parallel.tensor import with_own_masks
from distributed_training.settings.config import RunConfig


def apply_lora(model: Decoder, config: RunConfig, device: torch.device) -> set[str]:
    """Freeze a model, or a stage of one that may be split over tp, and put fp32 adapters on
    `device` beside its blocks' matrices, in place: all of A and own rows of B where a matrix is
    split by rows, else own columns of A, all of B. They begin as the model's `initial_adapters`, if
    it has any. Returns names of parameters with gradients to be summed over tp yet."""
    initial = model.initial_adapters
    model.requires_grad_(False)
    terms = set()
    targets = model.size.adapted(config.lora_targets)
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, Linear) or name.split(".", 2)[-1] not in targets:
            continue
        weight = linear.weight
        rows, columns = linear.out_features, linear.in_features  # a quantized weight has others
        # From the name and the seed alone; rounded like weights that training begins with.
        generator = torch.Generator().manual_seed(config.seed * 100_003 + zlib.crc32(name.encode()))
        a = torch.empty(config.lora_rank, columns)
        a.uniform_(-(columns**-0.5), columns**-0.5, generator=generator)
        a = initial.get(f"{name}.adapter.a", a)
        b = initial.get(f"{name}.adapter.b", torch.zeros(rows, config.lora_rank))
        a, b = (x.to(model.compute_dtype or x.dtype).float().to(device) for x in (a, b))
        mask = initial.get(f"{name}.adapter.mask")
        place = None
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            by_columns = weight.placements[0].is_shard(1)
            place_a, place_b = (Shard(1), Replicate()) if by_columns else (Replicate(), Shard(0))
            a = distribute_tensor(a, mesh, [place_a], src_data_rank=None)
            b = distribute_tensor(b, mesh, [place_b], src_data_rank=None)
            if mask is not None:
                mask = distribute_tensor(mask, mesh, [place_b], src_data_rank=None).to_local()
            terms.add(f"{name}.adapter.{'b' if by_columns else 'a'}")
            if by_columns and config.lora_dropout and not config.sequence_parallel:
                place = mesh.get_local_rank()
        linear.adapter = Adapter(a, b, config, place)
        if mask is not None:
            linear.adapter.mask = mask.to(device)
    return terms


class Adapter(nn.Module):
    """What is added to the product of one matrix."""

    mask: torch.Tensor | None  # of B, where some of its numbers stay 0

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, config: RunConfig, place: int | None = None
    ) -> None:
        """`place`: among processes with other columns of the input and the same random numbers."""
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)
        self.scale = config.lora_alpha / config.lora_rank
        self.dropout = config.lora_dropout
        self.place = place
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The matrix's input [.., in] and product [.., out] -> the sum [.., out]."""
        inputs = x
        if isinstance(x, DTensor):  # of a whole x each process computes one term of the gradient
            places = [Partial() if place.is_replicate() else place for place in x.placements]
            inputs = x.to_local(grad_placements=places)
        if self.place is None:
            inputs = self._drop(inputs)
        else:
            inputs = with_own_masks(self._drop, self.place, inputs)
        narrow = F.linear(inputs, local_part(self.a).to(x.dtype)) * self.scale
        b = local_part(self.b).to(x.dtype)
        added = F.linear(narrow, b if self.mask is None else b * self.mask.to(x.dtype))
        if isinstance(y, DTensor):
            added = DTensor.from_local(added, y.device_mesh, y.placements, run_check=False)
        return y + added

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)
