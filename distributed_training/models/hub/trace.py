"""Measure the cost of a decoder block from its graphs. The block is never executed, and its
matrices need no memory.

AOTAutograd splits the block into a forward and a backward graph. In eager mode, every operation
reads its inputs and writes its output. In compiled mode, the element-wise operations between matrix
multiplications and attention are fused into kernels, which read only inputs from outside the kernel
and write only outputs that are used outside."""

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from functorch.compile import (
    aot_function,
    default_partition,
    min_cut_rematerialization_partition,
    nop,
)
from torch._inductor.decomposition import select_decomp_table

from distributed_training.models import Traced
from distributed_training.models.hub import UnsupportedError
from distributed_training.models.hub.model import build_net, find_blocks, read_num_positions

# Length of the longer of the two traced samples. Comparing both samples shows the costs that grow
# with the square of the length.
LONGEST = 256
_aten = torch.ops.aten
_MATMULS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
# Operations that neither read nor write memory
_FREE = {"view", "expand", "permute", "transpose", "alias", "detach", "getitem", "t", "slice"}


def trace(document: dict[str, Any]) -> Traced:
    """Return the costs of a model's first block. If transformers cannot run the config, its
    exception is passed on. Raises UnsupportedError if the block leaves a parameter unused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = build_net(document, 0.0, 1, torch.bfloat16)
        net._apply(_allocate)
        longest = min(LONGEST, read_num_positions(net.config))
        lengths = (longest // 2, longest)
        eager, compiled = ([_cost(net, n, fused=fused) for n in lengths] for fused in (False, True))

    def per_token(costs: list[dict[str, float]], name: str) -> tuple[float, float]:
        short, long = (cost[name] / length for cost, length in zip(costs, lengths, strict=True))
        slope = (long - short) / (lengths[1] - lengths[0])
        return short - slope * lengths[0], slope

    return Traced(
        attention_width=round(compiled[1]["attention"] / (4 * longest**2)),
        fused=bool(compiled[1]["one_kernel"]),
        **{
            f"{name}_{mode}": per_token(costs, name)
            for mode, costs in (("eager", eager), ("compiled", compiled))
            for name in ("kept", "forward", "backward")
        },
        kept_selective=per_token(compiled, "selective"),
    )


def _allocate(tensor: torch.Tensor) -> torch.Tensor:
    """Replace a parameter on "meta" by zeros on the CPU. Matrices repeat a single number, so they
    need no memory. Vectors are contiguous, because linear layers run different operations for other
    biases."""
    if not tensor.is_meta:
        return tensor
    shape = tensor.shape if tensor.dim() < 2 else (1,)
    return torch.zeros(shape, dtype=tensor.dtype, device="cpu").expand(tensor.shape)


class _StopError(Exception):
    """Exception that ends a trace early, once the requested value is known."""


def _graphs(net: Any, length: int, *, fused: bool) -> list[Any]:
    """Return the forward and backward graphs of the first block for a sample of `length` tokens.
    They are split as in compiled mode if `fused` is True, and as in eager mode otherwise."""
    _, inner, (block, *_) = find_blocks(net)
    tensors = dict(block.named_parameters()) | dict(block.named_buffers())
    cut = min_cut_rematerialization_partition if fused else default_partition
    graphs: list[Any] = []

    def stop(*args: Any, **options: Any) -> None:
        raise _StopError(args, options)

    def run(x: torch.Tensor, args: Any, options: Any, *values: torch.Tensor) -> torch.Tensor:
        replacements = dict(zip(tensors, values, strict=True))
        output = torch.func.functional_call(block, replacements, (x, *args), options)
        hidden_states: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden_states

    def keep(*values: Any, **options: Any) -> Any:
        graphs.extend(cut(*values, **options))
        raise _StopError

    block.forward = stop
    try:
        inner(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    except _StopError as call:
        (x, *args), options = call.args
    del block.forward
    table = select_decomp_table() if fused else None  # the operations that Inductor sees
    with contextlib.suppress(_StopError):
        compiled = aot_function(run, fw_compiler=nop, decompositions=table, partition_fn=keep)
        compiled(x.detach().requires_grad_(), args, options, *tensors.values())
    names = [name for name, _ in block.named_parameters()]
    gradients = graphs[1].graph.output_node().args[0][-len(tensors) :]
    unused = [name for name, value in zip(names, gradients, strict=False) if value is None]
    if unused:  # for example, parameters of attention to an encoder
        raise UnsupportedError(f"has blocks that do not use {unused[0]}")
    return graphs


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if torch.is_tensor(value) else 0


def _storages(nodes: Iterable[Any]) -> set[torch.UntypedStorage]:
    """Return the storages of the nodes' tensors. Tensors that share a storage count once."""
    values = [node.meta.get("val") for node in nodes if node is not None]
    return {value.untyped_storage() for value in values if torch.is_tensor(value)}


