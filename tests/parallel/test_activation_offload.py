"""Test which copies offloaded activations need, and when, without a GPU. tests/gpu compares whole
runs on GPUs."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from distributed_training.parallel.activation_offload import offload_saved

NUM_BLOCKS = 5


class CopyStream:
    """Stream whose copies run as late as a GPU may run them, in the order in which they are
    launched. Until then, their targets contain NaN."""

    def __init__(self):
        self.copies = []
        self.is_captured = False  # whether a CUDA graph of the current step contains this stream

    def wait_stream(self, _compute):
        self.is_captured = True  # The computation itself runs at once.

    def launch(self, target, source, non_blocking):
        assert non_blocking
        storage = StorageWeakRef(source.untyped_storage())
        pending = [other for _, other, _ in self.copies]
        self.copies.append((target, storage, source.stride()))
        if StorageWeakRef(target.untyped_storage()) not in pending:  # no copy reads it
            target.fill_(torch.nan)

    def complete(self):
        assert self.is_captured, "a captured step waits for copies before it"
        for target, weak_storage, stride in self.copies:
            storage = torch.UntypedStorage._new_with_weak_ptr(weak_storage.cdata)
            assert storage is not None, "the memory was freed before it was copied"
            source = torch.empty(0, dtype=target.dtype).set_(storage, 0, target.shape, stride)
            target.data = source.clone()
        self.copies.clear()


@pytest.fixture
def copy_stream(monkeypatch):
    stream = CopyStream()
    compute = SimpleNamespace(wait_stream=lambda other: other.complete())
    empty_like = torch.empty_like

    def launch(*tensors, **options):
        stream.launch(*tensors, **options)

    @contextlib.contextmanager
    def on_stream(_stream):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", launch, raising=False)
            yield

    def empty_on_cpu(tensor, **_):
        return empty_like(tensor)

    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch, "empty_like", empty_on_cpu)
    return stream


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, factors, documents):
        return x + torch.tanh(self.linear(x)) * factors * documents[0]


def train(order, newest_first, num_offloading):
    """Run three steps. F in `order` is the forward pass of a new micro-batch, and B the backward
    pass of the oldest or newest one. Return the gradients, the number of inputs whose memory is in
    use after the forward passes of a step, and the number of host buffers."""
    torch.manual_seed(0)
    blocks = nn.ModuleDict({str(index): Block() for index in range(NUM_BLOCKS)})
    for block in list(blocks.values())[::2]:  # the others save two activations and their weight
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if num_offloading:
        offload_saved(SimpleNamespace(blocks=blocks), num_offloading)
    waiting, inputs, in_use = [], [], 0
    mask = torch.ones(4, 16)  # saved, but the same for all blocks
    factors = torch.rand(NUM_BLOCKS, 4, 16)  # a block's part is saved, but the others keep it
    stream = torch.cuda.Stream()
    for _ in range(3):
        stream.is_captured = False
        for operation in order:
            if operation == "B":
                waiting.pop(-1 if newest_first else 0).backward()
                continue
            x = torch.randn(4, 16)
            for index, block in enumerate(blocks.values()):
                inputs.append(StorageWeakRef(x.untyped_storage()))
                x = block(x, factors[index], documents=(mask,))
            waiting.append(x.square().sum())
            in_use = max(in_use, sum(not storage.expired() for storage in inputs))
        assert not stream.copies, "a captured step ends before its copies"
    num_buffers = 0
    if num_offloading:
        buffers = blocks["0"].forward.func.__self__.buffers
        num_buffers = sum(map(len, buffers.values()))
    return [parameter.grad for parameter in blocks.parameters()], in_use, num_buffers


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize(("order", "count"), [("FB", 5), ("FFBB", 3), ("FFFBBB", 5), ("FFBFBB", 5)])
def test_inputs_return_from_the_host_in_time(order, count, newest_first, copy_stream):
    expected, in_use_without, _ = train(order, newest_first, 0)
    found, in_use, num_buffers = train(order, newest_first, count)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    most_waiting = {"FB": 1, "FFBB": 2, "FFFBBB": 3, "FFBFBB": 2}[order]
    assert in_use_without == most_waiting * NUM_BLOCKS
    assert in_use <= 2 + most_waiting * (NUM_BLOCKS - count)
    assert num_buffers == most_waiting * (count + count // 2)  # used again in each step
