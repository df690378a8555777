"""Gradients: their sums and norms over processes, and DDP's hooks, which send them smaller.

torch has hooks for bf16 and PowerSGD (Vogels et al., 1905.13727). Top-k with int8 is ours: each
process sends of each of P equal parts of a bucket the k values of largest magnitude as they are and
the others as multiples of one scale in 8 bits, to the process that averages that part, and gets the
averages of all parts back in the same form. What is lost is added to the next gradient, on both
ways (error feedback, Karimireddy et al., 1901.09847).

DDP reads the hooks' annotations, which must not be text."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.private import foreach_mul, foreach_norm
from distributed_training.predict.traffic import num_exact
from distributed_training.settings.config import RunConfig

LEVELS = 127
POWERSGD_KEEPS = ("error_dict", "p_memory_dict", "q_memory_dict")
Kept = dict[str, dict[int, torch.Tensor]]  # by attribute and bucket


def local_part(tensor: Any) -> torch.Tensor:
    """Return this process's shard of a DTensor, sharing its memory. Return other tensors as is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def match_layouts(parameters: list[Any]) -> None:
    """Redistribute each gradient to the layout of its parameter."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def add_up(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None, divisor: int = 1
) -> None:
    """Replace each tensor with its sum over `group` divided by `divisor`, in one all-reduce."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= divisor
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view(tensor.shape))


def average(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor with its mean over all processes, in one all-reduce."""
    add_up(tensors, divisor=dist.get_world_size())


@torch.no_grad()
def global_norm(
    parameters: list[nn.Parameter], topology: Topology, counted_elsewhere: Collection[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 2-norm of all gradients of the model, an fp32 scalar that is equal on all ranks,
    and the norm of this rank's shard of each gradient, [number of parameters].

    Every rank adds the squares of its shards, divided by the number of ranks of its stage with the
    same shard. This needs one all-reduce of a scalar, unless every rank has all gradients."""
    norms = foreach_norm([local_part(parameter.grad) for parameter in parameters])
    param_grad_norms = torch.stack(norms)
    if topology.world_size == topology.dp_replicate:
        return torch.linalg.vector_norm(param_grad_norms), param_grad_norms
    ranks_per_stage = topology.world_size // topology.pp
    shares = [
        0.0 if parameter in counted_elsewhere else _num_shards(parameter.grad) / ranks_per_stage
        for parameter in parameters
    ]
    total = torch.stack(foreach_mul(foreach_mul(norms, norms), shares)).sum()
    dist.all_reduce(total)
    return total.sqrt(), param_grad_norms


def _num_shards(gradient: Any) -> int:
    """Return the number of different shards of a gradient in a stage."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, layout in sizes if not layout.is_replicate())


def compress(x: torch.Tensor, num_exact: int) -> torch.Tensor:
    """fp32 rows [R, n] as bytes [R, 8 num_exact + 4 + n]: of each row the exact values, their
    places, the scale of the rest, the rest."""
    places = x.abs().topk(num_exact, dim=1).indices
    exact = x.gather(1, places)
    rest = x.scatter(1, places, 0.0)
    scale = rest.abs().amax(1, keepdim=True) / LEVELS
    small = (rest / scale.where(scale > 0, 1.0)).round().to(torch.int8)
    parts = (exact, places.to(torch.int32), scale, small)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def decompress(message: torch.Tensor, num_exact: int) -> torch.Tensor:
    """The rows, as near as `compress` kept them."""
    sizes = [4 * num_exact, 4 * num_exact, 4, message.shape[1] - 8 * num_exact - 4]
    whole = torch.contiguous_format
    parts = [part.clone(memory_format=whole) for part in message.split(sizes, dim=1)]
    exact = parts[0].view(torch.float32)
    scale = parts[2].view(torch.float32)
    places = parts[1].view(torch.int32).long()
    return (parts[3].view(torch.int8) * scale).scatter(1, places, exact)


def topk_int8_hook(
    state: tuple[float, Kept], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket's gradients over all processes, nearly. `state`: the share of the values
    that are sent as they are, and what was lost so far. Two collectives over all processes."""
    share, kept = state
    flat = bucket.buffer()
    index = bucket.index()
    count = dist.get_world_size()
    part = -(-flat.numel() // count)
    k = num_exact(part, share)
    padded = torch.nn.functional.pad(flat, (0, count * part - flat.numel()))
    own = padded.view(count, part) + kept["lost"].get(index, 0.0)
    message = compress(own, k)
    kept["lost"][index] = own - decompress(message, k)
    received = torch.empty_like(message)
    # On GPUs the answer is worked out on another stream: what outlives it is never allocated there.
    lost = kept["lost_of_means"].setdefault(index, own.new_zeros(1, part))
    sent = dist.all_to_all_single(received, message, async_op=True)

    def answer(arrived: Any) -> torch.Tensor:
        arrived.value()  # raises what failed
        mean = decompress(received, k).mean(0, keepdim=True) + lost
        reply = compress(mean, k)
        lost.copy_(mean - decompress(reply, k))
        replies = torch.empty_like(message)
        dist.all_gather_into_tensor(replies, reply)
        return flat.copy_(decompress(replies, k).flatten()[: flat.numel()])

    return sent.get_future().then(answer)


def bf16_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's, under a name that DDP does not refuse on CPUs."""
    return bf16_compress_hook(state, bucket)


def apply_compression(module: DistributedDataParallel, config: RunConfig) -> Kept:
    """Let `module`, whose buckets are arranged, exchange gradients as CONFIG says; what the hook
    remembers, and a resumed run needs to go on exactly."""
    kind = config.gradient_compression
    if kind == "bf16":
        module.register_comm_hook(None, bf16_hook)
    elif kind == "powersgd":
        state = PowerSGDState(
            None,
            config.compression_rank,
            start_powerSGD_iter=2,  # no earlier, as torch arranges buckets in the first: done here
            orthogonalization_epsilon=1e-8,  # else a column of zeros divides by zero
        )
        state.iter = state.start_powerSGD_iter
        module.register_comm_hook(state, powerSGD_hook)
        return {name: getattr(state, name) for name in POWERSGD_KEEPS}
    elif kind == "topk-int8" and config.compression_k < 1:  # else nothing would be lost, nor saved
        kept: Kept = {"lost": {}, "lost_of_means": {}}
        module.register_comm_hook((config.compression_k, kept), topk_int8_hook)
        return kept
    return {}


def bucket_mib(config: RunConfig, device_type: str) -> float | None:
    """How large DistributedDataParallel's buckets are."""
    # gloo matches collectives by their order, and a hook starts its second one whenever the first
    # is done, which with several buckets is at another time on each process: one holds all.
    one = config.gradient_compression in ("powersgd", "topk-int8") and device_type == "cpu"
    return 2**20 if one else config.bucket_cap_mb
