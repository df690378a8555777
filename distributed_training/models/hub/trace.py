"""Measure the kinds of blocks of a decoder, by running the decoder on fake tensors, which have no
values. The model's matrices need no memory.

In eager mode, a block keeps the tensors that autograd saves. In compiled mode, it keeps the inputs
of matrix multiplications and attention, and their results if other operations read them. From
these results, torch.compile recomputes everything else. With adapters and without activation
checkpointing, it also recomputes inputs of matrix multiplications (parallel/blocks.py)."""

import functools
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from distributed_training.models import private
from distributed_training.models.hub import UnsupportedError, linear_attention, model, packing
from distributed_training.models.hub.attention import NAME, attend_to_own_tokens, record_windows
from distributed_training.models.hub.experts import STACKS
from distributed_training.models.hub.fusions import find_fusions
from distributed_training.models.hub.regions import declared_regions, find_cuts, record_calls
from distributed_training.models.size import BlockKind

# Length of the longer of the two traced samples. Comparing the two samples shows which costs grow
# with the square of the length. Mamba pads samples to whole chunks, so both contain several.
MIN_LENGTH = 256
MIN_CHUNKS = 4
_aten = torch.ops.aten
_STACKED_MATMULS = {_aten.bmm, _aten.baddbmm, private.grouped_mm}
_DELTA_RULE = torch.ops.distributed_training.delta_rule
_EXPERT_LINEAR = torch.ops.distributed_training.expert_linear
_MATMULS = {_aten.mm, _aten.addmm, *_STACKED_MATMULS}
# Values per token and hidden unit that predict/costs/ adds to ModelSize.split_values
_UNSPLIT_VALUES = {
    "eager": 4, "compiled": 4, "adapters": 4, "selective": 2, "offload-attention": 2,
}  # fmt: skip
_Storages = set[torch.UntypedStorage]


class Traced(NamedTuple):
    """What running a model's blocks shows."""

    kinds: tuple[BlockKind, ...]
    packs: bool  # whether all blocks separate packed records
    before_blocks: list[str]  # names of the modules that are called before the blocks
    block_outputs: int  # length of the tuple that a block returns, or 0 if it returns a tensor
    unsplit: dict[str, str]  # mesh axis -> why the model cannot be split over this axis
    needs_whole_samples: bool  # see ModelSize


def trace(net: Any, inner: Any, blocks: nn.ModuleList) -> Traced:
    """Run a model on the meta device. If transformers cannot run the model, the exception from
    transformers is propagated. Raises UnsupportedError if a block leaves a parameter unused.

    Afterwards, the model's tensors have no values."""
    groups = _group_blocks(net.config, blocks)
    plan = {
        pattern.partition(".*.")[2]: style
        for pattern, style in (getattr(net.config, "base_model_tp_plan", None) or {}).items()
    }
    num_heads = math.gcd(net.config.num_attention_heads, model.read_num_kv_heads(net.config) or 0)
    net.config.pad_token_id = None  # otherwise, some models look for padding among the ids
    firsts = [layers[0] for layers in groups]
    chunk_sizes = [
        getattr(module, name, 0)
        for module in net.modules()
        for name in ("chunk_size", "block_size")
    ]
    length = max(MIN_LENGTH, MIN_CHUNKS * max(chunk_sizes))
    long_length = min(length, model.read_num_positions(net.config))
    short_length = long_length // 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fake_mode = private.FakeTensorMode(allow_non_fake_inputs=True)
        with fake_mode, private.FusedAttention(), record_windows() as windows:
            private.replace_parameters(net, lambda tensor: torch.empty_like(tensor, device="cpu"))
            run = functools.partial(_run_blocks, inner, blocks, firsts, windows)
            short = run(torch.zeros(1, short_length))
            long = run(torch.zeros(1, long_length))
            probe = packing.probe_options(torch.bfloat16)
            packed = run(probe["position_ids"], **probe)
            before_blocks, block_outputs, unsplit = _find_stages(net, inner, blocks)
    kinds = []
    for layers in groups:
        block = blocks[layers[0]]
        recorders = short[layers[0]], long[layers[0]]
        for name, parameter in block.named_parameters():
            if parameter.untyped_storage() not in recorders[1].read:  # such as cross-attention
                raise UnsupportedError(f"has blocks that do not use {name}")
        kinds.append(_describe_kind(layers, block, recorders, net))
    packs = True
    for layer in firsts:
        x, others, options = packed[layer].inputs
        documents = options.pop("documents", None)
        # cp needs blocks in which only attention combines values of different tokens.
        reasons: list[str] = []
        if not private.uses_attention(net.config, NAME):
            reasons.append("it computes attention in its own code")
        else:
            with attend_to_own_tokens(net.config.num_attention_heads, reasons):
                if not packing.separates(blocks[layer], x, others, options):
                    reasons.append("its blocks pass values from token to token beside attention")
        if reasons:
            unsplit["cp"] = reasons[-1]
        if documents is not None:
            options["documents"] = documents
        packs &= documents is not None and packing.separates(blocks[layer], x, others, options)
    needs_whole_samples = False
    wrong: list[str] = []
    for index, layer in enumerate(firsts):
        block = blocks[layer]
        inputs = packing.draw_values(block, *packed[layer].inputs)
        regions = declared_regions(block, plan)
        # Falcon's own attention would not accept random masks.
        is_ours = private.uses_attention(net.config, NAME)
        calls = record_calls(block, inputs) if is_ours or regions else {}
        fusions = find_fusions(block, calls) if is_ours else {}
        cuts, wrong_regions, mixes = find_cuts(block, regions, num_heads, inputs, calls)
        needs_whole_samples |= mixes
        wrong += wrong_regions
        num_split = sum(block.get_parameter(name).numel() for name in cuts)
        private.replace_parameters(block, lambda tensor: tensor.to("meta"))
        kinds[index] = replace(
            kinds[index],
            **fusions,
            cuts=cuts,
            split_parameters=num_split,
            norm_parameters=kinds[index].parameters - num_split,
        )
    if not any(kind.cuts for kind in kinds):
        unsplit["tp"] = "transformers declares no layers of its blocks that can be split"
        if wrong:
            names = " and ".join(dict.fromkeys(wrong))
            unsplit["tp"] = f"the parts of {names} do not add up if transformers' plan splits them"
    elif "pp" in unsplit:  # hidden states are not all that ranks exchange
        unsplit["tp"] = unsplit["pp"]
    return Traced(tuple(kinds), packs, before_blocks, block_outputs, unsplit, needs_whole_samples)


