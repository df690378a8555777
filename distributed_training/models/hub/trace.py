"""Measure the cost of a decoder block by tracing it. The block is never executed, and its matrices
need no memory.

AOTAutograd splits the block into a forward and a backward graph. In eager mode, every operation
reads its inputs and writes its output. In compiled mode, the element-wise operations between matrix
multiplications and attention are fused into kernels. A kernel reads only inputs from outside the
kernel and writes only outputs that are used outside."""

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import functorch.compile as aot
import torch
from torch._inductor.decomposition import select_decomp_table

from distributed_training.models import TracedCosts
from distributed_training.models.hub import UnsupportedError, model

# Maximum length of the longer of the two traced samples. Comparing the two samples shows which
# costs grow with the square of the length.
MAX_LENGTH = 256
_aten = torch.ops.aten
_MATMULS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
# Operations that neither read nor write memory
_VIEW_OPS = {"view", "expand", "permute", "transpose", "alias", "detach", "getitem", "t", "slice"}


def trace(document: dict[str, Any]) -> TracedCosts:
    """Return the costs of a model's first block. If transformers cannot run the model, the
    exception from transformers is propagated. Raises UnsupportedError if the block leaves a
    parameter unused."""
    costs = defaultdict[str, list[float]](list)  # per token of the shorter and the longer sample
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = model.build_net(model.make_config(document, max_layers=1), torch.bfloat16)
        net._apply(_allocate)
        long_length = min(MAX_LENGTH, model.read_num_positions(net.config))
        short_length = long_length // 2
        for length in (short_length, long_length):
            for mode, compiled in (("eager", False), ("compiled", True)):
                forward, backward = _graphs(net, length, compiled=compiled)
                costs[f"kept_{mode}"].append(_kept_bytes(forward) / length)
                costs[f"forward_{mode}"].append(_traffic(forward, compiled=compiled) / length)
                costs[f"backward_{mode}"].append(_traffic(backward, compiled=compiled) / length)
            result_bytes, attention_flops = _matrix_costs(forward)
            costs["kept_selective"].append(result_bytes / length)
    linear_costs: dict[str, Any] = {}
    for name, (short, long) in costs.items():
        slope = (long - short) / (long_length - short_length)
        linear_costs[name] = (short - slope * short_length, slope)
    return TracedCosts(
        attention_width=round(attention_flops / (4 * long_length**2)),
        fused=any(map(_is_attention, forward.graph.nodes)),
        **linear_costs,
    )


def _allocate(tensor: torch.Tensor) -> torch.Tensor:
    """Replace a parameter on the meta device with zeros on the CPU. Matrices repeat a single
    number, so they need no memory. Vectors are contiguous, because linear layers run different
    operations for non-contiguous biases."""
    if not tensor.is_meta:
        return tensor
    shape = tensor.shape if tensor.dim() < 2 else (1,)
    return torch.zeros(shape, dtype=tensor.dtype, device="cpu").expand(tensor.shape)


class _TracedError(Exception):
    """Exception that ends a forward pass once the model's first block has been traced."""


