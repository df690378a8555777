"""Fill a model on the meta device with its initial weights, and compute the checksum of weights."""

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from distributed_training.models.private import locate_local

# Constants of SplitMix64 as int64: the step between two states, and (shift, factor) of each round
_STEP = -0x61C8864680B583EB
_ROUNDS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))
_KEY_FACTOR = 0x2545F4914F6CDD1D  # an odd number
# Part of a tensor, given as slices of its first dimensions; () means the whole tensor
Slices = tuple[slice, ...]
# Function of (name, slices) that returns this part of the named parameter's initial values
WeightSource = Callable[[str, Slices], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeights:
    """Values with which a model begins to train. An engine calls `fill` once it has sharded the
    model, so that each rank reads or draws only its own shards."""

    source: WeightSource
    round_to: torch.dtype | None = None  # dtype to which the values are rounded
    # Earlier adapters of all blocks, to continue training (peft.py); {} for new adapters
    adapters: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Allocate the model's meta-device parameters on `device`, and fill this rank's shards with
        initial values.

        Two threads fill the shards, so up to two additional shards are in RAM at a time."""
        pending = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        allocate(model, device)
        parameters = dict(model.named_parameters())

        def fill(name: str) -> None:
            local, start = locate_local(parameters[name])
            if local.numel() == 0:
                return
            sizes = zip(start, local.shape, strict=True)
            slices = tuple(slice(first, first + size) for first, size in sizes)
            values = self.source(name, slices)
            if values.shape != local.shape:
                local.zero_()  # Rows after the vocabulary's rows are padding.
            target = local[tuple(map(slice, values.shape))]
            target.copy_(values.to(self.round_to or values.dtype))

        for name, buffer in stored_buffers(model).items():
            buffer.copy_(self.source(name, ()))
        on_gpu = device.type == "cuda"
        if on_gpu:  # The threads use a different stream.
            torch.cuda.synchronize(device)
        # A new thread uses the first GPU, and so do the fake tensors that DTensor makes and keeps.
        begin = None if device.index is None else partial(torch.cuda.set_device, device)
        with ThreadPoolExecutor(2, initializer=begin) as pool:
            list(pool.map(fill, pending))
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()


def stored_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that weight files contain, by name. They are not trained."""
    stored = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def allocate(model: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device with uninitialized parameters on `device`, and move all
    buffers to `device`. Buffers that were on the meta device are also uninitialized afterwards."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                tensor = torch.empty_like(parameter, device=device)
                module.register_parameter(name, nn.Parameter(tensor, parameter.requires_grad))
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module.to_empty(device=device, recurse=False)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def hashed_normal(
    shape: Sequence[int], slices: Slices, key: int, device: torch.device
) -> torch.Tensor:
    """Return the part of a random matrix, or of a stack of matrices, that `slices` selects. The
    numbers are identical on every device.

    Each number depends only on `key` and the number's position in the matrix. It is a sum of four
    uniformly distributed numbers, scaled to a standard deviation of 1. The distribution is close to
    normal, with magnitudes up to 3.5. The hash is SplitMix64 (Steele et al. 2014)."""
    if len(shape) > 2:
        num_rows, *row_shape = shape
        rows = hashed_normal((num_rows, math.prod(row_shape)), slices[:1], key, device)
        columns = (slice(None), *slices[1:])
        return rows.view(-1, *row_shape)[columns]
    bounds: Any = itertools.zip_longest(slices, shape, fillvalue=slice(None))
    (first, stop, _), columns = (part.indices(size) for part, size in bounds)
    column_indices = torch.arange(*columns, device=device)
    out = torch.empty(stop - first, len(column_indices), device=device)
    offset = (key * _KEY_FACTOR + 2**63) % 2**64 - 2**63  # as int64
    step = max(1, 2**22 // len(column_indices))  # number of rows processed at a time
    for begin in range(first, stop, step):
        rows = torch.arange(begin, min(stop, begin + step), device=device)
        bits = rows[:, None] * shape[1] + column_indices
        bits.mul_(_STEP).add_(offset)
        for shift, factor in _ROUNDS:
            unsigned_shift = (bits >> shift).bitwise_and_(2 ** (64 - shift) - 1)
            bits.bitwise_xor_(unsigned_shift).mul_(factor)
        total = sum((bits >> shift).bitwise_and_(0xFFFF) for shift in (0, 16, 32, 48))
        out[begin - first : begin - first + step] = total - 2 * 0xFFFF
    return out.mul_(math.sqrt(3 / (2**32 - 1)))


def weights_checksum(model: nn.Module, source: WeightSource) -> int:
    """Return the CRC-32 of the first row of each parameter of a model in fp32, read from `source`.
    The checksum identifies the base weights under adapters."""
    checksum = 0
    for name, _ in model.named_parameters():
        row = source(name, (slice(0, 1),))
        data = row.float().cpu().contiguous().numpy().data
        checksum = zlib.crc32(data, checksum)
    return checksum
