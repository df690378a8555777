"""The loss in chunks: only the logits of some tokens are in memory at a time.

Letters as in decoder.py; N = B T tokens, R processes that split the vocabulary."""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models.decoder import limit


class GatherFirst(Protocol):
    """All-gathers a tensor along a dimension over a process group, also in a compiled function."""

    def __call__(self, tensor: torch.Tensor, gather_dim: int, group: Any) -> torch.Tensor: ...


class Split(NamedTuple):
    """The rows of the vocabulary that one process of a group has."""

    first: int  # token of the first row
    group: Any
    gather: GatherFirst


class ChunkedCrossEntropy:
    """`summed_cross_entropy` of at most `tokens` tokens at a time.

    The forward pass also computes the gradients of hidden states [B, T, D] and output rows [P, D],
    for which the logits would have to be computed again later. Both are in the dtype of their
    tensors, and nothing else is kept. The gradient of the rows is added up over the chunks inside
    the matrix multiplications. The caller must not be compiled: torch.compile would move the
    gradients back to the backward pass.
    """

    def __init__(self, tokens: int, *, compiled: bool) -> None:
        self.tokens = tokens
        self.compute = loss_and_gradient
        if compiled:
            self.compute = torch.compile(loss_and_gradient, dynamic=False)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        vocab_size: int,
        split: Split | None = None,
        cap: float = 0.0,
    ) -> torch.Tensor:
        """Return the fp32 sum. With a `split`, `weight` has this process's rows, [P / R, D], and
        the gradient of `x` is one term of a sum over the group. `cap`: as of `decoder.limit`."""
        if not torch.is_grad_enabled():
            x, weight = x.detach(), weight.detach()  # no gradients are computed
        return _Chunked.apply(x, weight, targets, vocab_size, split, cap, self.tokens, self.compute)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, split, cap, tokens, compute):  # type: ignore[no-untyped-def]
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        flat = x.flatten(0, -2)
        tokens = -(-len(flat) // -(-len(flat) // tokens))  # as even chunks as possible
        grad_x = torch.empty_like(flat) if needs_x else None
        grad_weight = None
        total = torch.zeros((), device=x.device)
        targets = targets.flatten().split(tokens)
        for index, (chunk, own) in enumerate(zip(flat.split(tokens), targets, strict=True)):
            logits = F.linear(chunk, weight)
            total += compute(logits, own, vocab_size, split, cap)
            grad_logits = logits  # in its memory
            if grad_x is not None:
                place = grad_x[index * tokens : index * tokens + len(chunk)]
                torch.mm(grad_logits, weight, out=place)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), chunk)
            elif needs_weight:
                grad_weight = grad_logits.t() @ chunk
        ctx.save_for_backward(None if grad_x is None else grad_x.view_as(x), grad_weight)
        return total

    @staticmethod
    def backward(ctx, scale):  # type: ignore[no-untyped-def]
        # In place: autograd lets go of saved tensors, and a second backward pass is an error.
        gradients = [each if each is None else each.mul_(scale) for each in ctx.saved_tensors]
        return *gradients, None, None, None, None, None, None


def loss_and_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    split: Split | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """Return the summed loss, an fp32 scalar, of logits [N, P / R] and targets [N], and write its
    gradient over the logits. With a `split`, one all-gather of two fp32 numbers per token."""
    first = 0 if split is None else split.first
    columns = first + torch.arange(logits.shape[1], device=logits.device)
    z = limit(logits.float(), cap)
    slope = 1 - (z / cap) ** 2 if cap else 1.0
    if first + logits.shape[1] > vocab_size:
        z = z.masked_fill(columns >= vocab_size, -torch.inf)
    normaliser = torch.logsumexp(z, -1, keepdim=True)
    one_hot = columns == targets[:, None]
    target_logit = torch.where(one_hot, z, 0.0).sum(-1, keepdim=True)
    if split is not None:
        pair = torch.stack([normaliser, target_logit])
        gathered = split.gather(pair, 0, split.group)
        normalisers, target_logits = gathered.unflatten(0, (-1, 2)).unbind(1)
        normaliser = torch.logsumexp(normalisers, 0)
        target_logit = target_logits.sum(0)
    loss_mask = (targets != IGNORE_INDEX)[:, None]
    gradient = torch.where(loss_mask, torch.exp(z - normaliser) - one_hot.float(), 0.0)
    logits.copy_(gradient * slope)
    return torch.where(loss_mask, normaliser - target_logit, 0.0).sum()
