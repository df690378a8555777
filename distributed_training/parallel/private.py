"""Wrap the private interfaces of torch and DeepSpeed that this suite uses. The interfaces of
torch.distributed.pipelining are wrapped in private_pipelining.py.

All interfaces were checked against torch 2.14 and 2.15, and against DeepSpeed 0.19.8. Native
strategies never import DeepSpeed."""

import contextlib
import itertools
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._C import _distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

# Fused operations on lists of tensors, which torch's optimizers also use
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
# Operations to which scaled_dot_product_attention and varlen_attn dispatch
ATTENTION_OPS = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
if torch.cuda.is_available():  # varlen_attn needs CUDA, and its import takes seconds
    import torch.nn.attention.varlen  # registers the operation with torch

    ATTENTION_OPS.append(torch.ops.torch_attn._varlen_attn.default)
group_of_name = _distributed_c10d._resolve_process_group
# Names of the operations that these collectives become in a graph
COLLECTIVE_PREFIX = "_c10d_functional."
WAIT_OPERATION = "_c10d_functional.wait_tensor.default"


class ComputeStreamReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter for one FSDP module, with sharded gradients allocated on the compute
    stream if they are kept until the optimizer step.

    By default, FSDP allocates sharded gradients on the communication stream. The caching allocator
    separates free memory by stream, so the gradients cannot reuse memory that the backward pass has
    freed. During the capture of a CUDA graph, the allocator cannot return that memory to the driver
    either. A model with 8B parameters ran out of memory with 23 GiB of free blocks.

    Reusing the memory is safe for gradients that are kept. The communication stream waits for the
    compute stream before it writes. The optimizer step waits for the communication stream, and the
    gradients are freed only after the step.

    Other results are temporary. FSDP adds them to an earlier gradient, casts them to the
    parameters' dtype or, with several replicas, keeps them only until the all-reduce. They are
    freed while the communication stream still uses them, so the next operations on the compute
    stream could overwrite them."""

    def __init__(self, module: Any, compute_stream: torch.cuda.Stream, num_replicas: int) -> None:
        self.module = module
        self.compute_stream = compute_stream
        self.num_replicas = num_replicas

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialized tensor of the given size."""
        if not self._is_kept(dtype):
            return super().allocate(size, dtype=dtype, device=device)
        with torch.cuda.stream(self.compute_stream):
            return torch.empty(*size, dtype=dtype, device=device)

    def _is_kept(self, dtype: torch.dtype) -> bool:
        """Return whether the next result, in the given dtype, becomes the module's gradient."""
        (group,) = self.module._get_fsdp_state()._fsdp_param_groups
        return (self.num_replicas == 1 or group.all_reduce_grads) and all(
            parameter.sharded_param.grad is None and parameter.orig_dtype == dtype
            for parameter in group.fsdp_params
            if parameter.sharded_param.requires_grad
        )


def reset_fsdp_shards(model: torch.nn.Module) -> None:
    """If a model uses FSDP, make FSDP use the tensors that have replaced its meta-device shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._apply(lambda tensor: tensor, recurse=False)  # type: ignore[attr-defined]


# Gathers parameters in one buffer, and copies them from there
_gather_in_buffer = _fsdp_param_group.foreach_all_gather
_copy_from_buffer = _fsdp_param_group.foreach_all_gather_copy_out
_LARGE_BYTES = 2**20  # from which an all-gather is bound by bandwidth


def move_frozen_shards(modules: Sequence[Any]) -> list[tuple[Any, torch.Tensor]]:
    """Move the shards of large frozen parameters of FSDP modules to memory that other GPUs can
    read. Return each module that has any, and the bytes of its shards. Raises RuntimeError if the
    memory is too small."""
    moved = []
    for module in modules:
        (group,) = module._get_fsdp_state()._fsdp_param_groups
        parameters = [*filter(_is_large_and_frozen, group.fsdp_params)]
        if not parameters:
            continue
        sizes = [parameter._sharded_param_data.nbytes for parameter in parameters]
        starts = [0, *itertools.accumulate(-(-size // 256) * 256 for size in sizes)]  # aligned
        # Unlike symmetric_memory.empty, torch counts what it allocates in the pool.
        with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(group.device)):
            buffer = torch.empty(starts[-1], dtype=torch.uint8, device=group.device)
        for parameter, start, size in zip(parameters, starts, sizes, strict=False):
            weight = parameter.sharded_param
            parameter.place = slice(start, start + size)
            values = buffer[parameter.place].view(weight.dtype)
            shard = weight._local_tensor
            weight._local_tensor = values.view(shard.shape).copy_(shard)
            parameter._sharded_param_data = values
        torch.cuda.empty_cache()  # The old shards would otherwise keep their memory from the pool.
        moved.append((module, buffer))
    return moved


def connect_frozen_shards(moved: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Let each GPU of an FSDP group read the shards that `move_frozen_shards` has moved. Raises
    RuntimeError if the GPUs cannot access each other's memory. All ranks must call this
    function."""
    for module, buffer in moved:
        (group,) = module._get_fsdp_state()._fsdp_param_groups
        ranks = group._all_gather_process_group
        handle = symmetric_memory.rendezvous(buffer, ranks.group_name)
        parts = [
            handle.get_buffer(rank, (len(buffer),), torch.uint8) for rank in range(ranks.size())
        ]
        for parameter in group.fsdp_params:
            if hasattr(parameter, "place"):
                dtype = parameter.sharded_param.dtype
                parameter.shards = [part[parameter.place].view(dtype) for part in parts]
    torch.cuda.synchronize()


