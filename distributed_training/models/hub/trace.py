"""Measure the memory of a decoder block by running it on fake tensors, which have no values. The
block's matrices need no memory.

In eager mode, a block keeps the tensors that autograd saves. In compiled mode, it keeps the inputs
of matrix multiplications and attention, and their results if other operations read them. From
these results, torch.compile recomputes everything else."""

import warnings
from collections import defaultdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed_training.models.hub import UnsupportedError, model

# Maximum length of the longer of the two traced samples. Comparing the two samples shows which
# costs grow with the square of the length.
MAX_LENGTH = 256
_aten = torch.ops.aten
_BATCHED_MATMULS = {_aten.bmm, _aten.baddbmm}  # Outside attention, blocks use none.
_MATMULS = {_aten.mm, _aten.addmm, *_BATCHED_MATMULS}
# Values per token and hidden unit that predict/costs/ adds to ModelSize.split_values
_UNSPLIT_VALUES = {"eager": 4, "compiled": 4, "selective": 2}
_Storages = set[torch.UntypedStorage]


def trace(document: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelSize that are measured on a model's first block. If transformers
    cannot run the model, the exception from transformers is propagated. Raises UnsupportedError if
    the block leaves a parameter unused."""
    costs = defaultdict[str, list[float]](list)  # per token of the shorter and the longer sample
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = model.build_net(model.make_config(document, max_layers=1), torch.bfloat16)
        net._apply(_allocate)
        long_length = min(MAX_LENGTH, model.read_num_positions(net.config))
        short_length = long_length // 2
        for length in (short_length, long_length):
            recorder = _run_block(net, length)
            for name, storages in recorder.kept().items():
                num_bytes = sum(storage.nbytes() for storage in storages)
                hidden_values = _UNSPLIT_VALUES[name] * net.get_input_embeddings().weight.shape[1]
                costs[name].append(num_bytes / 2 / length - hidden_values)
    linear_costs = {}
    for name, (short, long) in costs.items():
        slope = (long - short) / (long_length - short_length)
        linear_costs[name] = (short - slope * short_length, slope)
    return {
        "attention_width": round(recorder.attention_flops / (4 * long_length**2)),
        "fuses_attention": recorder.fused,
        "traced_values": linear_costs,
    }


def _allocate(tensor: torch.Tensor) -> torch.Tensor:
    """Replace a parameter on the meta device with zeros on the CPU. Matrices repeat a single
    number, so they need no memory. Vectors are contiguous, because linear layers run different
    operations for non-contiguous biases."""
    if not tensor.is_meta:
        return tensor
    shape = tensor.shape if tensor.dim() < 2 else (1,)
    return torch.zeros(shape, dtype=tensor.dtype, device="cpu").expand(tensor.shape)


class _BlockStartError(Exception):
    """Exception that ends a forward pass at the model's first block, with the block's arguments."""


def _run_block(net: Any, length: int) -> "_Recorder":
    """Record the first block's forward pass for a sample of `length` tokens."""
    _, inner, (block, *_) = model.find_blocks(net)
    tensors = dict(block.named_parameters()) | dict(block.named_buffers())

    def stop(_block: Any, args: Any, options: Any) -> None:
        raise _BlockStartError(args, options)

    hook = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        inner(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    except _BlockStartError as start:
        (x, *others), options = start.args
    hook.remove()
    x = x.detach().requires_grad_()
    recorder = _Recorder(x, _storages((others, options, tensors)))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    saved = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor)
    with fake, recorder, saved:
        block(x, *others, **options)
    for name, parameter in block.named_parameters():
        if parameter.untyped_storage() not in recorder.read:  # for example, of cross-attention
            raise UnsupportedError(f"has blocks that do not use {name}")
    return recorder


class _Recorder(TorchDispatchMode):
    """Record what a block's forward pass keeps for the backward pass."""

    def __init__(self, x: torch.Tensor, constants: _Storages) -> None:
        """Create a recorder for a block with the input `x`. `constants` are the storages of its
        parameters, its buffers and its other inputs."""
        super().__init__()
        self.constants = constants
        self.read = _storages(x)  # by any operation
        self.saved: _Storages = set()  # by autograd
        self.matrix_inputs: _Storages = set()  # of matrix multiplications and attention
        self.results = [*_storages(x)]  # x, and results of matrix multiplications and attention
        self.sums = _storages(x)  # `results`, and sums of them
        # Storage -> those `sums` from which it is computed without matrix multiplications
        self.origins: dict[torch.UntypedStorage, _Storages] = {}
        self.attention_flops = 0
        self.fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = _storages((args, kwargs)), _storages(result)
        self.read |= inputs
        if "_scaled_dot_product" in str(func):
            self.fused = True
            self.attention_flops += 4 * args[0].shape[-2] * args[0].numel()
            self.matrix_inputs |= outputs  # for the backward pass, as the softmax's statistics
        elif func.overloadpacket in _BATCHED_MATMULS:
            self.attention_flops += 2 * args[-2].numel() * args[-1].shape[-1]
        if "_scaled_dot_product" in str(func) or func.overloadpacket in _MATMULS:
            self.matrix_inputs |= inputs
            self.results += outputs
            self.sums |= outputs
        elif func.overloadpacket is _aten.add and inputs <= self.sums:
            self.sums |= outputs
        else:
            origins = (self.origins.get(storage, set()) for storage in inputs - self.sums)
            new_origins = (inputs & self.sums).union(*origins)
            self.origins |= dict.fromkeys(outputs - self.sums, new_origins)
        return result

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves for the backward pass."""
        self.saved |= _storages(tensor)
        return tensor

    def kept(self) -> dict[str, _Storages]:
        """Return the storages that the block keeps, for each mode of ModelSize.split_values."""
        compiled = self.matrix_inputs | (self.sums & self.saved)
        for storage in self.saved - self.matrix_inputs:
            compiled |= self.origins.get(storage, set())
        return {
            "eager": self.saved - self.constants,
            "compiled": compiled - self.constants,
            # The last result is the block's output, which is the next block's input.
            "selective": set(self.results[:-1]),
        }


def _storages(values: Any) -> _Storages:
    return {leaf.untyped_storage() for leaf in tree_leaves(values) if torch.is_tensor(leaf)}
