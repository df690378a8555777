"""What is done block by block: recomputation in backward, torch.compile, FSDP2's shards."""

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from distributed_training.models.chunked_loss import ChunkedCrossEntropy
from distributed_training.models.decoder import Decoder, summed_cross_entropy
from distributed_training.parallel.private import (
    ATTENTION_OPS,
    ComputeStreamReduceScatter,
    gather_on_use,
)
from distributed_training.settings.config import RunConfig


def apply_checkpointing(model: Decoder, mode: str, lora_rank: int = 0) -> None:
    """Recompute every block in the backward pass, in place.

    "full" saves only the input of a block, [batch, seq_len, hidden]. "selective" also saves the
    outputs of attention and of matrix multiplications, because recomputing the rest (norms,
    activation functions, sums) is cheap. The matrix multiplications of LoRA adapters are cheap too:
    they are recomputed. Dropout masks are reproduced.
    """
    if mode == "none":
        return
    checkpointed = functools.partial(checkpoint.checkpoint, use_reentrant=False)
    if mode == "selective":
        policy = functools.partial(_selective_policy, lora_rank)
        context = functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)
        checkpointed = functools.partial(checkpointed, context_fn=context)
    for block in model.blocks.values():
        block.forward = functools.partial(checkpointed, block.forward)


def _selective_policy(
    lora_rank: int, context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Decide whether the output of `op` is saved for the backward pass."""
    if op in ATTENTION_OPS or str(op) == "distributed_training.nf4_product.default":
        return CheckpointPolicy.MUST_SAVE
    if op not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.PREFER_RECOMPUTE
    # An adapter's matrix A^T is [in, rank], B^T is [rank, out].
    is_adapter = lora_rank > 0 and lora_rank in args[-1].shape
    return CheckpointPolicy.PREFER_RECOMPUTE if is_adapter else CheckpointPolicy.MUST_SAVE


def apply_chunked_loss(model: Decoder, config: RunConfig) -> None:
    """Compute the loss of `loss_chunk_tokens` tokens at a time, in place. Between apply_tp and
    apply_compile."""
    if not config.loss_chunk_tokens or not model.is_last:
        return
    chunked = ChunkedCrossEntropy(int(config.loss_chunk_tokens), compiled=bool(config.compile))
    if model.loss is summed_cross_entropy:
        model.loss = chunked
    else:  # apply_tp's
        model.loss = functools.partial(model.loss, chunked=chunked)


def _compile(function: Any) -> Any:
    """torch.compile, again for each other shape. Left to itself it would then make shapes symbolic,
    which DTensors cannot be (torch 2.11), and which runs slower."""
    return torch.compile(function, dynamic=False)


def apply_compile(model: Decoder, config: RunConfig, *, ends: bool) -> None:
    """Where CONFIG compiles: every block's forward, all of which share one graph, and what follows
    the last norm, in place. With `ends`, what precedes and follows the blocks, too: not where
    ZeRO-3's hooks run around embedding and last norm. compile=whole: all up to the last norm as one
    graph, which fuses what lies between blocks. A loss in chunks has compiled its own part."""
    if not config.compile:
        return
    chunked = bool(config.loss_chunk_tokens)
    if config.compile == "whole":
        model.hidden = _compile(model.hidden)  # type: ignore[method-assign]
    else:
        for block in model.blocks.values():
            block.forward = _compile(block.forward)
        if ends:
            model.enter = _compile(model.enter)
    if ends and not chunked:
        model.leave = _compile(model.leave)
    elif ends and model.is_last:
        model.norm_out.forward = _compile(model.norm_out.forward)
    elif not chunked:
        model.loss = _compile(model.loss)


def apply_fsdp(
    model: Decoder, mesh: DeviceMesh, dtype: torch.dtype | None, *, keep_gathered: bool = False
) -> None:
    """Shard each block, then the rest, in place, over one axis, or two: copies of shards (HSDP).
    Both passes all-gather a block's parameters (in `dtype`; None: fp32) and drop them after use;
    backward reduce-scatters gradients in fp32 (and all-reduces the shards between copies). The root
    holds the tied embedding, needed first and last, so it stays gathered; with `keep_gathered` so
    does every block, for pipeline stages, which run many times."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if mesh.device_type == "cuda":
        reduce_scatter = ComputeStreamReduceScatter(torch.cuda.current_stream())
        modules: list[Any] = [*model.blocks.values(), model]
        for module in modules:
            module.set_custom_reduce_scatter(reduce_scatter)


def reset_shards(model: Decoder) -> None:
    """Tell FSDP, if it is used, that its shards have been replaced: they were on "meta"."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._apply(lambda tensor: tensor, recurse=False)


def apply_prefetch(model: Decoder, ahead: int) -> None:
    """Let each of FSDP's blocks begin to gather the next `ahead` ones, in both passes, in place. 1
    is what FSDP does by itself; with 0 nothing is computed while a block is gathered."""
    blocks: list[Any] = list(model.blocks.values())
    if ahead == 0:
        for module in (model, *blocks):
            gather_on_use(module)
    elif ahead > 1:
        for place, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, place - ahead) : place][::-1])
