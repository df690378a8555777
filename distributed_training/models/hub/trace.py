"""Measure the memory of a decoder block by running it on fake tensors, which have no values. The
block's matrices need no memory.

In eager mode, a block keeps the tensors that autograd saves. In compiled mode, it keeps the inputs
of matrix multiplications and attention, and their results if other operations read them. From
these results, torch.compile recomputes everything else."""

import warnings
from collections import defaultdict
from typing import Any

import torch

from distributed_training.models import private
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = model.build_net(
            model.make_config(document, max_layers=1),
            torch.bfloat16,
        )
        private.replace_tensors(net, _allocate)
        long_length = min(MAX_LENGTH, model.read_num_positions(net.config))
        short_length = long_length // 2
        short = _run_block(net, short_length)
        long = _run_block(net, long_length)
    hidden_size = net.get_input_embeddings().weight.shape[1]
    costs = {}
    for mode, num_unsplit in _UNSPLIT_VALUES.items():
        short_cost = short.values_per_token(mode) - num_unsplit * hidden_size
        long_cost = long.values_per_token(mode) - num_unsplit * hidden_size
        slope = (long_cost - short_cost) / (long_length - short_length)
        costs[mode] = (short_cost - slope * short_length, slope)
    return {
        "attention_width": round(long.attention_flops / (4 * long_length**2)),
        "fuses_attention": long.fused,
        "traced_values": costs,
    }


def _allocate(tensor: torch.Tensor) -> torch.Tensor:
    """Replace a parameter on the meta device with zeros on the CPU. Matrices repeat a single
    number, so they need no memory. Vectors are contiguous, because linear layers run different
    operations for non-contiguous biases."""
    if not tensor.is_meta:
        return tensor
    shape = tensor.shape if tensor.dim() < 2 else (1,)
    return torch.zeros(
        shape,
        dtype=tensor.dtype,
        device="cpu",
    ).expand(tensor.shape)


def _run_block(net: Any, length: int) -> "_Recorder":
    """Run a model of one block on a sample of `length` tokens, and record the block's forward
    pass."""
    _, inner, (block,) = model.find_blocks(net)
    tensors = dict(block.named_parameters()) | dict(block.named_buffers())
    recorder = _Recorder()

    def record(
        x: torch.Tensor,
        *others: Any,
        **options: Any,
    ) -> Any:
        recorder.start(x, constants=(others, options, tensors))
        saved = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor)
        with private.FakeTensorMode(allow_non_fake_inputs=True), recorder, saved:
            return forward(x.detach().requires_grad_(), *others, **options)

    forward = block.forward
    block.forward = record
    inner(
        input_ids=torch.zeros(1, length, dtype=torch.int64),
        use_cache=False,
    )
    block.forward = forward
    for name, parameter in block.named_parameters():
        if parameter.untyped_storage() not in recorder.read:  # for example, of cross-attention
            raise UnsupportedError(f"has blocks that do not use {name}")
    return recorder


class _Recorder(private.TorchDispatchMode):
    """Record what a block's forward pass keeps for the backward pass."""

    def start(self, x: torch.Tensor, constants: Any) -> None:
        """Begin to record a block with the input `x` [1, T, D]. `constants` contains its
        parameters, its buffers and its other inputs."""
        self.num_tokens = x.shape[1]
        self.constants = _storages(constants)
        self.read = _storages(x)  # by any operation
        self.saved: _Storages = set()  # by autograd
        self.matrix_inputs: _Storages = set()  # of matrix multiplications and attention
        self.results = [*_storages(x)]  # x, and results of matrix multiplications and attention
        self.sums = _storages(x)  # `results`, and sums of them
        # Storage -> those `sums` from which it is computed without matrix multiplications
        self.origins = defaultdict[torch.UntypedStorage, _Storages](set)
        self.attention_flops = 0
        self.fused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = _storages((args, kwargs))
        outputs = _storages(result)
        self.read |= inputs
        operation = func.overloadpacket
        is_fused_attention = private.is_fused_attention(func)
        if is_fused_attention:
            self.fused = True
            self.attention_flops += 4 * args[0].shape[-2] * args[0].numel()
            self.matrix_inputs |= outputs  # for the backward pass, as the softmax's statistics
        elif operation in _BATCHED_MATMULS:
            self.attention_flops += 2 * args[-2].numel() * args[-1].shape[-1]
        if is_fused_attention or operation in _MATMULS:
            self.matrix_inputs |= inputs
            self.results += outputs
            self.sums |= outputs
        elif operation is _aten.add and inputs <= self.sums:
            self.sums |= outputs
        else:
            origins = inputs & self.sums
            for storage in inputs - self.sums:
                origins |= self.origins[storage]
            for storage in outputs - self.sums:
                self.origins[storage] = origins
        return result

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves for the backward pass."""
        self.saved |= _storages(tensor)
        return tensor

    def values_per_token(self, mode: str) -> float:
        """Return the number of bf16 values per token that the block keeps, for a mode of
        ModelSize.split_values."""
        if mode == "eager":
            kept = self.saved - self.constants
        elif mode == "selective":
            # The last result is the block's output, which is the next block's input.
            kept = set(self.results[:-1])
        else:
            kept = self.matrix_inputs | (self.sums & self.saved)
            for storage in self.saved - self.matrix_inputs:
                kept |= self.origins[storage]
            kept -= self.constants
        return sum(storage.nbytes() for storage in kept) / 2 / self.num_tokens


def _storages(values: Any) -> _Storages:
    leaves = private.tree_leaves(values)
    return {leaf.untyped_storage() for leaf in leaves if torch.is_tensor(leaf)}
