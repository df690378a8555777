"""Add LoRA adapters (Hu et al., arXiv 2106.09685) to the matrices of a model's blocks.

The weights W are frozen. An adapter changes the output of a matrix to
`W x + (alpha / rank) B A dropout(x)`. A is [rank, in], and B is [out, rank]. B is initialized to 0,
so training starts from the outputs of the base model.

As in PEFT, each Hugging Face matrix has its own A and B. If one of our matrices contains several of
them, their A matrices are stacked, and so are their B matrices, in the order of our rows.

Because the weights are frozen, an embedding that is not also the output layer can stay in host
memory."""

import math
import zlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import register_flop_formula

from distributed_training.models import ModelSpec
from distributed_training.models.decoder import Decoder, Linear
from distributed_training.models.private import shard_for
from distributed_training.parallel.mesh import local_part
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
            rows = spec.hf_rows(owner_name, config.lora_targets)
            _add_adapter(owner, a, b, list(rows.values()), config)


def _add_adapter(
    linear: Any, a: torch.Tensor, b: torch.Tensor, rows: list[torch.Tensor], config: Config
) -> None:
    """Add an adapter with the matrices `a` and `b` to a layer. `rows` are the rows of each Hugging
    Face matrix."""
    device = a.device
    num_parts = len(rows)
    # Use the sizes of the layer, because a quantized weight has a different shape.
    num_rows = linear.out_features
    part_positions = [part_rows * num_parts + index for index, part_rows in enumerate(rows)]
    positions = torch.cat(part_positions).sort().values
    if isinstance(linear.weight, DTensor):
        mesh = linear.weight.device_mesh
        if linear.weight.placements[0].is_shard(1):
            placement_a, placement_b = Shard(1), Replicate()
        else:
            placement_a, placement_b = Replicate(), Shard(0)
            rank = mesh.get_local_rank()
            num_rows //= mesh.size()
            own_positions = positions.chunk(mesh.size())[rank]
            positions = own_positions - rank * num_rows * num_parts
        a = distribute_tensor(a, mesh, [placement_a], src_data_rank=None)
        b = distribute_tensor(b, mesh, [placement_b], src_data_rank=None)
    linear.adapter = Adapter(a, b, config)
    if len(positions) < num_rows * num_parts:
        linear.adapter.positions = positions.to(device)
        linear.adapter.num_blocks = num_rows * num_parts


def _draw(adapter: str, shape: tuple[int, ...], spec: ModelSpec, config: Config) -> torch.Tensor:
    """Return the initial A of an adapter: Kaiming uniform, as in PEFT. The values depend only on
    the seed and on the names of the Hugging Face matrices, or on the name of the stack."""
    names = [adapter.removesuffix("_adapter")]
    if len(shape) == 2:
        names = list(spec.hf_rows(adapter.removesuffix(".adapter"), config.lora_targets))
    a = torch.empty(shape)
    for name, part in zip(names, a.chunk(len(names)), strict=True):
        key = config.seed * 100_003 + zlib.crc32(name.encode())
        generator = torch.Generator().manual_seed(key)
        limit = shape[-1] ** -0.5
        part.uniform_(-limit, limit, generator=generator)
    return a


