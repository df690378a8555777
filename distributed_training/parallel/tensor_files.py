"""Store sharded tensors. Each rank writes its parts to a file, and a run with any layout can read
the files.

Files are in the safetensors format, so reading them executes no code. A part is a box (one slice
per dimension) of its tensor or, under ZeRO, a range of the flattened tensor. The file's header
stores the position of each part."""

import json
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from distributed_training.models.weights import all_finite, open_file, write_tensors
from distributed_training.parallel.mesh import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One rank's part of a tensor, in memory or in a file."""

    name: str
    shape: tuple[int, ...]  # shape of the whole tensor, without padding
    # First index of a box, or a single number for a range of the flattened tensor
    start: tuple[int, ...]
    size: tuple[int, ...]
    # Returns the values, [*size], or a box of them. If the part is in memory, writing to the result
    # changes the state.
    get: Callable[..., torch.Tensor]
    written_here: bool = True  # False if another rank writes the same part to the same disk
    dtype: torch.dtype = torch.float32


def build_part(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    start: Sequence[int],
    *,
    written_here: bool = True,
) -> Part:
    """Return `tensor`, without padding, as the Part that begins at index `start` of a tensor with
    the shape `shape`."""
    limits = shape if len(start) == len(shape) else (math.prod(shape),)
    size = tuple(
        max(0, min(length, limit - first))
        for length, limit, first in zip(tensor.shape, limits, start, strict=True)
    )
    unpadded = tensor.detach()[tuple(map(slice, size))]
    return Part(
        name=name,
        shape=tuple(shape),
        start=tuple(start),
        size=size,
        written_here=written_here,
        dtype=tensor.dtype,
        get=unpadded.detach,
    )


def choose_writer(parameter: torch.Tensor, number: int, topology: Topology, disk: range) -> int:
    """Return which of the ranks in `disk` writes this rank's shard of the stage's parameter
    `number`. The ranks that hold the same shard take turns."""
    fixed_axes = {"pp"}
    if isinstance(parameter, DTensor):
        fixed_axes.add("cp")  # FSDP also shards over cp
        axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
        fixed_axes |= {axis for axis, placement in axes if not placement.is_replicate()}
    holders = [rank for rank in disk if topology.shares_position(rank, fixed_axes)]
    return holders[number % len(holders)]


def write_parts(path: Path, parts: Sequence[Part]) -> tuple[int, int]:
    """Write parts to a file, with only one part in memory at a time. Return the size of the file in
    bytes and its CRC-32 once the file is on disk. Raises FloatingPointError if a part contains a
    non-finite value."""
    meta = {part.name: torch.empty(part.size, dtype=part.dtype, device="meta") for part in parts}
    positions = {part.name: {"shape": part.shape, "start": part.start} for part in parts}
    values = map(_finite_values, parts)
    return write_tensors(path, meta, values, {"places": json.dumps(positions)}, sync=True)


def _finite_values(part: Part) -> torch.Tensor:
    """Copy the values of a part to the CPU and return them. Raises FloatingPointError if a value is
    not finite."""
    values = part.get().cpu().contiguous()
    if not all_finite(values):
        raise FloatingPointError(f"{part.name} has non-finite values")
    return values


class HostMemory:
    """Host memory for copies of parts, so that training can continue while the copies are saved.
    All saves use the same memory."""

    def __init__(self, num_bytes: int, gpu: torch.device | None = None) -> None:
        """Allocate `num_bytes` bytes. If `gpu` is given, try to pin the memory, so that copies run
        at the full speed of the link to the GPU. Pinning takes seconds."""
        self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.pinned = False
        if gpu is not None:
            self.memory.zero_()  # writing makes the kernel allocate the pages
            address = self.memory.data_ptr()
            runtime = torch.cuda.cudart()
            code = runtime.cudaHostRegister(address, self.memory.nbytes, 0)
            self.pinned = code == runtime.cudaError.success
        if self.pinned:
            weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False

    def copy(self, parts: Iterable[Part]) -> list[Part]:
        """Copy the parts and return the copies. This overwrites earlier copies."""
        copies: list[Part] = []
        first = 0
        for part in parts:
            num_bytes = math.prod(part.size) * part.dtype.itemsize
            data = self.memory[first : first + num_bytes]
            target = data.view(part.dtype).view(part.size)
            target.copy_(part.get(), non_blocking=self.pinned)
            copies.append(replace(part, get=target.detach))
            first += _aligned_bytes(part)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return copies