def gather_by_copying(modules: Sequence[Any]) -> None:
    """Let FSDP modules, which run in this order, copy shared shards from the other GPUs into the
    parameters. By default, NCCL gathers a block in a buffer, with kernels that take multiprocessors
    from the computation, and FSDP copies the parameters from there.

    Memory is allocated in the order of the compute stream, so a gather waits for all that was
    launched before. Each module therefore starts the gather of the next one before it computes."""
    for module, following in itertools.pairwise(modules):
        module.set_modules_to_forward_prefetch([following])
    _fsdp_param_group.foreach_all_gather = _gather
    _fsdp_param_group.foreach_all_gather_copy_out = _copy_rest_from_buffer


def _is_large_and_frozen(parameter: Any) -> bool:
    """Return whether a gather can copy the values of an FSDP parameter as they are. All ranks
    return the same."""
    weight = parameter.sharded_param
    dtype = parameter.mp_policy.param_dtype
    is_cast = weight.is_floating_point() and dtype not in (None, weight.dtype)
    num_values = parameter.padded_sharded_param_size.numel()
    is_even = num_values * parameter.mesh_info.shard_mesh_size == parameter._orig_size.numel()
    is_large = num_values * weight.itemsize >= _LARGE_BYTES
    return not weight.requires_grad and not is_cast and is_even and is_large


def _gather(
    parameters: Any,
    group: Any,
    async_op: Any,
    copy_stream: Any,
    stream: Any,
    device: Any,
    comm: Any,
) -> Any:
    shared, rest = _separate(parameters)
    for parameter in shared:
        values = parameter._sharded_param_data
        parameter.init_all_gather_outputs([values.numel()], [values.dtype], group.size(), device)
        parameter.alloc_all_gather_outputs()
    handle = torch.get_device_module(device)
    stream.wait_stream(handle.current_stream())
    with handle.stream(stream), torch.no_grad():
        for parameter in shared:
            (output,) = parameter.all_gather_outputs
            parts = [*zip(output.chunk(group.size()), parameter.shards, strict=True)]
            with torch.autograd._unsafe_preserve_version_counter(output):
                # Each rank begins with its own shard, so that all links are used at once.
                for part, shard in parts[group.rank() :] + parts[: group.rank()]:
                    part.copy_(shard)
    return _gather_in_buffer(rest, group, async_op, copy_stream, stream, device, comm)


def _copy_rest_from_buffer(result: Any, parameters: Any, group: Any, **options: Any) -> None:
    _copy_from_buffer(result, _separate(parameters)[1], group, **options)


def _separate(parameters: Any) -> tuple[list[Any], list[Any]]:
    """Return the parameters with shared shards and the others."""
    shared = [parameter for parameter in parameters if hasattr(parameter, "shards")]
    return shared, [parameter for parameter in parameters if parameter not in shared]


class PlannedPartition:
    """Mixin that makes the stages of DeepSpeed's PipelineModule begin at the layer indices in
    `parts`. List the mixin before PipelineModule among the base classes."""

    parts: list[int]

    def _partition_layers(self: Any, method: str = "") -> None:
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def __init__(self, layers: list[Any], **options: Any) -> None:
        super().__init__(layers, **options)  # type: ignore[call-arg]
        self._layer_specs: list[Any] = []  # frees the layers of other stages


def find_zero_fragment(zero: Any, parameter: Any) -> tuple[int, int, int, int] | None:
    """Return the position of this rank's fp32 shard of a parameter in a ZeRO optimizer, or None if
    there is no shard. The position is (index of the flat tensor, offset in that tensor, index of
    the shard's first element in the flattened parameter, number of elements).

    DeepSpeed's public accessors are not used, because in ZeRO stages 1 and 2 they find Adam moments
    only in the first flat tensor."""
    if hasattr(parameter, "ds_id"):  # ZeRO stage 3
        group, offset, count = zero.grad_position[zero.get_param_id(parameter)]
        return group, offset, zero._get_param_partition_rank(parameter) * count, count
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    flat = mapping.hp_fragment_address
    return mapping.param_group_index, flat.start, mapping.lp_fragment_address.start, flat.numel


