"""Measure the cost of a decoder block with fake tensors: nothing is computed or allocated.

Eagerly, autograd says what it saves. Compiled, AOTAutograd cuts the block into a forward and a
backward graph as torch.compile does; element-wise operations between matrix multiplications and
attention then run as few kernels, which read what comes from outside and write what goes there."""

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

LENGTHS = (128, 256)  # of the traced samples: what grows with the square of it shows
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
_FREE = {"view", "expand", "permute", "transpose", "alias", "detach", "getitem", "t", "slice"}


def trace(document: dict[str, Any]) -> Traced:
    """Return the costs of a model's first block. Raises whatever transformers raises for a config
    that it cannot run."""
    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")
        net = from_config(make_config(document, 0.0, 1), torch.bfloat16)
        short, long = ([_eager(*_call(net, n)), _compiled(*_call(net, n))] for n in LENGTHS)

    def per_token(way: int, name: str) -> tuple[float, float]:
        one, other = short[way][name] / LENGTHS[0], long[way][name] / LENGTHS[1]
        slope = (other - one) / (LENGTHS[1] - LENGTHS[0])
        return one - slope * LENGTHS[0], slope

    return Traced(
        attention_width=round(long[1]["attention"] / (4 * LENGTHS[1] ** 2)),
        fused=bool(long[1]["fused"]),
        **{
            f"{name}_{way}": per_token(index, name)
            for index, way in enumerate(("eager", "compiled"))
            for name in ("kept", "forward", "backward")
        },
        kept_selective=per_token(1, "selective"),
    )


def _call(net: Any, length: int) -> tuple[nn.Module, torch.Tensor, list[Any], Any]:
    """Return the first block, the hidden states that the model gives it, its other arguments,
    flat, and their structure."""
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
    except (IndexError, AttributeError, ValueError):  # a block that returns more than hidden states
        if not calls:
            raise
    finally:
        del block.forward
    x, args, options = calls[0]
    flat, spec = pytree.tree_flatten((args, options))
    return block, x.detach().requires_grad_(), flat, spec


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if torch.is_tensor(value) else 0


def _unique_bytes(values: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, those that share memory once."""
    sizes = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in values}
    return sum(sizes.values())


class _Traffic(TorchDispatchMode):
    """Counts bytes that operations other than products and attention read and write, one by one."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counts = func.namespace == "aten" and "view" not in str(func) and not func.is_view
        if counts and not (_is_product(func) or _is_attention(func)):
            tensors = [each for each in pytree.tree_leaves((args, result)) if torch.is_tensor(each)]
            self.bytes += sum(map(_bytes, tensors))
        return result


def _is_product(func: Any) -> bool:
    return getattr(func, "overloadpacket", None) in _PRODUCTS


def _is_attention(func: Any) -> bool:
    return "_scaled_dot_product" in str(func)


def _eager(block: nn.Module, x: torch.Tensor, flat: list[Any], spec: Any) -> dict[str, float]:
    args, options = pytree.tree_unflatten(flat, spec)
    outside = {each.untyped_storage()._cdata for each in block.parameters()}
    outside |= {each.untyped_storage()._cdata for each in flat if torch.is_tensor(each)}
    saved: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        if value.untyped_storage()._cdata not in outside:
            saved.append(value)
        return value

    with _Traffic() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = _first(block(x, *args, **options))
    kept = _unique_bytes(saved)
    with _Traffic() as backward:
        torch.autograd.grad(y, [x, *block.parameters()], torch.ones_like(y), allow_unused=True)
    return {"kept": kept, "forward": forward.bytes, "backward": backward.bytes}


def _compiled(block: nn.Module, x: torch.Tensor, flat: list[Any], spec: Any) -> dict[str, float]:
    graphs: list[Any] = []
    names = [name for name, _ in block.named_parameters()]
    places = [place for place, each in enumerate(flat) if torch.is_tensor(each)]

    def keep(gm: Any, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    def run(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        filled = list(flat)
        for place, tensor in zip(places, tensors[: len(places)], strict=True):
            filled[place] = tensor
        parameters = dict(zip(names, tensors[len(places) :], strict=True))
        args, options = pytree.tree_unflatten(filled, spec)
        return _first(torch.func.functional_call(block, parameters, (x, *args), options))

    compiled = aot_function(
        run, fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table(),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )  # fmt: skip
    y = compiled(x, *(flat[place] for place in places), *block.parameters())
    torch.autograd.grad(y, [x, *block.parameters()], torch.ones_like(y), allow_unused=True)
    forward, backward = graphs
    (outputs,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    own = {node.meta["val"].untyped_storage()._cdata for node in inputs[1:]}
    saved = [node.meta["val"] for node in outputs[1:] if node is not None]
    saved = [each for each in saved if torch.is_tensor(each)]
    saved = [each for each in saved if each.untyped_storage()._cdata not in own]
    found = {
        "kept": _unique_bytes(saved), "forward": _traffic(forward), "backward": _traffic(backward),
        "attention": 0.0, "fused": 0.0,
    }  # fmt: skip
    products = []
    for node in forward.graph.nodes:
        if node.op != "call_function":
            continue
        if _is_attention(node.target):
            q = node.args[0].meta["val"]
            found["attention"] += 4 * q.shape[-2] * q.numel()
            found["fused"] = 1.0
            products += [each for each in node.meta["val"] if torch.is_tensor(each)]
        elif _is_product(node.target):
            products.append(node.meta["val"])
            if node.target.overloadpacket in (_aten.bmm, _aten.baddbmm):
                a, b = (each.meta["val"] for each in node.args[-2:])
                found["attention"] += 2 * a.numel() * b.shape[-1]
    found["selective"] = _bytes(x) + sum(map(_bytes, products[:-1]))
    return found


def _traffic(graph: Any) -> float:
    """Return the bytes that element-wise kernels read and write, if operations that feed each other
    are one kernel."""
    group: dict[Any, int] = {}  # node -> its kernel
    for node in graph.graph.nodes:
        if node.op != "call_function" or _is_product(node.target) or _is_attention(node.target):
            continue
        before = {group[each] for each in node.all_input_nodes if each in group}
        number = min(before, default=len(group) + 1)
        group[node] = number
        for other, kernel in group.items():
            if kernel in before:
                group[other] = number
    moved = 0.0
    read: set[tuple[Any, int]] = set()
    for node, kernel in group.items():
        if _is_free(node):
            continue
        for source in map(_origin, node.all_input_nodes):
            if group.get(source) != kernel or source.op == "placeholder":
                read.add((source, kernel))
        users = [user for each in _views(node) for user in each.users]
        if any(group.get(user) != kernel for user in users):
            moved += _bytes(node.meta.get("val"))
    return moved + sum(_bytes(source.meta.get("val")) for source, _ in read)


def _is_free(node: Any) -> bool:
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return name.removeprefix("_unsafe_") in _FREE


def _origin(node: Any) -> Any:
    while node.op == "call_function" and _is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _views(node: Any) -> list[Any]:
    found = [node]
    for each in found:
        found += [user for user in each.users if user.op == "call_function" and _is_free(user)]
    return found
