"""Fill a model on the meta device with its initial weights, and compute the checksum of weights."""

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn as nn

# Constants of SplitMix64 as int64, and an odd number by which keys are multiplied
_SPLITMIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, 0x2545F4914F6CDD1D)
# Part of a tensor, given as slices of its first dimensions; () means the whole tensor
Slices = tuple[slice, ...]
# Function of (name, slices) that returns this part of the named parameter's initial values
WeightSource = Callable[[str, Slices], torch.Tensor]
# Function that returns this rank's shard of a parameter, without copying it, and the indices at
# which the shard begins
ShardLocator = Callable[[torch.Tensor], tuple[torch.Tensor, tuple[int, ...]]]


def locate_unsharded(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return an unsharded parameter and its offset, which is 0 in each dimension."""
    return parameter.detach(), (0,) * parameter.dim()


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeights:
    """Values with which a model begins to train. An engine calls `fill` once it has sharded the
    model, so that each rank reads or draws only its own shards."""

    source: WeightSource
    round_to: torch.dtype | None = None  # dtype to which the values are rounded
    # Earlier adapters of all blocks, to continue training (peft.py); {} for new adapters
    adapters: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def fill(
        self, model: nn.Module, device: torch.device, locate: ShardLocator = locate_unsharded
    ) -> None:
        """Fill the parameters that are on the meta device (see `fill_parameters`)."""
        fill_parameters(model, self.source, device, self.round_to, locate)


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
            module._buffers[name] = buffer.to(device)


def fill_parameters(
    model: nn.Module,
    source: WeightSource,
    device: torch.device,
    round_to: torch.dtype | None = None,
    locate: ShardLocator = locate_unsharded,
) -> None:
    """Allocate the model's meta-device parameters on `device`, and fill this rank's shards with
    initial values from `source`.

    The values are rounded to `round_to` if it is given. Two threads fill the shards, so up to two
    additional shards are in RAM at a time."""
    pending = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    allocate(model, device)
    parameters = dict(model.named_parameters())

    def fill(name: str) -> None:
        local, start = locate(parameters[name])
        if local.numel() == 0:
            return
        ends = zip(start, local.shape, strict=True)
        values = source(name, tuple(slice(first, first + size) for first, size in ends))
        if values.shape != local.shape:
            local.zero_()  # Rows after the vocabulary's rows are padding.
        values = values.to(device)
        target = local[tuple(map(slice, values.shape))]
        target.copy_(values if round_to is None else values.to(round_to))

    on_gpu = device.type == "cuda"
    if on_gpu:  # The threads use a different stream.
        torch.cuda.synchronize(device)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fill, pending))
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def hashed_normal(
    shape: Sequence[int], slices: Slices, key: int, device: torch.device
) -> torch.Tensor:
    """Return the part of a random matrix that `slices` selects. The matrix is identical on every
    device.

    Each number depends only on `key` and the number's position in the matrix. It is a sum of four
    uniformly distributed numbers, scaled to a standard deviation of 1. The distribution is close to
    normal, with magnitudes up to 3.5. The hash is SplitMix64 (Steele et al. 2014)."""
    bounds: Any = itertools.zip_longest(slices, shape, fillvalue=slice(None))
    (first, stop, _), columns = (part.indices(size) for part, size in bounds)
    column_indices = torch.arange(*columns, device=device)
    out = torch.empty(stop - first, len(column_indices), device=device)
    offset = (key * _SPLITMIX[3] + 2**63) % 2**64 - 2**63
    step = max(1, 2**22 // len(column_indices))  # number of rows processed at a time
    for begin in range(first, stop, step):
        rows = torch.arange(begin, min(stop, begin + step), device=device)
        bits = (rows[:, None] * shape[1] + column_indices).mul_(_SPLITMIX[0]).add_(offset)
        for shift, factor in ((30, _SPLITMIX[1]), (27, _SPLITMIX[2]), (31, 1)):
            bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
        total = sum((bits >> shift).bitwise_and_(0xFFFF) for shift in (0, 16, 32, 48))
        out[begin - first : begin - first + step] = total - 2 * 0xFFFF
    return out.mul_(math.sqrt(3 / (2**32 - 1)))


class Fingerprint:
    """Checksum of about a thousand values from each parameter of a model. If the parameters are
    sharded, each rank samples its shards, and `combine` merges the samples of all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        # (parameter name, indices of samples, values of samples) in this rank's shards
        self.samples: list[tuple[str, list[int], list[float]]] = []

    def watch(self, source: WeightSource) -> WeightSource:
        """Return a source that reads values from `source` and also samples them for the checksum.
        The returned source is thread-safe."""

        def read(name: str, slices: Slices) -> torch.Tensor:
            values = source(name, slices)
            start = tuple(part.start or 0 for part in slices) or (0,) * values.dim()
            self._take_samples(name, start, values)
            return values

        return read

    def _take_samples(self, name: str, start: tuple[int, ...], values: torch.Tensor) -> None:
        shape = self.shapes[name]
        step = max(1, shape.numel() // 1000)
        sampled = torch.arange(0, shape.numel(), step, device="cpu")
        coordinates = torch.unravel_index(sampled, shape)  # one tensor per dimension
        is_inside = torch.ones_like(coordinates[0], dtype=torch.bool)
        for along_dim, first, size in zip(coordinates, start, values.shape, strict=True):
            is_inside &= (along_dim >= first) & (along_dim < first + size)
        (indices,) = torch.where(is_inside)
        shifted = [
            along_dim[indices] - first for along_dim, first in zip(coordinates, start, strict=True)
        ]
        samples = values[tuple(index.to(values.device) for index in shifted)]
        self.samples.append((name, indices.tolist(), samples.float().tolist()))

    def combine(self, all_samples: Iterable[Any] | None = None) -> int:
        """Return the checksum of `all_samples`, which contains one list of samples per rank. By
        default, use only this rank's samples."""
        samples: dict[str, Any] = {
            name: np.zeros(len(range(0, shape.numel(), max(1, shape.numel() // 1000))), np.float32)
            for name, shape in self.shapes.items()
        }
        for name, indices, values in itertools.chain.from_iterable(all_samples or [self.samples]):
            samples[name][indices] = values
        return zlib.crc32(b"".join(values.tobytes() for values in samples.values()))
