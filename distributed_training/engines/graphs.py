"""Capture a whole optimizer step as one CUDA graph, so that the host launches one graph per step
instead of many kernels.

With small batches, the host cannot launch kernels as fast as a GPU runs them. The graph contains
the forward and backward passes, collectives, clipping and the optimizer."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from distributed_training.parallel.agree import succeeds_on_all_ranks

NUM_EAGER_STEPS = 12  # steps before the capture; PyTorch requires at least 11 for DDP
# Memory that a graph needs, in bytes per byte of tensors at their peak. With FSDP and an
# 8B-parameter model, 28.9 GiB was measured for 23.0 GiB of tensors.
POOL_BYTES_PER_TENSOR_BYTE = 1.25
FALLBACK_WARNING = "Each step runs eagerly instead of as one CUDA graph"


def to_device(device: torch.device, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Return the arrays as tensors on `device`. Copies to a GPU do not block the host."""
    tensors = tuple(map(torch.from_numpy, arrays))
    if device.type == "cpu":
        return tensors
    return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)


class StepGraph:
    """Optimizer step that first runs eagerly. If `captures` is True, the step is later captured as
    a CUDA graph and replayed.

    `step` takes tensors on the device and returns tensors. Everything else that `step` reads or
    writes, such as parameters, optimizer state and learning rate, must keep its memory address.
    `step` must not wait for the GPU, and its control flow must not depend on values on the GPU."""

    def __init__(
        self, step: Callable[..., tuple[torch.Tensor, ...]], device: torch.device, *, captures: bool
    ) -> None:
        self.step = step
        self.device = device
        self.captures = captures
        self.num_steps = 0  # steps since the last `drop_graph`
        self.graph: torch.cuda.CUDAGraph | None = None
        # Tensors that the graph reads and writes
        self.inputs: list[torch.Tensor] = []
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if captures:
            # Capture, and DDP's hooks during capture, need a stream other than the default one.
            torch.cuda.set_stream(torch.cuda.Stream(device))
            self.pool = torch.cuda.MemPool()

    def __call__(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Run a step and return its results in memory that the next step does not overwrite."""
        tensors = self._upload(arrays)
        if self.captures and self.num_steps == NUM_EAGER_STEPS:
            self._capture(tensors)
        self.num_steps += 1
        if self.graph is None:
            return self.step(*tensors)
        for graph_input, tensor in zip(self.inputs, tensors, strict=True):
            graph_input.copy_(tensor)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Let code that runs between two steps allocate tensors in the graph's memory. These
        tensors must be freed before the next step starts."""
        if self.graph is None:
            yield
        else:
            with torch.cuda.use_mem_pool(self.pool, self.device):
                yield

    def drop_graph(self) -> None:
        """Drop the graph, so that a later step captures a new one. Call this method if optimizer
        state or parameters have moved in memory."""
        if self.graph is not None:
            self.graph = None
            self.num_steps = 0

    def _upload(self, arrays: tuple[np.ndarray, ...]) -> tuple[torch.Tensor, ...]:
        """Copy arrays to the device while the previous step runs."""
        with torch.cuda.stream(self.copy_stream):
            tensors = to_device(self.device, *arrays)
        if self.copy_stream is not None:
            torch.cuda.current_stream().wait_stream(self.copy_stream)
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream())
        return tensors

    def _check_memory(self) -> None:
        """Raise RuntimeError if the GPU has too little free memory for the graph.

        Memory is checked before the capture, because an interrupted capture cannot be undone
        cleanly. During the capture, the allocator cannot return memory to the driver."""
        torch.cuda.synchronize(self.device)
        compute_stream = torch.cuda.current_stream(self.device).cuda_stream
        segments = torch.cuda.memory_snapshot()
        # Communication streams have their own memory segments.
        communication_bytes = sum(
            s["total_size"] for s in segments if s["stream"] != compute_stream
        )
        tensor_bytes = torch.cuda.max_memory_allocated(self.device)
        tensor_bytes -= torch.cuda.memory_allocated(self.device)
        needed_bytes = int(POOL_BYTES_PER_TENSOR_BYTE * tensor_bytes) + communication_bytes
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        if needed_bytes > free_bytes:
            sizes = f"{needed_bytes / 2**30:.1f} GiB, but only {free_bytes / 2**30:.1f} GiB is free"
            raise RuntimeError(f"a CUDA graph of the step would need {sizes}")

    def _disable_capture(self) -> None:
        """Free the memory that was reserved for the graph, and prevent further attempts to capture
        a graph."""
        self.captures = False
        self.inputs = []
        self.outputs = ()
        del self.pool
        torch.cuda.empty_cache()

    def _capture(self, tensors: Sequence[torch.Tensor]) -> None:
        """Capture a step without running it. If the capture fails on any rank, no rank keeps a
        graph. All ranks must call this method."""
        if not succeeds_on_all_ranks(self._check_memory, FALLBACK_WARNING):
            self._disable_capture()
            return
        self.inputs = [t.clone() for t in tensors]
        graph = torch.cuda.CUDAGraph()

        def capture_step() -> None:
            # Other threads, such as NCCL's watchdog, may query GPU events during the capture.
            with torch.cuda.graph(
                graph,
                pool=self.pool.id,
                stream=torch.cuda.current_stream(),
                capture_error_mode="thread_local",
            ):
                self.outputs = self.step(*self.inputs)

        if succeeds_on_all_ranks(capture_step, FALLBACK_WARNING):
            self.graph = graph
        else:
            del graph
            self._disable_capture()
