"""Measure the cost of a decoder block with fake tensors, without computing or allocating anything.

In eager mode, autograd reports the tensors that it saves. In compiled mode, AOTAutograd splits the
block into a forward and a backward graph, as torch.compile does. The element-wise operations
between matrix multiplications and attention are then fused into kernels, which read only inputs
from outside the kernel and write only outputs that are used outside."""

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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
        short, long = ([_eager(*_call(net, n)), _compiled(*_call(net, n))] for n in LENGTHS)

    def per_token(mode: int, name: str) -> tuple[float, float]:
        short_cost = short[mode][name] / LENGTHS[0]
        long_cost = long[mode][name] / LENGTHS[1]
        slope = (long_cost - short_cost) / (LENGTHS[1] - LENGTHS[0])
        return short_cost - slope * LENGTHS[0], slope

    return Traced(
        attention_width=round(long[1]["attention"] / (4 * LENGTHS[1] ** 2)),
        fused=bool(long[1]["fused"]),
        **{
            f"{name}_{mode}": per_token(index, name)
            for index, mode in enumerate(("eager", "compiled"))
            for name in ("kept", "forward", "backward")
        },
        kept_selective=per_token(1, "selective"),
    )


def _call(net: Any, length: int) -> tuple[nn.Module, torch.Tensor, list[Any], Any]:
    """Capture the first block's call in a sample of `length` tokens. Return the block, its input
    hidden states, its other arguments as a flat list, and the structure of that list."""
    path, (block, *_) = find_blocks(net)
    calls: list[Any] = []

    def record(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append((x, args, options))
        return x

    block.forward = record  # type: ignore[method-assign]
    ids = torch.zeros(1, length, dtype=torch.int64)
    inner = net.get_submodule(path.rpartition(".")[0])
    try:
        inner(input_ids=ids, use_cache=False)
    except (IndexError, AttributeError, ValueError):  # if blocks return more than hidden states
        if not calls:
            raise
    finally:
        del block.forward
    x, args, options = calls[0]
    flat, spec = pytree.tree_flatten((args, options))
    return block, x.detach().requires_grad_(), flat, spec


def _hidden_states(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if torch.is_tensor(value) else 0


def _unique_bytes(values: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors. Memory that several tensors share counts once."""
    sizes = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in values}
    return sum(sizes.values())


class _Traffic(TorchDispatchMode):
    """Count the bytes that operations other than matrix multiplications and attention read and
    write, one operation at a time."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counts = func.namespace == "aten" and "view" not in str(func) and not func.is_view
        if counts and not (_is_matmul(func) or _is_attention(func)):
            self.bytes += sum(map(_bytes, pytree.tree_leaves((args, result))))
        return result


def _is_matmul(func: Any) -> bool:
    return getattr(func, "overloadpacket", None) in _MATMULS


def _is_attention(func: Any) -> bool:
    return "_scaled_dot_product" in str(func)


def _eager(block: nn.Module, x: torch.Tensor, flat: list[Any], spec: Any) -> dict[str, float]:
    """Return the bytes that a block keeps for its backward pass, and the bytes that each pass reads
    and writes, in eager mode."""
    args, options = pytree.tree_unflatten(flat, spec)
    inputs = [*block.parameters(), *filter(torch.is_tensor, flat)]
    outside = {tensor.untyped_storage()._cdata for tensor in inputs}
    saved: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        if value.untyped_storage()._cdata not in outside:
            saved.append(value)
        return value

    with _Traffic() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = _hidden_states(block(x, *args, **options))
    kept = _unique_bytes(saved)
    with _Traffic() as backward:
        torch.autograd.grad(y, [x, *block.parameters()], torch.ones_like(y), allow_unused=True)
    return {"kept": kept, "forward": forward.bytes, "backward": backward.bytes}


def _compiled(block: nn.Module, x: torch.Tensor, flat: list[Any], spec: Any) -> dict[str, float]:
    """Return the costs of `_eager` as torch.compile would cause them. Add "attention", the FLOPs of
    attention; "fused", 1 if it is one kernel; and "selective", the bytes that a block keeps if only
    results of matrix multiplications and attention are kept."""
    graphs: list[Any] = []
    names = [name for name, _ in block.named_parameters()]
    tensor_indices = [index for index, value in enumerate(flat) if torch.is_tensor(value)]

    def keep(gm: Any, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    def run(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        filled = list(flat)
        count = len(tensor_indices)
        for index, tensor in zip(tensor_indices, tensors[:count], strict=True):
            filled[index] = tensor
        parameters = dict(zip(names, tensors[count:], strict=True))
        args, options = pytree.tree_unflatten(filled, spec)
        return _hidden_states(torch.func.functional_call(block, parameters, (x, *args), options))

    compiled = aot_function(
        run, fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table(),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )  # fmt: skip
    y = compiled(x, *(flat[index] for index in tensor_indices), *block.parameters())
    torch.autograd.grad(y, [x, *block.parameters()], torch.ones_like(y), allow_unused=True)
    forward, backward = graphs
    (outputs,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    outside = {node.meta["val"].untyped_storage()._cdata for node in inputs[1:]}
    saved = [node.meta["val"] for node in outputs[1:] if node is not None]
    saved = [value for value in saved if torch.is_tensor(value)]
    saved = [tensor for tensor in saved if tensor.untyped_storage()._cdata not in outside]
    costs = {
        "kept": _unique_bytes(saved), "forward": _traffic(forward), "backward": _traffic(backward),
        "attention": 0.0, "fused": 0.0,
    }  # fmt: skip
    results: list[torch.Tensor] = []  # of matrix multiplications and attention
    for node in forward.graph.nodes:
        if node.op != "call_function":
            continue
        if _is_attention(node.target):
            q = node.args[0].meta["val"]
            costs["attention"] += 4 * q.shape[-2] * q.numel()
            costs["fused"] = 1.0
            results += [value for value in node.meta["val"] if torch.is_tensor(value)]
        elif _is_matmul(node.target):
            results.append(node.meta["val"])
            if node.target.overloadpacket in (_aten.bmm, _aten.baddbmm):
                a, b = (factor.meta["val"] for factor in node.args[-2:])
                costs["attention"] += 2 * a.numel() * b.shape[-1]
    costs["selective"] = _bytes(x) + sum(map(_bytes, results[:-1]))
    return costs


def _traffic(graph: Any) -> float:
    """Return the bytes that element-wise kernels read and write, if operations that feed each other
    are fused into one kernel."""
    kernels: dict[Any, int] = {}  # node -> number of its kernel
    for node in graph.graph.nodes:
        if node.op != "call_function" or _is_matmul(node.target) or _is_attention(node.target):
            continue
        merged = {kernels[source] for source in node.all_input_nodes if source in kernels}
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
