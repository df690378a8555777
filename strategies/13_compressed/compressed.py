"""Train with data parallelism and compressed gradients. Error feedback (Karimireddy et al.,
1901.09847) adds the error of each compression to the next gradient. PowerSGD (Vogels et al.,
1905.13727) is torch's implementation.

With topk-int8, each process divides a bucket into one shard per process and sends each shard to the
process that averages it. A message stores the k values of largest magnitude exactly, and the other
values as 8-bit multiples of one scale. The averages are sent back in the same format.

DDP evaluates the hooks' annotations, so the annotations must not be strings."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from distributed_training.engines.native import NativeEngine
from distributed_training.models.decoder import Decoder
from distributed_training.models.initial_weights import InitialWeights
from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan

INT8_MAX = 127
POWERSGD_STATE = ("error_dict", "p_memory_dict", "q_memory_dict")
State = dict[str, dict[int, torch.Tensor]]  # attribute -> index of a bucket -> tensor


class Compressed(NativeEngine):
    """Engine that trains with DDP and compresses each bucket of gradients."""

    def __init__(
        self, model: Decoder, weights: InitialWeights, plan: Plan, topology: Topology
    ) -> None:
        self.options = plan.strategy.options(plan.engine_options)
        self.compression_state: State = {}
        super().__init__(model, weights, plan, topology)

    def replicate(self, stage: Decoder) -> nn.Module:
        # gloo matches collectives by their order, and a hook starts its second collective as soon
        # as the first has finished. With several buckets, this time differs between processes.
        module = self.build_ddp(stage, 2**20 if self.topology.device_type == "cpu" else None)
        self.compression_state = apply_compression(module, self.options)
        return module

    def local_state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}/{bucket}": tensor
            for name, by_bucket in self.compression_state.items()
            for bucket, tensor in by_bucket.items()
        }

    def load_local_state(self, state: dict[str, torch.Tensor]) -> None:
        for key, tensor in state.items():
            name, _, bucket = key.partition("/")
            self.compression_state[name][int(bucket)] = tensor.to(self.topology.device)


def apply_compression(module: DistributedDataParallel, options: Any) -> State:
    """Compress the gradients of `module`, whose buckets must already have their final arrangement.
    Return the hook's state, which a resumed run needs in order to continue exactly."""
    if options.compression == "powersgd":
        powersgd = PowerSGDState(
            None,
            options.compression_rank,
            start_powerSGD_iter=2,  # torch arranges buckets in the first step, so 2 is the minimum
            orthogonalization_epsilon=1e-8,  # avoids division by zero in a column of zeros
        )
        powersgd.iter = powersgd.start_powerSGD_iter
        module.register_comm_hook(powersgd, powerSGD_hook)
        return {name: getattr(powersgd, name) for name in POWERSGD_STATE}
    state: State = {"lost": {}, "lost_of_means": {}}
    if options.compression_k < 1:  # otherwise compression has no error to keep
        module.register_comm_hook((options, state), topk_int8_hook)
    return state


def compress(x: torch.Tensor, num_exact: int) -> torch.Tensor:
    """Compress each fp32 row of `x` (shape `[R, n]`) into one message. Return the messages as bytes
    of the shape `[R, 8 * num_exact + 4 + n]`. A message begins with the `num_exact` values of
    largest magnitude in fp32, followed by their indices in int32. Next is one scale in fp32. The
    message ends with one int8 per value: the value in units of the scale, or 0 at the indices of
    the exact values."""
    indices = x.abs().topk(num_exact, dim=1).indices
    exact = x.gather(1, indices)
    remainder = x.scatter(1, indices, 0.0)
    scale = remainder.abs().amax(1, keepdim=True) / INT8_MAX
    rounded = (remainder / scale.where(scale > 0, 1.0)).round().to(torch.int8)
    fields = (exact, indices.to(torch.int32), scale, rounded)
    return torch.cat([field.contiguous().view(torch.uint8) for field in fields], dim=1)


def decompress(message: torch.Tensor, num_exact: int) -> torch.Tensor:
    """Return fp32 rows of the shape `[R, n]` that approximate the rows from which `compress` made
    the messages."""
    sizes = [4 * num_exact, 4 * num_exact, 4, message.shape[1] - 8 * num_exact - 4]
    contiguous = torch.contiguous_format
    fields = [field.clone(memory_format=contiguous) for field in message.split(sizes, dim=1)]
    exact = fields[0].view(torch.float32)
    indices = fields[1].view(torch.int32).long()
    scale = fields[2].view(torch.float32)
    return (fields[3].view(torch.int8) * scale).scatter(1, indices, exact)


def topk_int8_hook(
    options_and_state: tuple[Any, State], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Return a future with the approximate mean of a bucket's gradients over all processes.
    `options_and_state` holds the strategy's options and the compression errors so far. All ranks
    must call this function, which runs two collectives."""
    options, state = options_and_state
    flat = bucket.buffer()
    index = bucket.index()
    count = dist.get_world_size()
    part_size = -(-flat.numel() // count)
    k = options.num_exact(part_size)
    padded = torch.nn.functional.pad(flat, (0, count * part_size - flat.numel()))
    compensated = padded.view(count, part_size) + state["lost"].get(index, 0.0)
    message = compress(compensated, k)
    state["lost"][index] = compensated - decompress(message, k)
    received = torch.empty_like(message)
    # On GPUs, `send_mean_back` runs on another stream, so tensors that outlive the call are
    # allocated here.
    mean_error = state["lost_of_means"].setdefault(index, compensated.new_zeros(1, part_size))
    exchange: Any = dist.all_to_all_single(received, message, async_op=True)

    def send_mean_back(exchange_future: Any) -> torch.Tensor:
        exchange_future.value()  # raises the collective's error
        mean = decompress(received, k).mean(0, keepdim=True) + mean_error
        reply = compress(mean, k)
        mean_error.copy_(mean - decompress(reply, k))
        replies = torch.empty_like(message)
        dist.all_gather_into_tensor(replies, reply)
        return flat.copy_(decompress(replies, k).flatten()[: flat.numel()])

    return exchange.get_future().then(send_mean_back)
