"""What this suite uses of private interfaces of torch and DeepSpeed, with private_pipelining.py.

Checked against torch 2.11 and 2.13 and DeepSpeed 0.19.8, which native strategies never import."""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Operations on lists of tensors, in one kernel launch; torch's own optimizers are made of them.
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
# Operations that scaled_dot_product_attention and varlen_attn dispatch to.
ATTENTION_OPS = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
if torch.backends.cuda.is_built():  # varlen_attn needs CUDA, and its import takes seconds
    import torch.nn.attention.varlen  # registers the operation

    ATTENTION_OPS.append(torch.ops.torch_attn._varlen_attn.default)
# Collectives that torch.compile can hold in a graph: (tensor, "sum" or "max", group), and
# (tensor, dimension, group).
all_reduce_functional = functional_collectives.all_reduce
all_gather_functional = functional_collectives.all_gather_tensor


class ComputeStreamReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter, with sharded gradients in memory of the stream that computes.

    torch allocates them on the stream that communicates. The caching allocator keeps free memory
    apart by stream, so gradients could not use the memory of activations that the backward pass has
    freed. During the capture of a CUDA graph the allocator cannot return that memory to the driver
    either: a model of 8B parameters ran out of memory beside 23 GiB of free blocks.

    Reusing the memory is safe: the communication stream waits for the compute stream before it
    writes, and the optimizer step, after which gradients are freed, waits for it in turn.
    """

    def __init__(self, compute_stream: torch.cuda.Stream) -> None:
        self.compute_stream = compute_stream

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialized tensor of `size`."""
        with torch.cuda.stream(self.compute_stream):
            return torch.empty(*size, dtype=dtype, device=device)


def first_index(tensor: DTensor) -> tuple[int, ...]:
    """Where this process's part of a tensor begins."""
    mesh = tensor.device_mesh
    return tuple(compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)[1])


def gather_on_use(module: Any) -> None:
    """Let one of FSDP's modules gather its parameters when it is called, on the stream that
    computes, and no other module's meanwhile."""
    module._set_unshard_async_op(True)
    module.set_modules_to_backward_prefetch([module])  # in place of FSDP's own choice


class CutWhereTold:
    """To inherit before DeepSpeed's PipelineModule: stages begin at the layers in `parts`."""

    parts: list[int]

    def _partition_layers(self: Any, method: str = "") -> None:
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def __init__(self, layers: list[Any], **options: Any) -> None:
        super().__init__(layers, **options)  # type: ignore[call-arg]
        self._layer_specs: list[Any] = []  # let go of the layers of other stages


def find_zero_fragment(zero: Any, parameter: Any) -> tuple[int, int, int, int] | None:
    """Where a ZeRO optimizer keeps this process's range of a parameter's elements in fp32: (number
    of the flat tensor, offset in it, first element, how many); None where it has none. DeepSpeed's
    public accessors do not find Adam's moments in any but the first (stages 1, 2)."""
    if hasattr(parameter, "ds_id"):  # stage 3
        group, offset, count = zero.grad_position[zero.get_param_id(parameter)]
        return group, offset, zero._get_param_partition_rank(parameter) * count, count
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    place = mapping.hp_fragment_address
    return mapping.param_group_index, place.start, mapping.lp_fragment_address.start, place.numel


def zero_partitions(zero: Any) -> list[torch.Tensor]:
    """The flat fp32 weights of this process, each a key of Adam's state; empty while on disk."""
    stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
    return zero.fp32_partitioned_groups_flat if stage_3 else zero.single_partition_of_fp32_groups


def read_zero_group(zero: Any, group: int) -> dict[str, torch.Tensor]:
    """ "weight" and Adam's moments of one flat tensor; copies of what lies on disk."""
    swapped = _is_swapped(zero, group)
    if swapped:
        zero._optimizer_states_and_gradient_swap_in(group)
    flat = zero_partitions(zero)[group]
    held = {"weight": flat, **zero.optimizer.state.get(flat, {})}
    if swapped:
        held = {kind: each.clone() for kind, each in held.items() if kind != "step"}
        zero._release_swap_buffers(group)
    return held


def zero_groups_to_write(zero: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """The flat weights of each group in memory, to be written, and given a state in Adam; after the
    last the weights that are trained are those that were written. Collective."""
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
    """Repeat a loaded DeepSpeedCPUAdam's steps on nothing: its C++ object multiplies beta ** step
    up in fp32, and pow rounds otherwise."""
    nothing = [torch.zeros(0) for _ in range(4)]
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, *betas, eps, 0.0, True, *nothing)


def share_memory(group: dist.ProcessGroup) -> None:
    """Let processes of one machine read each other's GPU memory, as overlap_products needs it.
    RuntimeError where the GPUs cannot. Collective over `group`."""
    name = group.group_name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(name)
    symmetric_memory.rendezvous(symmetric_memory.empty((1024,), device=torch.device("cuda")), name)


def overlap_products(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """What is compiled inside gathers and sums in parts, while a product computes others."""
    if not enabled:
        return contextlib.nullcontext()
    from torch._inductor import config as inductor_config  # takes long to import

    logging.getLogger("torch._inductor.fx_passes.micro_pipeline_tp").setLevel(logging.ERROR)
    return inductor_config.patch(_micro_pipeline_tp=True)


def record_memory_history() -> None:
    """From now on remember who allocates and frees memory of the GPU; the last 100,000 of it."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)


def dump_memory_history(path: Path) -> None:
    """Write that, with what is allocated, for pytorch.org/memory_viz, and remember no more."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def import_muon() -> None:
    """Let DeepSpeed have its Muon uncompiled. Every ZeRO optimizer imports it, nothing here trains
    with it, and its decorators would import torch's compiler, which takes seconds."""
    compile_function = torch.compile
    torch.compile = lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        torch.compile = compile_function


def forget_pipeline_grid() -> None:
    """Else DeepSpeed would give the next engine of this process the grid of the last one."""
    import deepspeed

    deepspeed.utils.groups.mpu = None


def leave_out_extensions() -> None:
    """Of what DeepSpeed builds if it can, all there is so far: an all-reduce between CPUs, for its
    inference alone, that takes a compiler 40 s and more, and 66 MiB of /dev/shm a process."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}  # made where it is missing, by running compilers