def zero_partitions(zero: Any) -> list[torch.Tensor]:
    """Return this rank's flat fp32 weight tensors, which are the keys of the Adam state. A tensor
    is empty while its values are on disk."""
    stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
    return zero.fp32_partitioned_groups_flat if stage_3 else zero.single_partition_of_fp32_groups


def read_zero_group(zero: Any, group: int) -> dict[str, torch.Tensor]:
    """Return a dict with the flat weights of one parameter group (key "weight") and the group's
    Adam state. If the group is on disk, the tensors are copies, and the key "step" is missing."""
    swapped = _is_swapped(zero, group)
    if swapped:
        zero._optimizer_states_and_gradient_swap_in(group)
    flat = zero_partitions(zero)[group]
    tensors = {"weight": flat, **zero.optimizer.state.get(flat, {})}
    if swapped:
        tensors = {name: tensor.clone() for name, tensor in tensors.items() if name != "step"}
        zero._release_swap_buffers(group)
    return tensors


def zero_groups_to_write(zero: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index, flat fp32 weights) for each group while the group is in memory. The caller can
    write to the weights and to their Adam state. After the last group, the weights in the compute
    dtype are updated. All ranks must iterate over all groups."""
    stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
    if stage_3:
        zero.checkpoint_event_prologue()
    for group, flat in enumerate(zero_partitions(zero)):
        swapped = _is_swapped(zero, group)
        if swapped:
            zero._optimizer_states_and_gradient_swap_in(group)
        yield group, flat
        if stage_3:
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if swapped:
            zero._optimizer_states_and_gradient_swap_out(group)
    if stage_3:
        zero.checkpoint_event_epilogue()
    else:
        zero.update_lp_params()


def _is_swapped(zero: Any, group: int) -> bool:
    on_disk = getattr(zero, "swap_optimizer", False)
    return bool(on_disk and zero._swappable_optimizer_subgroup(group))


def restore_cpu_adam_powers(adam: Any, steps: int, betas: tuple[float, float], eps: float) -> None:
    """Restore the powers `beta ** step` in a loaded DeepSpeedCPUAdam by running `steps` steps on
    empty tensors. The C++ object multiplies each power by beta in fp32 once per step. Computing the
    power directly would round differently."""
    empty = [torch.zeros(0) for _ in range(4)]
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, *betas, eps, 0.0, True, *empty)


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Enable symmetric memory for `group`, as overlap_matmuls requires. Raises RuntimeError if the
    GPUs cannot access each other's memory. All ranks of `group` must call this function."""
    name = group.group_name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(name)
    symmetric_memory.rendezvous(symmetric_memory.empty((1024,), device=torch.device("cuda")), name)


def overlap_matmuls(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that, if `enabled` is set, compiles code with PyTorch's async tensor
    parallelism. The compiled code communicates tensors in chunks while it multiplies other
    chunks."""
    if not enabled:
        return contextlib.nullcontext()
    from torch._inductor import config as inductor_config  # slow to import

    logging.getLogger("torch._inductor.fx_passes.micro_pipeline_tp").setLevel(logging.ERROR)
    return inductor_config.patch(_micro_pipeline_tp=True)


def keep_headers_private() -> None:
    """Make torch's compiler store precompiled C++ headers in its cache folder. By default, the
    compiler uses a folder in /tmp, even if another user created that folder."""
    from torch._inductor import codecache  # slow to import

    codecache._HEADER_DIR = os.path.join(codecache.cache_dir(), "precompiled_headers")
    codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")


def compile_with_less_memory(graph: Any, inputs: Any) -> Any:
    """Compile a graph, as torch.compile's default backend does, but save only 90% of its
    activations. The rest, mostly outputs of norms, is computed again."""
    from torch._functorch import config as functorch_config  # slow to import
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(activation_memory_budget=0.9):
        return compile_fx(graph, inputs)


def compile_whole(compiled: Any) -> Any:
    """Return a compiled function that torch does not split.

    A checkpointed region may store values in a dict, as Gemma 4's blocks store keys and values for
    later blocks. Recomputation does not store them again. By default, torch would run all blocks
    without compilation. Within DDP, torch would split each block where its gradients fill a bucket,
    and compute again what crosses the cut."""
    from torch._dynamo import config

    options = {"skip_fwd_side_effects_in_bwd_under_checkpoint": True, "optimize_ddp": False}
    return config.patch(options)(compiled)


def forget_pipeline_grid() -> None:
    """Drop DeepSpeed's process grid. Otherwise, the next engine would reuse it."""
    import deepspeed

    deepspeed.utils.groups.mpu = None


def disable_default_extensions() -> None:
    """Disable DeepSpeed's shared-memory all-reduce between CPUs, the only extension that DeepSpeed
    builds by default. Only DeepSpeed's inference uses this extension. It takes 40 s to compile and
    needs 66 MiB of /dev/shm per process."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}  # Otherwise, DeepSpeed runs compilers to fill this dict.