def _find_stages(
    net: Any, inner: Any, blocks: nn.ModuleList
) -> tuple[list[str], int, dict[str, str]]:
    """Run a whole model on fake token ids. Return `before_blocks`, `block_outputs` and `unsplit`
    for the axis pp, as in Traced. A stage receives only one tensor per micro-batch, so a block may
    compute from nothing else that other stages compute."""
    ids = torch.zeros(1, 8, dtype=torch.int64)
    hidden_shape = (*ids.shape, net.get_input_embeddings().weight.shape[1])
    before_blocks: dict[str, None] = {}
    reasons = []
    outputs = []
    hooks = []

    def check_inputs(_block: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        x, *others = args
        if x.shape != hidden_shape:
            reasons.append("its hidden states are not as large as its embeddings")
        shared = [dict(value) for value in options.values() if isinstance(value, Mapping)]
        for leaf in private.tree_leaves((others, options, shared)):
            if torch.is_tensor(leaf) and leaf.requires_grad:
                reasons.append("blocks share keys and values, or embeddings, with other blocks")
            elif _storages(leaf) & _storages(ids):
                reasons.append("blocks read token ids")

    def check_output(_block: Any, _args: Any, output: Any) -> None:
        outputs.append(len(output) if isinstance(output, tuple | list) else 0)

    def note_name(name: str, *_args: Any) -> None:
        if not outputs:
            before_blocks[name] = None

    for name, module in model.list_outer_modules(net, inner):
        hooks.append(module.register_forward_pre_hook(functools.partial(note_name, name)))
    for block in blocks:
        hooks.append(block.register_forward_pre_hook(check_inputs, with_kwargs=True))
        hooks.append(block.register_forward_hook(check_output))
    with torch.enable_grad():
        inner(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    if "inputs_embeds" not in inspect.signature(inner.forward).parameters:
        reasons.append("it accepts only token ids")
    for owner in net.modules():
        if inner in owner.modules() and [*owner.parameters(recurse=False)]:
            reasons.append("it has parameters that no layer contains")
    return [*before_blocks], outputs[0], {"pp": reasons[0]} if reasons else {}


def _group_blocks(config: Any, blocks: nn.ModuleList) -> list[tuple[int, ...]]:
    """Return the indices of the blocks of each kind."""
    types = getattr(config, "layer_types", None) or [""] * len(blocks)
    groups = defaultdict[Any, list[int]](list)
    for layer, block in enumerate(blocks):
        shapes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
        groups[types[layer], shapes].append(layer)
    return [tuple(layers) for layers in groups.values()]


def _describe_kind(
    layers: tuple[int, ...], block: nn.Module, recorders: tuple["_Recorder", "_Recorder"], net: Any
) -> BlockKind:
    """Return the kind of block that a short and a long sample were traced on."""
    short, long = recorders
    hidden_size = net.get_input_embeddings().weight.shape[1]
    costs = {}
    for mode, num_unsplit in _UNSPLIT_VALUES.items():
        short_cost = short.values_per_token(mode) - num_unsplit * hidden_size
        long_cost = long.values_per_token(mode) - num_unsplit * hidden_size
        # What does not depend on the length costs less per token of a longer sample.
        slope = max(0.0, (long_cost - short_cost) / (long.num_tokens - short.num_tokens))
        costs[mode] = (long_cost - slope * long.num_tokens, slope)
    # Multiplications per token: those of attention grow with the sample's length.
    short_products = short.mixing_products / short.num_tokens
    long_products = long.mixing_products / long.num_tokens
    difference = max(0.0, long_products - short_products)
    per_key = difference / (long.num_tokens - short.num_tokens)
    used_in_experts = sum(rows * columns * used for rows, columns, used in long.expert_products)
    matrices = {
        name: tuple(module.weight.shape)
        for name, module in block.named_modules()
        if type(module).__name__ in model.LINEAR_CLASSES
    }
    routers = {
        name.removesuffix(".weight")
        for name, parameter in block.named_parameters()
        if parameter.untyped_storage() in long.routers
    }
    sizes = [parameter.numel() for parameter in block.parameters()]
    in_stacks = sum(
        parameter.numel()
        for parameter in block.parameters()
        if parameter.dim() > 2 and parameter.shape[1] > 1  # otherwise, it is a convolution
    )
    stacks = {}
    transposed = False
    for name, module in block.named_modules():
        if hasattr(module, "is_transposed"):  # a module of the ExpertsInterface
            transposed = module.is_transposed
            parameters = dict(module.named_parameters(recurse=False))
            for stack in STACKS.intersection(parameters):
                experts, rows, columns = parameters[stack].shape
                shape = (columns, rows) if transposed else (rows, columns)
                stacks[f"{name}.{stack}"] = (experts, *shape)
    return BlockKind(
        layers=layers,
        attention_width=max(0, round(per_key / 2)),
        matrices=tuple(matrices.values()),
        hf_matrices={
            name: None if name in routers or model.is_read_directly(block, name) else name
            for name in matrices
        },
        parameters=sum(sizes),
        split_parameters=0,
        norm_parameters=sum(sizes),
        tensors=len(sizes),
        expert_products=tuple(long.expert_products),
        stacks=dict(sorted(stacks.items(), reverse=True)),  # in the order of their products
        transposes_stacks=transposed,
        unused_parameters=max(0, round(in_stacks - used_in_experts)),
        state_products=max(0, round(long_products - per_key * long.num_tokens)),
        window=long.window,
        fuses_attention=long.fused,
        traced_values=costs,
    )


class _LastBlock(Exception):
    """Raised after the last block to run."""


def _run_blocks(
    inner: Any,
    blocks: nn.ModuleList,
    layers: Sequence[int],
    windows: list[int | None],
    ids: torch.Tensor,
    **model_options: Any,
) -> dict[int, "_Recorder"]:
    """Run a model on fake ids [1, T], and record the forward passes of the blocks with the indices
    `layers`. Each call of attention appends its sliding window to `windows`."""
    recorders = {}

    def record(layer: int, x: torch.Tensor, *others: Any, **options: Any) -> Any:
        block = blocks[layer]
        tensors = dict(block.named_parameters()) | dict(block.named_buffers())
        # Keys and values of other blocks, in a class whose contents tree_leaves does not find
        shared = [dict(value) for value in options.values() if isinstance(value, Mapping)]
        recorder = recorders[layer] = _Recorder()
        recorder.start(x, constants=(others, options, shared, tensors))
        recorder.inputs = (x, others, dict(options))
        windows.clear()
        saved = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor)
        with recorder, saved:
            output = type(block).forward(block, x.detach().requires_grad_(), *others, **options)
        recorder.window = windows[0] if windows else None
        if layer == layers[-1]:
            raise _LastBlock
        return output

    for layer in layers:
        blocks[layer].forward = functools.partial(record, layer)
    try:
        inner(input_ids=ids.long(), use_cache=False, **model_options)
    except _LastBlock:
        pass
    except private.DataDependentOutputException:
        raise UnsupportedError("has code that depends on values of tensors") from None
    for layer in layers:
        del blocks[layer].forward
    return recorders


class _Recorder(private.TorchDispatchMode):
    """Record what a block's forward pass keeps for the backward pass."""

    inputs: tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]
    window: int | None  # of attention

    def start(self, x: torch.Tensor, constants: Any) -> None:
        """Begin to record a block with the input `x` [..., T, D]. `constants` contains its
        parameters, its buffers and its other inputs."""
        self.num_tokens = x.shape[-2]
        self.constants = _storages(constants)
        self.read = _storages(x)  # by any operation
        self.saved: _Storages = set()  # by autograd
        self.matrix_inputs: _Storages = set()  # of matrix multiplications and attention
        self.attention_values: _Storages = set()  # inputs and results of attention
        self.results = [*_storages(x)]  # x, and results of matrix multiplications and attention
        self.mlp_results: _Storages = set()  # those after the product that follows attention
        self.stacked_results: _Storages = set()  # which no mode saves
        self.follows_attention = False  # whether no product has followed attention
        self.in_mlp = False
        self.sums = _storages(x)  # `results`, and sums of them
        # Storage -> those `sums` from which it is computed without matrix multiplications
        self.origins = defaultdict[torch.UntypedStorage, _Storages](set)
        # (outputs, inputs, rows per token) of products with stacks of matrices, such as experts
        self.expert_products: list[tuple[int, int, float]] = []
        # Result of a matrix multiplication -> its factors among the constants
        self.factors: dict[torch.UntypedStorage, _Storages] = {}
        self.routers: _Storages = set()  # those factors whose products choose experts
        self.mixing_products = 0  # multiplications of values of different tokens
        self.fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = _storages((args, kwargs))
        outputs = _storages(result)
        self.read |= inputs
        operation = func.overloadpacket
        is_fused_attention = private.is_fused_attention(func)
        is_linear_attention = operation is _DELTA_RULE
        is_attention = is_fused_attention or is_linear_attention
        if is_fused_attention:
            self.fused = True
            self.mixing_products += 2 * args[0].shape[-2] * args[0].numel()
            self.attention_values |= inputs | outputs  # such as the softmax's statistics
        elif is_linear_attention:
            self.mixing_products += linear_attention.products(*args[1:3])
            self.attention_values |= inputs | outputs
        elif operation is _EXPERT_LINEAR:
            outputs = _storages(result[0])  # without the products of adapters
            (num_rows, num_outputs), num_inputs = result[0].shape, args[0].shape[1]
            product = (num_outputs, num_inputs, num_rows / self.num_tokens)
            self.expert_products.append(product)
            for origin in self.origins[args[2].untyped_storage()]:  # of each expert's rows
                self.routers |= self.factors.get(origin, set())
        elif operation in _STACKED_MATMULS:
            self.stacked_results |= outputs
            left, right = args[-2:] if operation is _aten.baddbmm else args[:2]
            num_outputs = right.shape[-1]
            num_inputs = left.shape[-1]
            num_rows = left.numel() // num_inputs
            if _storages(right) <= self.constants:
                product = (num_outputs, num_inputs, num_rows / self.num_tokens)
                self.expert_products.append(product)
            else:
                self.mixing_products += num_rows * num_inputs * num_outputs
                is_attention = True
        is_product = operation in _MATMULS or operation is _EXPERT_LINEAR
        if is_attention or is_product:
            self.matrix_inputs |= inputs | self.attention_values
            self.results += outputs
            self.sums |= outputs
            self.factors |= dict.fromkeys(outputs, inputs & self.constants)
            if self.in_mlp:
                self.mlp_results |= outputs
            self.in_mlp |= self.follows_attention and not is_attention
            self.follows_attention = is_attention
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
            kept = set(self.results[:-1]) - self.stacked_results
        elif mode == "offload-attention":
            kept = set(self.results[:-1]) - self.stacked_results - self.mlp_results
        else:
            inputs = self.attention_values if mode == "adapters" else self.matrix_inputs
            kept = inputs | (self.sums & self.saved)
            for storage in self.saved - inputs:
                kept |= self.origins[storage]
            kept -= self.constants
        return sum(storage.nbytes() for storage in kept) / 2 / self.num_tokens


def _storages(values: Any) -> _Storages:
    leaves = private.tree_leaves(values)
    return {leaf.untyped_storage() for leaf in leaves if torch.is_tensor(leaf)}
