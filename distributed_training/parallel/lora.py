"""Add LoRA adapters (Hu et al., arXiv 2106.09685) to the matrices of a model's blocks.

The weights W are frozen. An adapter changes the output of a matrix to
`W x + (alpha / rank) B A dropout(x)`. A is [rank, in], and B is [out, rank]. B is initialized to 0,
so training starts from the outputs of the base model.

Because the weights are frozen, an embedding that is not also the output layer can stay in host
memory."""

import math
import zlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distributed_training.models import ModelSpec
from distributed_training.models.decoder import Decoder, Linear
from distributed_training.models.private import flop_formula, local_part
from distributed_training.models.quantized import adds_to_product, dequantize, stored_matrix
from distributed_training.settings.config import Config


def apply_lora(
    model: Decoder,
    spec: ModelSpec,
    config: Config,
    device: torch.device,
    initial_values: Mapping[str, torch.Tensor],
) -> None:
    """Freeze a model or a pipeline stage, and add fp32 adapters on `device` to the matrices of its
    blocks, in place.

    If tp shards a matrix by rows, each rank has all of A and its own rows of B. If tp shards a
    matrix by columns, each rank has its own columns of A and all of B. `initial_values` (the
    `adapters` of InitialWeights) replace the random initialization."""
    model.requires_grad_(False)
    for number in model.blocks:
        kind = spec.size.kind_of(int(number))
        shapes = kind.adapter_shapes(config.lora_rank, config.lora_targets)
        for adapter_name, (a_shape, b_shape) in shapes.items():
            name = f"blocks.{number}.{adapter_name}"
            a = initial_values.get(f"{name}.a")
            b = initial_values.get(f"{name}.b")
            if a is None or b is None:
                a = _draw(name, a_shape, spec, config)
                b = torch.zeros(b_shape)
            # Round adapters to the compute dtype.
            dtype = model.compute_dtype or torch.float32
            a = a.to(dtype).float().to(device)
            b = b.to(dtype).float().to(device)
            owner_name, _, key = name.rpartition(".")
            owner: Any = model.get_submodule(owner_name)
            if len(a_shape) == 3:
                from distributed_training.models.hub.experts import StackAdapter

                scale = config.lora_alpha / config.lora_rank
                owner.add_module(key, StackAdapter(a, b, scale))
                continue
            _add_adapter(owner, a, b, config)
        block = model.blocks[number]
        for names in kind.same_inputs:
            layers: list[Any] = [block.get_submodule(name) for name in names]
            adapted = [layer for layer in layers if layer.adapter and adds_to_product(layer)]
            num_biases = sum(layer.bias is not None for layer in adapted)
            if len(adapted) > 1 and num_biases in (0, len(adapted)):
                adapted[0].adapter.group = adapted


def _add_adapter(linear: Any, a: torch.Tensor, b: torch.Tensor, config: Config) -> None:
    """Add an adapter with the matrices `a` and `b` to a layer."""
    if isinstance(linear.weight, DTensor):
        mesh = linear.weight.device_mesh
        shards_columns = linear.weight.placements[0].is_shard(1)
        placement_a = Shard(1) if shards_columns else Replicate()
        placement_b = Replicate() if shards_columns else Shard(0)
        a = distribute_tensor(a, mesh, [placement_a], src_data_rank=None)
        b = distribute_tensor(b, mesh, [placement_b], src_data_rank=None)
    linear.adapter = Adapter(a, b, config)


def _draw(adapter: str, shape: tuple[int, ...], spec: ModelSpec, config: Config) -> torch.Tensor:
    """Return the initial A of an adapter: Kaiming uniform, as in PEFT. The values depend only on
    the seed and on the name of the Hugging Face matrix, or of the stack."""
    name = adapter.removesuffix("_adapter")
    if len(shape) == 2:
        name, _ = spec.hf_matrix(adapter.removesuffix(".adapter"))
    key = config.seed * 100_003 + zlib.crc32(name.encode())
    limit = shape[-1] ** -0.5
    generator = torch.Generator().manual_seed(key)
    return torch.empty(shape).uniform_(-limit, limit, generator=generator)


