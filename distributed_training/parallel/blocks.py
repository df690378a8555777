"""Apply activation checkpointing, torch.compile and FSDP2 to each block of a model."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from distributed_training.models.chunked_loss import ChunkedCrossEntropy
from distributed_training.models.decoder import Decoder, summed_cross_entropy
from distributed_training.models.private import local_part, register_flop_formulas
from distributed_training.parallel.private import (
    ATTENTION_OPS,
    COLLECTIVE_PREFIX,
    WAIT_OPERATION,
    ComputeStreamReduceScatter,
    compile_whole,
    compile_with_less_memory,
    keep_headers_private,
)
from distributed_training.settings.config import RunConfig

# Graphs of a model's blocks. By default, torch stops compiling after 8 graphs, and runs all other
# blocks without compilation. Gemma 4 has 7 graphs.
_MAX_GRAPHS = 32
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_OWN_ATTENTION = {
    "distributed_training.delta_rule.default",
    "distributed_training.wide_attention.default",
}
# Operations that multiply by frozen matrices in models/nf4.py, models/fp8.py or parallel/lora.py
_FROZEN_MATMULS = {
    "distributed_training.nf4_matmul.default",
    "distributed_training.fp8_matmul.default",
    "distributed_training.adapted_linears.default",
    "distributed_training.sum_of_linears.default",
}


def apply_checkpointing(
    model: Decoder, mode: str, num_blocks: int | None = None, *, compiled: bool = False
) -> None:
    """Apply activation checkpointing to the first `num_blocks` blocks, by default all, in place.
    Call this function after apply_lora and before apply_compile. `compiled` indicates whether the
    blocks will be compiled.

    "full" and "offload" save only the input of a block, [B, T, D]. "selective" also saves the
    outputs of attention and of matrix multiplications. Recomputing the other operations (norms,
    activation functions, residual sums) is cheap. The products with B of LoRA adapters are also
    cheap, and are recomputed if they are separate operations. "offload-attention" saves the same
    for attention, but nothing for the MLP; in blocks without attention, it saves what "selective"
    saves. Recomputation uses the same dropout masks as the forward
    pass."""
    if mode == "none":
        return
    checkpoint_fn = functools.partial(checkpoint.checkpoint, use_reentrant=False)
    if mode in ("selective", "offload-attention"):
        ranks = frozenset(
            len(local_part(parameter))
            for name, parameter in model.named_parameters()
            if name.endswith(".adapter.a")
        )
        context = functools.partial(_selective_contexts, ranks, mode == "selective", compiled)
        checkpoint_fn = functools.partial(checkpoint_fn, context_fn=context)
    for block in list(model.blocks.values())[:num_blocks]:
        block.forward = functools.partial(checkpoint_fn, block.forward)


def _selective_contexts(adapter_ranks: frozenset[int], saves_mlp: bool, compiled: bool) -> Any:
    """Return the contexts of a block's forward pass and of its recomputation."""
    policy = _SelectivePolicy(adapter_ranks, saves_mlp=saves_mlp, compiled=compiled)
    return checkpoint.create_selective_checkpoint_contexts(policy)


class _SelectivePolicy:
    """Policy that decides which outputs of a block are saved for the backward pass. PyTorch calls
    the policy for each operation of a forward pass, in execution order.

    With tensor parallelism, the output of a matrix multiplication can be one term of a sum over
    ranks. A compiled block saves the sum instead of the term, so the backward pass does not
    communicate again. Saving the sum is 8% faster for Llama-3.2-1B on two H200s. An uncompiled
    block would save both and still communicate again, so it saves only the term.

    With context parallelism, attention's output is received again, because its exchange is not
    saved. The matrix that follows is then also applied again, so that cp needs no more memory than
    tp although FSDP gathers whole blocks. This takes 1% to 2% of a step."""

    def __init__(self, adapter_ranks: frozenset[int], *, saves_mlp: bool, compiled: bool) -> None:
        # PyTorch passes neither modules nor parameters to the policy, but only tensors, and in
        # compiled code these have only shapes. A and B of adapters are told apart by their sizes,
        # and the MLP begins after the product that follows attention.
        self.adapter_ranks = adapter_ranks
        self.saves_mlp = saves_mlp
        self.compiled = compiled
        self.latest_is_sum = False  # whether the latest collective computes a sum
        self.follows_exchange = False  # whether no product has followed the latest all-to-all
        self.follows_attention = False  # until a product has followed attention
        self.in_mlp = False

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        must_save = self._must_save(op, args)
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

    def _must_save(self, op: Any, args: tuple[Any, ...]) -> bool:
        name = str(op)
        if name == WAIT_OPERATION:
            return self.compiled and self.latest_is_sum
        if name.startswith(COLLECTIVE_PREFIX):
            self.latest_is_sum = "reduce" in name
            return False
        if name == "distributed_training.all_to_all.default":
            self.follows_exchange = not self.in_mlp  # where experts exchange tokens
            return False
        if op in ATTENTION_OPS or name in _OWN_ATTENTION:
            self.follows_attention = True
            return True
        if name == "distributed_training.expert_linear.default":
            # The first product gathers the rows of `tokens`.
            return self.saves_mlp and args[3] is not None
        if op is torch.ops.aten.bmm.default:  # attention that is not one operation
            self.follows_attention = True
            return False
        num_inputs = num_outputs = None
        if op in MATMULS:
            num_inputs, num_outputs = args[-1].shape
        elif name not in _FROZEN_MATMULS:
            return False
        if self.follows_exchange:
            self.follows_exchange = False
            self.in_mlp |= self.follows_attention
            self.follows_attention = False
            return False
        # The products with A are as small as they are slow to compute again.
        if num_inputs in self.adapter_ranks or num_outputs in self.adapter_ranks:
            return num_outputs in self.adapter_ranks
        is_unsaved = self.in_mlp and not self.saves_mlp
        self.in_mlp |= self.follows_attention
        self.follows_attention = False
        return not is_unsaved


