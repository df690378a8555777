"""Find the regions of a block that tensor parallelism can split.

A region is a module in a block, such as attention or an MLP, that gets and returns hidden states
[B, T, D]. Its first layers are split by outputs and its last layer by inputs, as transformers
declares (`base_model_tp_plan`). Each rank computes the region with its shards, and the sum over
ranks is the region's output. The plans are made for inference with other code, so random numbers
test whether this is true. Each rank computes the rest of a block only for its own tokens."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn

Cuts = dict[str, int]  # name of a parameter in a block -> dimension that is split
Inputs = tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]  # x, other arguments and options
_STYLES = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_split_input": 1}


class Call(NamedTuple):
    """Call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    copy: Any  # of an output that is a tensor, before others change it, otherwise None


Calls = dict[str, Call]


@torch.no_grad()
def record_calls(block: nn.Module, inputs: Inputs) -> Calls:
    """Run a block, and return the calls of its modules by name, in the order in which they end."""
    x, others, options = inputs
    calls: Calls = {}

    def record(name: str, _module: Any, args: Any, kwargs: Any, output: Any) -> None:
        copy = output.clone() if torch.is_tensor(output) else None  # Llama 4 changes outputs.
        calls[name] = Call(args, kwargs, output, copy)

    hooks = [
        module.register_forward_hook(functools.partial(record, name), with_kwargs=True)
        for name, module in block.named_modules()
    ]
    block(x, *others, **options)
    for hook in hooks:
        hook.remove()
    return calls


def find_cuts(
    block: nn.Module, regions: dict[str, Cuts], num_heads: int, inputs: Inputs, calls: Calls
) -> tuple[Cuts, list[str], bool]:
    """Return (parameters of a block that can be split, `regions` that the plan splits although the
    parts do not add up, whether other regions mix tokens).

    The block has random weights. `inputs` are two packed records of four tokens each, with which
    `calls` were recorded. The parts are as many as possible, because sums of parts then also add
    up. They are at most `num_heads`."""
    x, *_ = inputs
    if not regions or x.dim() > 3:
        return {}, [], True
    found: Cuts = {}
    wrong = []
    for name, call in calls.items():
        if name not in regions or hidden_states(call.args, call.kwargs).shape != x.shape:
            continue  # such as a flat list of tokens
        if _adds_up(block, name, regions[name], num_heads, calls):
            found |= regions[name]
        else:
            wrong.append(name)
    return found, wrong, _mixes_tokens(block, found, calls, inputs)


def declared_regions(block: nn.Module, plan: Mapping[str, str]) -> dict[str, Cuts]:
    """Return the parameters that `plan` splits in each region of a block. It contains the names of
    parameters and modules in a block. With the outputs of layers, also split what belongs to them:
    parameters with one value for each output."""
    declared: Cuts = {}
    for name, parameter in block.named_parameters():
        dim = _STYLES.get(plan.get(name, plan.get(name.rpartition(".")[0], "")))
        is_output_bias = parameter.dim() == dim == 1
        if dim is not None and parameter.dim() <= 2 and not is_output_bias:
            declared[name] = dim
    regions = {}
    for last_layer, dim in declared.items():
        region = region_of(last_layer)
        cuts = {name: dim for name, dim in declared.items() if name.startswith(f"{region}.")}
        if dim == 0 or [*cuts.values()].count(1) > 1:
            continue
        parameters = {name: block.get_parameter(name) for name in cuts}
        widths = {len(parameters[name]) for name, dim in cuts.items() if dim == 0}
        for name, parameter in block.get_submodule(region).named_parameters(prefix=region):
            is_layer = isinstance(block.get_submodule(name.rpartition(".")[0]), nn.Linear)
            if parameter.numel() in widths and not is_layer:
                cuts[name] = 0
        regions[region] = cuts
    return regions


def region_of(last_layer: str) -> str:
    """Return the name of the region whose last layer has the weight `last_layer`."""
    return last_layer.rpartition(".")[0].rpartition(".")[0]


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the hidden states among the arguments of a region."""
    return args[0] if args else kwargs["hidden_states"]  # type: ignore[no-any-return]


def split_norms(block: nn.Module, cuts: Cuts) -> dict[str, Any]:
    """Return the norms, by name, that normalize all outputs of a split layer together."""
    names = [name.removesuffix(".weight") for name in cuts if name.endswith(".weight")]
    norms = [name for name in names if block.get_parameter(f"{name}.weight").dim() == 1]
    return {name: block.get_submodule(name) for name in norms}


def normalize(
    norm: Any, mean_over_ranks: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Apply one of `split_norms`, an RMSNorm, to this rank's features [B, T, F / R]."""
    values = x.float()
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    mean_square = mean_over_ranks(values.square().mean(-1, keepdim=True))
    return (norm.weight * (values * torch.rsqrt(mean_square + epsilon))).to(x.dtype)


def _adds_up(block: nn.Module, region_name: str, cuts: Cuts, num_heads: int, calls: Calls) -> bool:
    """Return whether the outputs of a region's parts add up to those of its recorded call."""
    args, kwargs, output, _ = calls[region_name]
    region = block.get_submodule(region_name)
    parameters = dict(region.named_parameters(prefix=region_name))
    num_parts = math.gcd(num_heads, *(parameters[name].shape[dim] for name, dim in cuts.items()))
    for name, norm in split_norms(block, cuts).items():
        mean = calls[name].args[0].float().square().mean(-1, keepdim=True)
        norm.forward = functools.partial(normalize, norm, functools.partial(_repeat, mean))
    expected = _first(output)
    total = torch.zeros_like(expected)
    for part in range(num_parts):
        values = {}
        for name, parameter in parameters.items():
            value = parameter.detach()
            if name in cuts:
                value = value.chunk(num_parts, cuts[name])[part]
            elif part and cuts.get(f"{name.rpartition('.')[0]}.weight") == 1:
                value = torch.zeros_like(value)  # only one part adds the bias of the last layer
            values[name.removeprefix(f"{region_name}.")] = value
        try:
            with torch.no_grad():
                total += _first(torch.func.functional_call(region, values, args, kwargs))
        except Exception:  # transformers may raise any exception for other shapes
            return False
    return num_parts > 1 and _largest(total - expected) < 1e-3 * _largest(expected)


def _mixes_tokens(block: nn.Module, cuts: Cuts, calls: Calls, inputs: Inputs) -> bool:
    """Return whether a token affects later tokens of its record outside of the split regions."""
    x, others, options = inputs
    for name, dim in cuts.items():
        if dim == 1:
            region: Any = block.get_submodule(region_of(name))
            region.forward = functools.partial(_repeat, calls[region_of(name)].output)
    changed = x.clone()
    changed[:, :2] += torch.randn_like(x[:, :2])
    with torch.no_grad():
        before, after = (_first(block(value, *others, **options)) for value in (x, changed))
    change = after - before
    return _largest(change[:, 2:4]) > 1e-3 * _largest(change[:, :2])


def _repeat(output: Any, *_arguments: Any, **_options: Any) -> Any:
    return output


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max())


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
