"""Measure the cost of a decoder block with fake tensors: nothing is computed or allocated.

AOTAutograd splits the block into a forward and a backward graph. In eager mode, every operation
reads its inputs and writes its output. In compiled mode, the element-wise operations between matrix
multiplications and attention are fused into kernels, which read only inputs from outside the kernel
and write only outputs that are used outside."""

import contextlib
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from functorch.compile import (
    aot_function,
    default_partition,
    min_cut_rematerialization_partition,
    nop,
)
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

from distributed_training.models import Traced
from distributed_training.models.hub.model import find_blocks, from_config, make_config

# Sequence lengths of the traced samples. Two lengths show which costs grow with their square.
LENGTHS = (128, 256)
_aten = torch.ops.aten
_MATMULS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
# Operations that neither read nor write memory
_FREE = {"view", "expand", "permute", "transpose", "alias", "detach", "getitem", "t", "slice"}


def trace(document: dict[str, Any]) -> Traced:
    """Return the costs of a model's first block. If transformers cannot run the config, its
    exception is passed on."""
    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")
        net = from_config(make_config(document, 0.0, 1), torch.bfloat16)
        short, long = ([_cost(net, n, fused=fused) for fused in (False, True)] for n in LENGTHS)

    def per_token(mode: int, name: str) -> tuple[float, float]:
        short_cost = short[mode][name] / LENGTHS[0]
        long_cost = long[mode][name] / LENGTHS[1]
        slope = (long_cost - short_cost) / (LENGTHS[1] - LENGTHS[0])
        return short_cost - slope * LENGTHS[0], slope

    return Traced(
        attention_width=round(long[1]["attention"] / (4 * LENGTHS[1] ** 2)),
        fused=bool(long[1]["one_kernel"]),
        **{
            f"{name}_{mode}": per_token(index, name)
            for index, mode in enumerate(("eager", "compiled"))
            for name in ("kept", "forward", "backward")
        },
        kept_selective=per_token(1, "selective"),
    )


class _StopError(Exception):
    """Ends a pass when it has told what was asked."""


def _call(net: Any, length: int) -> tuple[nn.Module, torch.Tensor, list[Any], dict[str, Any]]:
    """Capture the first block's call in a sample of `length` tokens. Return the block, its input
    hidden states, and its other arguments."""
    path, (block, *_) = find_blocks(net)

    def stop(_block: Any, args: Any, options: Any) -> None:
        raise _StopError(args, options)

    hook = block.register_forward_pre_hook(stop, with_kwargs=True)
    inner = net.get_submodule(path.rpartition(".")[0])
    try:
        inner(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    except _StopError as call:
        (x, *args), options = call.args
    finally:
        hook.remove()
    return block, x.detach().requires_grad_(), args, options


def _hidden_states(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if torch.is_tensor(value) else 0


def _unique_bytes(values: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors. Memory that several tensors share counts once."""
    sizes = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in values}
    return sum(sizes.values())


def _tensors(nodes: Iterable[Any]) -> list[torch.Tensor]:
    values = [node.meta.get("val") for node in nodes if node is not None]
    return [value for value in values if torch.is_tensor(value)]


def _is_matmul(func: Any) -> bool:
    return getattr(func, "overloadpacket", None) in _MATMULS


def _is_attention(func: Any) -> bool:
    return "_scaled_dot_product" in str(func)


def _cost(net: Any, length: int, *, fused: bool) -> dict[str, float]:
    """Return the bytes that a block keeps for its backward pass, and the bytes that each pass reads
    and writes, with element-wise operations `fused` as in compiled mode or not; the FLOPs of
    attention, and 1 if attention is "one_kernel"; and "selective", the bytes that a block keeps if
    only results of matrix multiplications and attention are kept."""
    block, x, args, options = _call(net, length)
    graphs: list[Any] = []
    names = [name for name, _ in block.named_parameters()]
    cut = min_cut_rematerialization_partition if fused else default_partition

    def run(x: Any, args: Any, options: Any, *tensors: torch.Tensor) -> torch.Tensor:
        parameters = dict(zip(names, tensors, strict=True))
        return _hidden_states(torch.func.functional_call(block, parameters, (x, *args), options))

    def keep(*values: Any, **options: Any) -> Any:
        graphs.extend(cut(*values, **options))
        raise _StopError

    table = select_decomp_table() if fused else None
    with contextlib.suppress(_StopError):
        compiled = aot_function(run, fw_compiler=nop, decompositions=table, partition_fn=keep)
        compiled(x, args, options, *block.parameters())
    forward, backward = graphs
    (outputs,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    outside = {tensor.untyped_storage()._cdata for tensor in _tensors(inputs[1:])}
    saved = _tensors(outputs[1:])
    saved = [tensor for tensor in saved if tensor.untyped_storage()._cdata not in outside]
    costs = {
        "kept": _unique_bytes(saved), "forward": _traffic(forward, fused=fused),
        "backward": _traffic(backward, fused=fused), "attention": 0.0, "one_kernel": 0.0,
    }  # fmt: skip
    results: list[torch.Tensor] = []  # of matrix multiplications and attention
    for node in forward.graph.nodes:
        if node.op != "call_function":
            continue
        if _is_attention(node.target):
            q = node.args[0].meta["val"]
            costs["attention"] += 4 * q.shape[-2] * q.numel()
            costs["one_kernel"] = 1.0
            results += [value for value in node.meta["val"] if torch.is_tensor(value)]
        elif _is_matmul(node.target):
            results.append(node.meta["val"])
            if node.target.overloadpacket in (_aten.bmm, _aten.baddbmm):
                a, b = (factor.meta["val"] for factor in node.args[-2:])
                costs["attention"] += 2 * a.numel() * b.shape[-1]
    costs["selective"] = _bytes(x) + sum(map(_bytes, results[:-1]))
    return costs


def _traffic(graph: Any, *, fused: bool) -> float:
    """Return the bytes that element-wise kernels read and write. If they are `fused`, operations
    that feed each other are one kernel."""
    kernels: dict[Any, int] = {}  # node -> number of its kernel
    for node in graph.graph.nodes:
        if node.op != "call_function" or _is_matmul(node.target) or _is_attention(node.target):
            continue
        sources = node.all_input_nodes if fused else ()
        merged = {kernels[source] for source in sources if source in kernels}
        number = min(merged, default=len(kernels) + 1)
        kernels[node] = number
        for other, kernel in kernels.items():
            if kernel in merged:
                kernels[other] = number
    written_bytes = 0.0
    reads: set[tuple[Any, int]] = set()
    for node, kernel in kernels.items():
        if _is_free(node):
            continue
        for source in map(_origin, node.all_input_nodes):
            if kernels.get(source) != kernel or source.op == "placeholder":
                reads.add((source, kernel))
        users = [user for view in _views(node) for user in view.users]
        if any(kernels.get(user) != kernel for user in users):
            written_bytes += _bytes(node.meta.get("val"))
    return written_bytes + sum(_bytes(source.meta.get("val")) for source, _ in reads)


def _is_free(node: Any) -> bool:
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return name.removeprefix("_unsafe_") in _FREE


def _origin(node: Any) -> Any:
    """Return the node whose memory a chain of views reads."""
    while node.op == "call_function" and _is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _views(node: Any) -> list[Any]:
    """Return a node and all views of it, which share its memory."""
    views = [node]
    for view in views:
        views += [user for user in view.users if user.op == "call_function" and _is_free(user)]
    return views