def bytes_to_copy(parts: Iterable[Part]) -> int:
    """Return the number of bytes that a HostMemory needs for copies of the parts."""
    return sum(map(_aligned_bytes, parts))


def _aligned_bytes(part: Part) -> int:
    """Return the number of bytes of a part, rounded up so that the next part is aligned."""
    num_bytes = math.prod(part.size) * part.dtype.itemsize
    return -(-num_bytes // 64) * 64


def _copy_overlap(stored_part: Part, target: torch.Tensor, start: Sequence[int]) -> None:
    """Copy the overlap of a stored part and `target` into `target`. `start` is the index of the
    first element of `target` in the tensor or, for a range of the flattened tensor, in the
    flattened tensor."""
    target_slices = []
    part_slices = []
    positions = zip(start, target.shape, stored_part.start, stored_part.size, strict=True)
    for a, n, b, m in positions:
        low = max(a, b)
        high = min(a + n, b + m)
        if low >= high:
            return
        target_slices.append(slice(low - a, high - a))
        part_slices.append(slice(low - b, high - b))
    target[tuple(target_slices)] = stored_part.get(*part_slices)


class TensorFiles:
    """Tensors that are stored in several files. Any part of a tensor can be read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.stored_parts: dict[str, list[Part]] = {}
        for path in paths:
            stored, metadata = open_file(path, "resume from another checkpoint")
            for name, position in json.loads(metadata["places"]).items():
                stored_part = Part(
                    name=name,
                    shape=tuple(position["shape"]),
                    start=tuple(position["start"]),
                    size=tuple(stored[name].shape),
                    get=stored[name].read,
                )
                self.stored_parts.setdefault(name, []).append(stored_part)

    def read(self, part: Part) -> torch.Tensor:
        """Return the values of a part on the CPU, in the shape `part.size`.

        If the files store exactly this part, only the required bytes are read. Otherwise, the rows
        that contain the part are read in full. Raises ValueError if the tensor is missing, is
        incomplete or has a different shape."""
        start = part.start
        size = part.size
        for stored_part in self.stored_parts.get(part.name, []):
            if stored_part.shape != part.shape:
                expected = f"{list(stored_part.shape)} instead of {list(part.shape)}"
                raise ValueError(f"{part.name} has the shape {expected}")
            if stored_part.start == start and stored_part.size == size:
                return stored_part.get()
        if 0 in size:
            return torch.empty(size, dtype=part.dtype)
        # Whole rows are both boxes and ranges.
        stop = start[0] + size[0]
        if len(start) == len(part.shape):
            rows = self._read_rows(part, start[0], stop)
            for dim in range(1, len(start)):
                rows = rows.narrow(dim, start[dim], size[dim])
            return rows
        row_size = math.prod(part.shape[1:])
        first_row = start[0] // row_size
        rows = self._read_rows(part, first_row, -(-stop // row_size))
        return rows.flatten().narrow(0, start[0] - first_row * row_size, size[0])

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""
        shape = self.stored_parts[name][0].shape
        whole = torch.empty(shape, device="meta")
        return self.read(build_part(name, whole, shape, (0,) * len(shape)))

    def _read_rows(self, part: Part, first: int, last: int) -> torch.Tensor:
        """Return the rows `first` to `last - 1` of the part's tensor."""
        row_shape = part.shape[1:]
        # Stored values are finite, so NaN marks the values that no file contains.
        rows = torch.full((last - first, *row_shape), torch.nan, dtype=part.dtype)
        for stored_part in self.stored_parts.get(part.name, []):
            target = rows
            start = [first, *(0 for _ in row_shape)]
            if len(stored_part.start) < len(part.shape):
                target = rows.view(-1)
                start = [first * math.prod(row_shape)]
            _copy_overlap(stored_part, target, start)
        if num_missing := int(rows.isnan().sum()):
            counts = f"{rows.numel() - num_missing} of {rows.numel()}"
            raise ValueError(f"only {counts} values of {part.name} were found")
        return rows