class Adapter(nn.Module):
    """LoRA adapter of a matrix."""

    # Layers with the same input as this one, which is called first. All are computed together.
    group: Sequence[Any] = ()
    # Output that has been computed with the first layer of the group
    output: torch.Tensor | None = None

    def __init__(self, a: torch.Tensor, b: torch.Tensor, config: Config) -> None:
        """Create the adapter from the matrices `a`, [lora_rank, in], and `b`, [out, lora_rank]."""
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)
        self.scale = config.lora_alpha / config.lora_rank
        self.dropout = config.lora_dropout

    def forward(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return the output of `linear` with this adapter, [.., in] -> [.., out]."""
        if self.output is not None:
            y, self.output = self.output, None
            return y
        drops = self.dropout > 0 and self.training
        is_plain = adds_to_product(linear) and linear.matmul_override is None
        if is_plain and not drops:
            layers = self.group or [linear]
            for layer, y in zip(layers, _multiply_adapted(layers, x), strict=True):
                layer.adapter.output = y
            y, self.output = self.output, None
            return y
        a, b = self.matrices(x.dtype)
        dropped = F.dropout(x, self.dropout, self.training)
        return linear.product(x) + F.linear(F.linear(dropped, a), b)

    def matrices(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A times the adapter's scale, [lora_rank, in], and B, [out, lora_rank], in
        `dtype`."""
        return local_part(self.a).to(dtype) * self.scale, local_part(self.b).to(dtype)


def _multiply_adapted(layers: Sequence[Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs of layers with frozen matrices and adapters, for the same input."""
    weights, scales, biases, a, b = [], [], [], [], []
    for layer in layers:  # torch.compile does not understand zip(*...) here (torch 2.14).
        weight, *scale = stored_matrix(layer, x.dtype)
        weights.append(local_part(weight))
        scales += scale
        own_a, own_b = layer.adapter.matrices(x.dtype)
        a.append(own_a)
        b.append(own_b)
        if (bias := layer.cast_bias(x)) is not None:
            biases.append(bias)
    outputs: list[torch.Tensor] = adapted_linears(x, weights, scales, biases, torch.cat(a), b)
    return outputs[:-1]


# torch.compile would copy the first product before adding the next one (torch 2.11).
@torch.library.custom_op("distributed_training::sum_of_linears", mutates_args=())
def sum_of_linears(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    scales: list[torch.Tensor],
    hidden: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    transposes: bool = False,
) -> torch.Tensor:
    """Return the sum of `hidden b^T + bias` for hidden [.., R], and of `x weight^T` for each x
    [.., in] and its weight, [.., out], or of `x weight` if `transposes`. With `scales`, the weights
    are codes in NF4."""
    out = F.linear(hidden, b, bias)
    for index, x in enumerate(xs):
        weight = weights[index]
        if scales:
            weight = dequantize(weight, scales[index], "nf4")
        out.flatten(0, -2).addmm_(x.flatten(0, -2), weight if transposes else weight.t())
    return out


@sum_of_linears.register_fake
def _(_xs, _weights, _scales, hidden, b, *_):  # type: ignore[no-untyped-def]
    return hidden.new_empty(*hidden.shape[:-1], len(b))


# This is not an autograd.Function, because full checkpointing would keep its products (torch 2.11).
@torch.library.custom_op("distributed_training::adapted_linears", mutates_args=())
def adapted_linears(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    scales: list[torch.Tensor],
    biases: list[torch.Tensor],
    a: torch.Tensor,
    b: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the outputs of linear layers with frozen matrices and adapters, [.., out], and the
    product of their input with their stacked A matrices, which has no gradient. `scales` and
    `biases` are those of all layers or empty. Each pass reads and writes the sums of products less
    often than separate operations do."""
    hidden = F.linear(x, a)
    outputs = [
        sum_of_linears(
            [x], weights[i : i + 1], scales[i : i + 1], part, b[i], biases[i] if biases else None
        )
        for i, part in enumerate(hidden.chunk(len(b), -1))
    ]
    return [*outputs, hidden]


@adapted_linears.register_fake
def _(x, weights, _scales, _biases, a, _b):  # type: ignore[no-untyped-def]
    return [x.new_empty(*x.shape[:-1], len(matrix)) for matrix in (*weights, a)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, scales, biases, a, b = inputs
    ctx.num_layers, ctx.num_scales, ctx.num_biases = len(b), len(scales), len(biases)
    ctx.save_for_backward(x, output[-1], a, *b, *weights, *scales)


def _backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    x, hidden, a, *others = ctx.saved_tensors
    num = ctx.num_layers
    b, weights, scales = others[:num], others[num : 2 * num], others[2 * num :]
    d_ys = gradients[:-1]
    d_hidden = torch.cat([d_y @ matrix for d_y, matrix in zip(d_ys, b, strict=True)], -1)
    d_x = None
    if ctx.needs_input_grad[0]:
        d_x = sum_of_linears(d_ys, weights, scales, d_hidden, a.t(), transposes=True)
    d_b = map(matrix_gradient, d_ys, hidden.chunk(num, -1))
    no_gradients = [[None] * count for count in (num, ctx.num_scales, ctx.num_biases)]
    return d_x, *no_gradients, matrix_gradient(d_hidden, x), list(d_b)


def matrix_gradient(d_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a matrix W from the gradient of `x W^T`."""
    rows = d_y.flatten(0, -2)
    return rows.t() @ x.flatten(0, -2)


adapted_linears.register_autograd(_backward, setup_context=_save)


@flop_formula(torch.ops.distributed_training.sum_of_linears)
def _(xs: Any, _weights: Any, _scales: Any, _hidden: Any, b: Any, *_: Any, **__: Any) -> int:
    return sum(2 * math.prod(x) * b[0] for x in xs)


@flop_formula(torch.ops.distributed_training.adapted_linears)
def _(x: Any, _weights: Any, _scales: Any, _biases: Any, _a: Any, b: Any, **_: Any) -> int:
    return sum(2 * math.prod(x) * rows for rows, _ in b)


def move_embedding_to_host(layer: nn.Embedding) -> None:
    """Move the frozen table of an embedding on a GPU to pinned memory of the host. The GPU reads
    the rows that it needs from there.

    In Qwen3-8B, the table takes 1.2 GiB, of which 4,096 tokens need 32 MiB."""
    weight = layer.weight.detach()
    pinned = torch.empty_like(weight, device="cpu", pin_memory=True).copy_(weight)
    array = {"shape": (pinned.nbytes,), "typestr": "|u1", "data": (pinned.data_ptr(), False)}
    # The new tensor has the same address on the GPU, and keeps this object, so also `pinned`.
    memory = SimpleNamespace(__cuda_array_interface__=array, pinned=pinned)
    values = torch.as_tensor(memory, device=weight.device)
    layer.weight.data = values.view(weight.dtype).view_as(weight)
