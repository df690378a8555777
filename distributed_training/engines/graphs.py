"""A whole optimizer step as one CUDA graph: launched once instead of kernel by kernel.

At small batches the host cannot launch kernels as fast as a GPU runs them. A graph holds all of a
step's work on the GPU: forward, backward, collectives, clipping, optimizer."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from distributed_training.parallel.agree import works_everywhere

NUM_EAGER_STEPS = 12  # before a step is captured; DDP arranges its buckets in the first eleven
# The graph's memory per byte of its tensors at their peak: 28.9 GiB for 23.0 under FSDP at 8B.
POOL_SHARE = 1.25


def to_device(device: torch.device, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Copies of the arrays on `device`, without waiting where it is a GPU."""
    tensors = tuple(map(torch.from_numpy, arrays))
    if device.type == "cpu":
        return tensors
    return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)


class StepGraph:
    """A step that is launched op by op at first, then, where it `captures`, captured and replayed.
    `step` takes the device's copies of the arrays and returns tensors. Whatever else it reads or
    writes must stay where it is in memory: parameters, optimizer state, learning rate. It must not
    wait for the GPU, nor decide anything by what the GPU computes."""

    def __init__(
        self, step: Callable[..., tuple[torch.Tensor, ...]], device: torch.device, *, captures: bool
    ) -> None:
        self.step = step
        self.device = device
        self.captures = captures
        self.num_steps = 0  # since state was last moved
        self.graph: torch.cuda.CUDAGraph | None = None
        # What the graph reads and writes.
        self.inputs: list[torch.Tensor] = []
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        if captures:
            # Neither capture nor DDP's hooks in it work on the default stream.
            torch.cuda.set_stream(torch.cuda.Stream(device))
            self.pool = torch.cuda.MemPool()

    def __call__(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """What `step` returns, in memory that the next step leaves alone."""
        tensors = self._upload(arrays)
        if self.captures and self.num_steps == NUM_EAGER_STEPS:
            self._capture(tensors)
        self.num_steps += 1
        if self.graph is None:
            return self.step(*tensors)
        for given, tensor in zip(self.inputs, tensors, strict=True):
            given.copy_(tensor)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """What runs between two steps may use the graph's memory, which nothing else can. Nothing
        that it allocates may outlive the next step."""
        if self.graph is None:
            yield
        else:
            with torch.cuda.use_mem_pool(self.pool, self.device):
                yield

    def forget(self) -> None:
        """Capture again: state has moved. Without effect where steps are launched op by op."""
        if self.graph is not None:
            self.graph = None
            self.num_steps = 0

    def _upload(self, arrays: tuple[np.ndarray, ...]) -> tuple[torch.Tensor, ...]:
        """Copies on the device, made while the step before runs."""
        with torch.cuda.stream(self.copies):
            tensors = to_device(self.device, *arrays)
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies)
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream())
        return tensors

    def _check_memory(self) -> None:
        """Raise RuntimeError if the GPU has too little free memory for the graph.

        A capture cannot be undone halfway, and during it the allocator cannot return memory to the
        driver.
        """
        torch.cuda.synchronize(self.device)
        compute = torch.cuda.current_stream(self.device).cuda_stream
        segments = torch.cuda.memory_snapshot()
        # Communication streams have segments of their own.
        beside = sum(each["total_size"] for each in segments if each["stream"] != compute)
        tensors = torch.cuda.max_memory_allocated(self.device)
        tensors -= torch.cuda.memory_allocated(self.device)
        needed = int(POOL_SHARE * tensors) + beside
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        if needed > free:
            sizes = f"{needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB is free"
            raise RuntimeError(f"a CUDA graph of the step would need {sizes}")

    def _release(self) -> None:
        """Give back the memory of a graph that is not captured."""
        self.captures = False
        self.graph = None
        self.inputs = []
        self.outputs = ()
        del self.pool
        torch.cuda.empty_cache()

    def _capture(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record a step without running it, on every rank or on none. Collective."""
        if not works_everywhere(self._check_memory, "launching op by op"):
            self._release()
            return
        self.inputs = [t.clone() for t in tensors]
        graph = torch.cuda.CUDAGraph()

        def record() -> None:
            # Other threads, such as NCCL's watchdog, may go on asking how far the GPU has come.
            with torch.cuda.graph(
                graph,
                pool=self.pool.id,
                stream=torch.cuda.current_stream(),
                capture_error_mode="thread_local",
            ):
                self.outputs = self.step(*self.inputs)

        if works_everywhere(record, "launching op by op"):
            self.graph = graph
        else:
            del graph
            self._release()
