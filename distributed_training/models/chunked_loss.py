"""The loss in chunks: not all logits are in memory at a time. Letters as in decoder.py; N = B T."""

import torch
import torch.nn.functional as F

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models.decoder import mask_padding, summed_cross_entropy


class ChunkedCrossEntropy:
    """As summed_cross_entropy, of so many tokens at a time: the logits of others are not there.
    Their gradient is computed in the forward pass, with that of hidden states and output rows, as
    they would have to be computed again for it. So nothing but those two is kept: [B, T, D] and
    [P, D]. What calls it must not be compiled, or the gradient would go back to the backward pass.
    """

    def __init__(self, tokens: int, *, compiled: bool) -> None:
        self.tokens = tokens
        self.compute = loss_and_gradient
        if compiled:
            self.compute = torch.compile(loss_and_gradient, dynamic=False)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int
    ) -> torch.Tensor:
        if torch.is_grad_enabled():
            return _Chunked.apply(x, weight, targets, vocab_size, self.tokens, self.compute)
        chunks = [each.split(self.tokens) for each in (x.flatten(0, -2), targets.flatten())]
        pairs = zip(*chunks, strict=True)
        losses = [summed_cross_entropy(part, weight, own, vocab_size) for part, own in pairs]
        return torch.stack(losses).sum()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, tokens, compute):  # type: ignore[no-untyped-def]
        flat = x.flatten(0, -2)
        grad_x = torch.empty_like(flat)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), device=x.device)
        chunks = [each.split(tokens) for each in (flat, targets.flatten(), grad_x)]
        for part, own, grad_part in zip(*chunks, strict=True):
            loss, grad_logits = compute(F.linear(part, weight), own, vocab_size)
            total += loss
            torch.mm(grad_logits, weight, out=grad_part)
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ part
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_x.view_as(x), grad_weight)
        return total

    @staticmethod
    def backward(ctx, scale):  # type: ignore[no-untyped-def]
        grad_x, grad_weight = ctx.saved_tensors
        grad_weight = None if grad_weight is None else grad_weight * scale
        return grad_x * scale, grad_weight, None, None, None, None


def loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [N, P], targets [N] -> (summed loss, fp32 scalar; its gradient, like the logits)."""
    z = mask_padding(logits.float(), vocab_size)
    normaliser = torch.logsumexp(z, -1, keepdim=True)
    loss_mask = (targets != IGNORE_INDEX)[:, None]
    one_hot = torch.arange(z.shape[1], device=z.device) == targets[:, None]
    target_logit = torch.where(one_hot, z, 0.0).sum(-1, keepdim=True)
    loss = torch.where(loss_mask, normaliser - target_logit, 0.0).sum()
    gradient = torch.where(loss_mask, torch.exp(z - normaliser) - one_hot.float(), 0.0)
    return loss, gradient.to(logits.dtype)