def _is_matmul(node: Any) -> bool:
    return getattr(node.target, "overloadpacket", None) in _MATMULS


def _is_attention(node: Any) -> bool:
    return "_scaled_dot_product" in str(node.target)


def _cost(net: Any, length: int, *, fused: bool) -> dict[str, float]:
    """Return the costs of a block. Element-wise operations are fused, as in compiled mode, if
    `fused` is True.

    "kept" is the number of bytes that the block keeps for its backward pass. "selective" is that
    number if only the results of matrix multiplications and attention are kept. "forward" and
    "backward" are the numbers of bytes that the element-wise kernels of each pass read and write.
    "attention" is the FLOPs of attention, and "one_kernel" is 1 if attention is one kernel."""
    forward, backward = _graphs(net, length, fused=fused)
    x, *others = forward.graph.find_nodes(op="placeholder")
    saved = _storages(forward.graph.output_node().args[0][1:]) - _storages(others)
    costs = {
        "kept": sum(storage.nbytes() for storage in saved),
        "forward": _traffic(forward, fused=fused), "backward": _traffic(backward, fused=fused),
        "attention": 0.0, "one_kernel": 0.0,
    }  # fmt: skip
    results: list[Any] = [x.meta["val"]]  # of matrix multiplications and attention
    for node in forward.graph.nodes:
        if _is_attention(node):
            q = node.args[0].meta["val"]
            costs["attention"] += 4 * q.shape[-2] * q.numel()
            costs["one_kernel"] = 1.0
            results.extend(node.meta["val"])
        elif _is_matmul(node):
            results.append(node.meta["val"])
            if node.target.overloadpacket in (_aten.bmm, _aten.baddbmm):
                a, b = (factor.meta["val"] for factor in node.args[-2:])
                costs["attention"] += 2 * a.numel() * b.shape[-1]
    costs["selective"] = sum(map(_bytes, results[:-1]))
    return costs


def _traffic(graph: Any, *, fused: bool) -> float:
    """Return the number of bytes that element-wise kernels read and write. If `fused` is True,
    operations that feed each other form one kernel."""
    kernels: dict[Any, int] = {}  # node -> number of its kernel
    for node in graph.graph.nodes:
        if node.op != "call_function" or _is_matmul(node) or _is_attention(node):
            continue
        sources = node.all_input_nodes if fused else ()
        merged = {kernels[source] for source in sources if source in kernels}
        number = min(merged, default=len(kernels) + 1)
        kernels[node] = number
        for other, kernel in kernels.items():
            if kernel in merged:
                kernels[other] = number
    # Node -> numbers of the kernels that read it. None means another operation or the graph's
    # result.
    readers: dict[Any, set[int | None]] = defaultdict(set)
    for node in graph.graph.nodes:
        if not _is_free(node):
            for source in map(_origin, node.all_input_nodes):
                readers[source].add(kernels.get(node))
    total = 0.0
    for source, numbers in readers.items():
        writer = kernels.get(source)
        num_writes = writer is not None and numbers != {writer}
        total += (num_writes + len(numbers - {None, writer})) * _bytes(source.meta.get("val"))
    return total


def _is_free(node: Any) -> bool:
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return node.op == "call_function" and name.removeprefix("_unsafe_") in _FREE


def _origin(node: Any) -> Any:
    """Return the node whose memory a chain of views reads."""
    while _is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
