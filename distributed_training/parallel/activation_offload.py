"""Keep the tensors that blocks save in host memory between the forward and backward passes."""

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks

from distributed_training.models.decoder import Decoder
from distributed_training.models.private import local_part, tree_leaves

# Fraction of the size of a block's input. Smaller tensors stay on the GPU.
MIN_SIZE = 1 / 8


def offload_saved(model: Decoder, num_blocks: int | None = None) -> None:
    """Let the large tensors that the first `num_blocks` blocks of a model save, such as their
    inputs [B, T, D], wait in host memory, in place. By default, those of all blocks do. Call this
    function after apply_checkpointing and apply_compile. It needs a GPU.

    Copies overlap with computation. Tensors leave the GPU while the next block runs forward, and
    return while the next block runs backward."""
    store = _HostStore()
    for block in list(model.blocks.values())[:num_blocks]:
        block.forward = functools.partial(store.run, block, block.forward)


@dataclass(slots=True, eq=False)
class _Pass:
    """Forward pass of a block for one micro-batch."""

    previous: "_Pass | None"  # pass of the block before, which the backward pass needs next
    saved: "list[_Saved]" = field(default_factory=list)  # empty once the backward pass needs it


@dataclass(kw_only=True, slots=True, eq=False)
class _Saved:
    """Tensor that a block has saved. It is on the GPU, in a host buffer, or in both."""

    on_gpu: torch.Tensor | None
    on_host: torch.Tensor | None
    by: _Pass


class _HostStore:
    """Page-locked buffers on the host, which are used again in each step. All copies run in one
    stream, in the order in which they are launched."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        # (shape, strides, dtype) of a tensor -> buffers that contain nothing
        self.buffers: dict[Any, list[torch.Tensor]] = defaultdict(list)
        self.latest: _Pass | None = None  # its tensors are being copied to the host

    def run(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        x: torch.Tensor,
        *inputs: Any,
        **options: Any,
    ) -> Any:
        """Run a block's forward pass. Move the large tensors that it saves, except its weights and
        tensors that the model keeps anyway, such as masks and Gemma 4's input for each block."""
        shared = (*block.parameters(), *block.buffers(), *tree_leaves((inputs, options)))
        staying = {local_part(t).data_ptr() for t in shared if isinstance(t, torch.Tensor)}
        # torch keeps `save`, which must therefore not refer to `x`.
        min_size, device = MIN_SIZE * x.numel(), x.device
        current = _Pass(self.latest)

        def save(tensor: torch.Tensor) -> Any:
            is_large = tensor.numel() >= min_size and tensor.device == device
            if not is_large or tensor.data_ptr() in staying:
                return tensor
            return self._save(tensor.detach(), current)

        with saved_tensors_hooks(save, self._load):
            return forward(x, *inputs, **options)

    def _save(self, tensor: torch.Tensor, by: _Pass) -> _Saved:
        # The first pass of a step must not wait, because a step that is captured as a CUDA graph
        # cannot wait for copies before it.
        if self.latest not in (None, by):
            torch.cuda.current_stream().wait_stream(self.stream)
            for saved in self.latest.saved:
                saved.on_gpu = None  # now copied, so its memory can be used again
        self.latest = by
        free = self.buffers[tensor.shape, tensor.stride(), tensor.dtype]
        buffer = free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copy(buffer, tensor)
        saved = _Saved(on_gpu=tensor, on_host=buffer, by=by)
        by.saved.append(saved)
        return saved

    def _load(self, saved: Any) -> torch.Tensor:
        """Return a tensor that has been saved. Start to fetch the tensors that are needed next."""
        if not isinstance(saved, _Saved):
            return saved
        by = saved.by
        if by.saved:  # the first of them that the backward pass needs
            if by is self.latest:
                self.latest = None
            self._fetch(by)
            torch.cuda.current_stream().wait_stream(self.stream)
            by.saved.clear()
            if by.previous is not None:
                self._fetch(by.previous)
                by.previous = None
        assert saved.on_gpu is not None
        return saved.on_gpu

    def _fetch(self, by: _Pass) -> None:
        for saved in by.saved:
            buffer = saved.on_host
            if buffer is None:
                continue
            if saved.on_gpu is None:
                saved.on_gpu = torch.empty_like(buffer, device="cuda")
                self._copy(saved.on_gpu, buffer)
            self.buffers[buffer.shape, buffer.stride(), buffer.dtype].append(buffer)
            saved.on_host = None

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
