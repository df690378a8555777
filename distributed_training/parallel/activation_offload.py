"""Keep the inputs of checkpointed blocks in host memory between the forward and backward passes."""

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from distributed_training.models.decoder import Decoder


def offload_inputs(model: Decoder) -> None:
    """Let the inputs of a model's blocks, [B, T, D], wait in host memory, in place. Call this
    function after apply_checkpointing and apply_compile. It needs a GPU.

    Copies overlap with computation. An input leaves the GPU while the next block runs forward, and
    returns while the next block runs backward."""
    store = _HostStore()
    for block in model.blocks.values():
        block.forward = functools.partial(store.run, block.forward)


@dataclass(kw_only=True, slots=True, eq=False)
class _Input:
    """Input of a block for one micro-batch. It is on the GPU, in a host buffer, or in both."""

    on_gpu: torch.Tensor | None
    on_host: torch.Tensor | None
    previous: "_Input | None"  # input of the block before, which the backward pass needs next


class _HostStore:
    """Page-locked buffers on the host, which are used again in each step. All copies run in one
    stream, in the order in which they are launched."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        # (shape, strides, dtype) of an input -> buffers that contain nothing
        self.buffers: dict[Any, list[torch.Tensor]] = defaultdict(list)
        self.latest: _Input | None = None  # the input that is being copied to the host

    def run(self, forward: Callable[..., Any], x: torch.Tensor, **options: Any) -> Any:
        """Run a block's forward pass. Move its input to the host. Other saved tensors stay."""
        address = x.data_ptr()  # torch keeps `save`, which must therefore not refer to `x`

        def save(tensor: torch.Tensor) -> Any:
            return self._save(tensor) if tensor.data_ptr() == address else tensor

        with saved_tensors_hooks(save, self._load):
            return forward(x, **options)

    def _save(self, tensor: torch.Tensor) -> _Input:
        # The first input of a step must not wait, because a step that is captured as a CUDA graph
        # cannot wait for copies before it.
        if self.latest is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.latest.on_gpu = None  # now copied, so its memory can be used again
        free = self.buffers[tensor.shape, tensor.stride(), tensor.dtype]
        buffer = free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copy(buffer, tensor.detach())
        self.latest = _Input(on_gpu=tensor.detach(), on_host=buffer, previous=self.latest)
        return self.latest

    def _load(self, saved: Any) -> torch.Tensor:
        """Return a tensor that has been saved. Start to fetch the input that is needed next."""
        if not isinstance(saved, _Input):
            return saved
        if saved is self.latest:
            self.latest = None
        self._fetch(saved)
        torch.cuda.current_stream().wait_stream(self.stream)
        if saved.previous is not None:
            self._fetch(saved.previous)
            saved.previous = None
        assert saved.on_gpu is not None
        return saved.on_gpu

    def _fetch(self, saved: _Input) -> None:
        buffer = saved.on_host
        if buffer is None:
            return
        if saved.on_gpu is None:
            saved.on_gpu = torch.empty_like(buffer, device="cuda")
            self._copy(saved.on_gpu, buffer)
        self.buffers[buffer.shape, buffer.stride(), buffer.dtype].append(buffer)
        saved.on_host = None

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