def _graphs(net: Any, length: int, *, compiled: bool) -> list[Any]:
    """Return the forward and backward graphs of the first block for a sample of `length` tokens.
    If `compiled` is True, the graphs are split as in compiled mode, otherwise as in eager mode."""
    _, inner, (block, *_) = model.find_blocks(net)
    tensors = dict(block.named_parameters()) | dict(block.named_buffers())
    partition = aot.min_cut_rematerialization_partition if compiled else aot.default_partition
    # Compiled mode traces the operations that Inductor sees.
    decompositions = select_decomp_table() if compiled else None
    graphs: list[Any] = []

    def run(x: torch.Tensor, args: Any, options: Any, tensors: Any) -> Any:
        output = torch.func.functional_call(block, tensors, (x, *args), options)
        return output[0] if isinstance(output, tuple) else output

    def capture_graphs(*values: Any, **options: Any) -> Any:
        graphs.extend(partition(*values, **options))
        raise _TracedError

    def trace_block(_block: Any, args: Any, options: Any) -> None:
        hook.remove()
        x, *other_args = args
        traced = aot.aot_function(
            run, aot.nop, partition_fn=capture_graphs, decompositions=decompositions
        )
        traced(x.detach().requires_grad_(), other_args, options, tensors)

    hook = block.register_forward_pre_hook(trace_block, with_kwargs=True)
    with contextlib.suppress(_TracedError):
        inner(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    gradients = graphs[1].graph.output_node().args[0][-len(tensors) :]
    for (name, _), gradient in zip(block.named_parameters(), gradients, strict=False):
        if gradient is None:  # for example, a parameter of cross-attention
            raise UnsupportedError(f"has blocks that do not use {name}")
    return graphs


def _storages(nodes: Iterable[Any]) -> set[torch.UntypedStorage]:
    """Return the storages of the nodes' tensors. A storage that several tensors share is returned
    once."""
    values = [node.meta.get("val") for node in nodes if node is not None]
    return {value.untyped_storage() for value in values if torch.is_tensor(value)}


def _is_matmul(node: Any) -> bool:
    return getattr(node.target, "overloadpacket", None) in _MATMULS


def _is_attention(node: Any) -> bool:
    return "_scaled_dot_product" in str(node.target)


def _kept_bytes(forward: Any) -> int:
    """Return the number of bytes that a block keeps for its backward pass."""
    _, *inputs = forward.graph.find_nodes(op="placeholder")
    saved = _storages(forward.graph.output_node().args[0][1:]) - _storages(inputs)
    return sum(storage.nbytes() for storage in saved)


def _matrix_costs(forward: Any) -> tuple[int, int]:
    """Return (number of bytes kept, FLOPs of attention) for a block that keeps only the results of
    matrix multiplications and attention."""
    results = [forward.graph.find_nodes(op="placeholder")[0].meta["val"]]
    flops = 0
    for node in forward.graph.nodes:
        if _is_attention(node):
            q = node.args[0].meta["val"]
            flops += 4 * q.shape[-2] * q.numel()
            results.extend(node.meta["val"])
        elif _is_matmul(node):
            results.append(node.meta["val"])
            if node.target.overloadpacket in (_aten.bmm, _aten.baddbmm):
                a, b = (factor.meta["val"] for factor in node.args[-2:])
                flops += 2 * a.numel() * b.shape[-1]
    # The last result is the block's output, which is the next block's input.
    return sum(value.nbytes for value in results[:-1]), flops


def _traffic(graph: Any, *, compiled: bool) -> float:
    """Return the number of bytes that element-wise kernels read and write. If `compiled` is True,
    operations that feed each other form one kernel."""
    kernels: dict[Any, frozenset[Any]] = {}  # node -> all nodes of its kernel
    for node in graph.graph.nodes:
        if node.op == "call_function" and not _is_matmul(node) and not _is_attention(node):
            inputs = node.all_input_nodes if compiled else ()
            kernel = frozenset({node}).union(*(kernels.get(source, ()) for source in inputs))
            kernels |= dict.fromkeys(kernel, kernel)
    # Node -> the kernels that read it. None means another operation or the graph's result.
    readers: dict[Any, set[frozenset[Any] | None]] = defaultdict(set)
    for node in graph.graph.nodes:
        if not _is_view(node):
            for source in map(_origin, node.all_input_nodes):
                readers[source].add(kernels.get(node))
    total = 0.0
    for source, kernels_reading in readers.items():
        writer = kernels.get(source)
        num_writes = writer is not None and kernels_reading != {writer}
        num_reads = len(kernels_reading - {None, writer})
        num_bytes = getattr(source.meta.get("val"), "nbytes", 0)
        total += (num_writes + num_reads) * num_bytes
    return total


def _is_view(node: Any) -> bool:
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return node.op == "call_function" and name.removeprefix("_unsafe_") in _VIEW_OPS


def _origin(node: Any) -> Any:
    """Return the node at the start of the chain of views that ends at `node`. If `node` is not a
    view, return `node`."""
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