class Adapter(nn.Module):
    """LoRA adapters of the k Hugging Face matrices that one matrix contains."""

    # If k > 1 or some rows have no adapter, B is expanded to [out, k lora_rank]. In the block of
    # columns of each Hugging Face matrix, only the rows of this matrix are not zero.
    positions: torch.Tensor | None  # index of each row of B among the [out, k] blocks
    num_blocks = 0  # out times k

    def __init__(self, a: torch.Tensor, b: torch.Tensor, config: Config) -> None:
        """Create the adapters from the stacked matrices `a`, [k lora_rank, in], and `b`,
        [rows with adapters, lora_rank]."""
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)
        self.scale = config.lora_alpha / config.lora_rank
        self.dropout = config.lora_dropout
        self.register_buffer("positions", None, persistent=False)

    def forward(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return the output of `linear` with these adapters, [.., in] -> [.., out]."""
        a, b = self.matrices(x.dtype)
        drops = self.dropout > 0 and self.training
        is_plain = type(linear) is Linear and linear.matmul_override is None
        if is_plain and not drops and not isinstance(x, DTensor):
            return adapted_linear(
                x, shard_for(x, linear.weight).to(x.dtype), linear.cast_bias(x), a, b
            )[0]
        y = linear.product(x)
        inputs = x
        if isinstance(x, DTensor):
            # If x is replicated, each rank computes only one term of the gradient of x.
            placements = [
                Partial() if placement.is_replicate() else placement for placement in x.placements
            ]
            inputs = x.to_local(grad_placements=placements)
        dropped = F.dropout(inputs, self.dropout, self.training)
        delta = F.linear(F.linear(dropped, a), b)
        if isinstance(y, DTensor):
            delta = DTensor.from_local(delta, y.device_mesh, y.placements, run_check=False)
        return y + delta

    def matrices(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A times the adapters' scale, [k lora_rank, in], and the expanded B,
        [out, k lora_rank], in `dtype`."""
        a = local_part(self.a).to(dtype) * self.scale
        b = local_part(self.b).to(dtype)
        if self.positions is not None:
            blocks = b.new_zeros(self.num_blocks, b.shape[1])
            b = blocks.index_copy(0, self.positions, b).view(-1, len(a))
        return a, b


# torch.compile would copy the first product before adding the second (torch 2.11).
@torch.library.custom_op("distributed_training::sum_of_linears", mutates_args=())
def sum_of_linears(
    x: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return `x weight^T + hidden b^T + bias`, [.., out], for x [.., in] and hidden [.., R]."""
    out = F.linear(hidden, b, bias)
    rows = x.flatten(0, -2)
    out.flatten(0, -2).addmm_(rows, weight.t())
    return out


@sum_of_linears.register_fake
def _(x, weight, *_):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], len(weight))


# This is not an autograd.Function, because full checkpointing would keep its products (torch 2.11).
@torch.library.custom_op("distributed_training::adapted_linear", mutates_args=())
def adapted_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a linear layer with a frozen matrix and adapters, [.., out], and
    `x a^T`, which has no gradient. Each pass reads and writes the sum of both products less often
    than separate operations do."""
    hidden = F.linear(x, a)
    return sum_of_linears(x, weight, hidden, b, bias), hidden


@adapted_linear.register_fake
def _(x, weight, _bias, a, _b):  # type: ignore[no-untyped-def]
    batch = x.shape[:-1]
    return x.new_empty(*batch, len(weight)), x.new_empty(*batch, len(a))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, _, a, b = inputs
    ctx.save_for_backward(x, weight, a, b, output[1])


def _backward(ctx: Any, d_y: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    x, weight, a, b, hidden = ctx.saved_tensors
    d_hidden = d_y @ b
    d_x = None
    if ctx.needs_input_grad[0]:
        d_x = sum_of_linears(d_y, weight.t(), d_hidden, a.t(), None)
    return d_x, None, None, matrix_gradient(d_hidden, x), matrix_gradient(d_y, hidden)


def matrix_gradient(d_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a matrix W from the gradient of `x W^T`."""
    rows = d_y.flatten(0, -2)
    return rows.t() @ x.flatten(0, -2)


adapted_linear.register_autograd(_backward, setup_context=_save)


# torch.compile computes operations again that seem to cost nothing.
@register_flop_formula(  # type: ignore[untyped-decorator]
    [torch.ops.distributed_training.sum_of_linears, torch.ops.distributed_training.adapted_linear]
)
def _(x_shape: Any, weight_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x_shape) * weight_shape[0]  # type: ignore[no-any-return]


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