def build_loss(config: RunConfig) -> Callable[..., torch.Tensor]:
    """Return the loss of an unsharded model. With `loss_chunk_tokens`, each chunk of that many
    tokens is computed separately. For pairs of answers, return the losses of tokens."""
    if not (config.loss_chunk_tokens or config.has_pairs):
        return summed_cross_entropy
    return build_chunked_loss(config)


def build_chunked_loss(config: RunConfig) -> ChunkedCrossEntropy:
    """Return the loss computed in chunks of `loss_chunk_tokens` tokens, or of all tokens if it is
    0. Only this loss can be sharded by vocabulary."""
    tokens = config.loss_chunk_tokens or sys.maxsize
    return ChunkedCrossEntropy(tokens, compiled=config.compile, per_token=config.has_pairs)


def _compile(function: Any, backend: Any = "inductor") -> Any:
    """Compile `function` separately for each input shape. By default, torch.compile makes changing
    shapes symbolic. Symbolic shapes are slower and do not work with DTensors (torch 2.11)."""
    options: Any = {"recompile_limit": _MAX_GRAPHS}  # which torch's annotations do not know
    compiled = torch.compile(function, dynamic=False, backend=backend, **options)
    return compile_whole(compiled)


def apply_compile(model: Decoder, config: RunConfig, *, compile_outer_layers: bool) -> None:
    """Compile a model in place if `config.compile` is set.

    Each block's forward is compiled, and all blocks share one graph. The loss is also compiled. If
    the loss is chunked, it compiles itself. If `compile_outer_layers` is set, the embedding and the
    final norm are also compiled. These layers cannot be compiled with ZeRO stage 3, because it adds
    hooks to them."""
    if not config.compile:
        return
    keep_headers_private()
    register_flop_formulas()
    backend: Any = "inductor"
    if compile_outer_layers and config.lora_rank and config.activation_checkpointing == "none":
        backend = compile_with_less_memory
    has_chunked_loss = model.loss is not summed_cross_entropy
    for block in model.blocks.values():
        block.forward = _compile(block.forward, backend)
    if compile_outer_layers:
        model.embed = _compile(model.embed)
    if compile_outer_layers and not has_chunked_loss:
        model.apply_head = _compile(model.apply_head)
    elif compile_outer_layers and model.is_last:
        model.norm_out.forward = _compile(model.norm_out.forward)
    elif not has_chunked_loss:
        model.loss = _compile(model.loss)


def apply_fsdp(
    model: Decoder,
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    *,
    keep_gathered: bool,
    keep_outer_gathered: bool,
    ignored: set[torch.nn.Parameter],
) -> None:
    """Shard each block and then the remaining parameters in place with FSDP2.

    `mesh` has one axis, or two axes for HSDP: replicas and shards. The forward and backward passes
    all-gather a block's parameters in `dtype`, by default fp32, and free them after use. The
    backward pass reduce-scatters gradients in the dtype of the trained weights and, for HSDP,
    all-reduces the sharded gradients over replicas. The root module's parameters stay gathered,
    because both the first and the last operation use a tied embedding. If `keep_gathered` is set,
    the blocks also stay gathered. This setting is for pipeline stages, which use each block for
    many micro-batches. If `keep_outer_gathered` is set, the root module's parameters, which must be
    frozen, stay gathered after the step. The parameters in `ignored` stay as they are."""
    weight_dtype = next(weight.dtype for weight in model.parameters() if weight.requires_grad)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=weight_dtype)
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    for block in model.blocks.values():
        shard(block, reshard_after_forward=not keep_gathered)
    root: Any = shard(model, reshard_after_forward=False)
    root.set_reshard_after_backward(not keep_outer_gathered, recurse=False)
    if mesh.device_type == "cuda":
        stream = torch.cuda.current_stream()
        num_replicas = mesh.size(0) if mesh.ndim == 2 else 1
        modules: list[Any] = [*model.blocks.values(), model]
        for module in modules:
            comm = ComputeStreamReduceScatter(module, stream, num_replicas)
            module.set_custom_reduce_scatter(comm)
