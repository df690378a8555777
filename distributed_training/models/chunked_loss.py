"""Compute the loss in chunks, so that only one chunk of logits is in memory at a time.

The letters in shapes are defined in decoder.py. In addition, N = B T, and R is the number of ranks
that shard the vocabulary."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models.decoder import softcap
from distributed_training.models.private import all_gather_functional


class VocabularyShard(NamedTuple):
    """Shard of the vocabulary on one rank of a process group."""

    first: int  # token id of the first row
    group: Any


class ChunkedCrossEntropy:
    """Cross entropy that equals `summed_cross_entropy` but is computed for at most `tokens` tokens
    at a time.

    The logits are not kept for the backward pass. The forward pass therefore also computes the
    gradients of the hidden states [B, T, D] and of the output layer's weight [P, D]. Each gradient
    has the dtype of its tensor. Each chunk's matrix multiplication adds to the gradient of the
    weight in place, or in fp16, to a sum in fp32. The caller must not be compiled, because
    torch.compile would move the computation of the gradients to the backward pass.

    With `per_token`, the result is the loss of each token, fp32 [B, T], which is 0 outside the
    loss. The backward pass may weight the tokens, so it computes the logits again."""

    def __init__(self, tokens: int, *, compiled: bool, per_token: bool = False) -> None:
        self.tokens = tokens
        self.function = _TokenLosses if per_token else _Chunked
        self.compute = loss_and_gradient
        if compiled:
            self.compute = torch.compile(loss_and_gradient, dynamic=False)

    def __call__(  # type: ignore[no-untyped-def]
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        vocab_size: int,
        shard: VocabularyShard | None = None,
        cap: float = 0.0,
    ) -> torch.Tensor:
        """Return the summed loss, an fp32 scalar, for hidden states `x` [B, T, D] and the output
        layer's `weight` [P, D].

        With a `shard`, `weight` is this rank's shard of the rows, [P / R, D]. The caller must then
        sum the gradient of `x` over the group. `cap` limits the logits (see `decoder.softcap`)."""
        if not torch.is_grad_enabled():
            # Detach the tensors so that the forward pass does not compute their gradients.
            x, weight = x.detach(), weight.detach()

        def compute(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.compute(logits, targets, vocab_size, shard, cap)

        return self.function.apply(x, weight, targets, self.tokens, compute)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, tokens, compute):  # type: ignore[no-untyped-def]
        needs = ctx.needs_input_grad
        losses, *gradients = _run_chunks(x, weight, targets, tokens, compute, needs)
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx, scale):  # type: ignore[no-untyped-def]
        # Scaling in place is safe. Autograd releases saved tensors after this pass, and a second
        # backward pass is an error.
        gradients = []
        for gradient in ctx.saved_tensors:
            gradients.append(None if gradient is None else gradient.mul_(scale))
        return *gradients, None, None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, tokens, compute):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight, targets)
        ctx.options = tokens, compute
        return _run_chunks(x, weight, targets, tokens, compute, (False, False))[0]

    @staticmethod
    def backward(ctx, scales):  # type: ignore[no-untyped-def]
        needs = ctx.needs_input_grad
        _, *gradients = _run_chunks(*ctx.saved_tensors, *ctx.options, needs, scales)
        return *gradients, None, None, None


def _run_chunks(  # type: ignore[no-untyped-def]
    x, weight, targets, tokens, compute, needs_grad, scales=None
):
    """Return the losses of tokens [B, T], and if `needs_grad` says so, the gradients of their sum,
    weighted with `scales` [B, T], with respect to x and weight."""
    needs_x, needs_weight, *_ = needs_grad
    flat = x.flatten(0, -2)
    num_chunks = -(-len(flat) // tokens)
    tokens = -(-len(flat) // num_chunks)  # chunks of nearly equal size
    grad_x = torch.empty_like(flat) if needs_x else None
    grad_weight = None
    losses = []
    target_chunks = targets.flatten().split(tokens)
    pairs = zip(flat.split(tokens), target_chunks, strict=True)
    for index, (chunk, chunk_targets) in enumerate(pairs):
        logits = F.linear(chunk, weight)
        losses.append(compute(logits, chunk_targets))
        grad_logits = logits  # `compute` has overwritten the logits with their gradient.
        places = slice(index * tokens, index * tokens + len(chunk))
        if scales is not None:
            grad_logits *= scales.flatten()[places, None]
        if grad_x is not None:
            torch.mm(grad_logits, weight, out=grad_x[places])
        if needs_weight and weight.dtype is torch.float16:
            # The sum is not scaled yet, and could overflow in fp16.
            product = (grad_logits.t() @ chunk).float()
            grad_weight = product if grad_weight is None else grad_weight.add_(product)
        elif grad_weight is not None:
            grad_weight.addmm_(grad_logits.t(), chunk)
        elif needs_weight:
            grad_weight = grad_logits.t() @ chunk
        del logits, grad_logits  # frees them before the next chunk's logits are allocated
    token_losses = torch.cat(losses).view_as(targets)
    return token_losses, None if grad_x is None else grad_x.view_as(x), grad_weight


def loss_and_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    shard: VocabularyShard | None,
    cap: float,
) -> torch.Tensor:
    """Return the loss of each token, fp32 [N], for logits [N, P / R] and targets [N]. Overwrite the
    logits with their gradient. With a `shard`, all-gather two fp32 numbers per token over the
    group."""
    first = 0 if shard is None else shard.first
    columns = first + torch.arange(logits.shape[1], device=logits.device)
    z = softcap(logits.float(), cap)
    cap_gradient = 1 - (z / cap) ** 2 if cap else 1.0
    if first + logits.shape[1] > vocab_size:
        z = z.masked_fill(columns >= vocab_size, -torch.inf)
    normalizer = torch.logsumexp(z, -1, keepdim=True)
    one_hot = columns == targets[:, None]
    target_logits = torch.where(one_hot, z, 0.0)
    target_logit = target_logits.sum(-1, keepdim=True)
    if shard is not None:
        pair = torch.stack([normalizer, target_logit])
        gathered = all_gather_functional(pair, 0, shard.group)
        normalizers, target_logits = gathered.unflatten(0, (-1, 2)).unbind(1)
        normalizer = torch.logsumexp(normalizers, 0)
        target_logit = target_logits.sum(0)
    loss_mask = (targets != IGNORE_INDEX)[:, None]
    gradient = torch.where(loss_mask, torch.exp(z - normalizer) - one_hot.float(), 0.0)
    logits.copy_(gradient * cap_gradient)
    return torch.where(loss_mask, normalizer - target_logit, 0.0)[:, 0]
