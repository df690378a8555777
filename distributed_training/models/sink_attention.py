"""Compute causal attention with sinks.

A sink is a trained score of a head. It takes part in the softmax of each query, but has no value.
A kernel returns attention without sinks and the logarithm L of each query's sum of exp(score). With
the sink, the logarithm is log(exp(L) + exp(sink)). A kernel's backward pass computes the weights as
exp(score - L), and it sums dy * y. It therefore returns the exact gradients if it receives the y
and the L with sinks.

The letters in shapes are those of attention.py."""

import torch

from distributed_training.models import private


class SinkAttention(torch.autograd.Function):
    """Return the attention of q [B, H, T, K] to k and v [B, G, T, K] with the shape of q. The sinks
    [H, 1] are in fp32. `ends` and `mask` are those of attention.Documents. GPUs use the ends and
    `window`, and CPUs use the mask."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q, k, v, sinks, ends, mask, scale, window
    ):
        batch, _, length, _ = q.shape
        if ends is None:
            ctx.options = {"is_causal": mask is None, "scale": scale}
            y, log_sum = private.cpu_attention(q, k, v, attn_mask=mask, **ctx.options)
        else:
            ctx.options = {
                "max_q": length,
                "max_k": length,
                "is_causal": window is None,
                "scale": scale,
                "window_size": window_size(window),
            }
            y, log_sum, _ = private.varlen_attention()(
                *map(to_rows, (q, k, v)), ends, ends, enable_gqa=True, **ctx.options
            )
            y = _from_rows(y, batch)
            log_sum = log_sum.unflatten(1, (batch, length))
            log_sum = log_sum.transpose(0, 1)
        total = torch.logaddexp(log_sum, sinks)
        shares = (log_sum - total).exp()
        y = (y * shares[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, ends, mask, y, total)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        q, k, v, sinks, ends, mask, y, total = ctx.saved_tensors
        tensors = (dy, q, k, v, y)
        if ends is None:
            gradients = private.cpu_attention_backward(
                *tensors, total, dropout_p=0.0, attn_mask=mask, **ctx.options
            )
        else:
            random_state = total.new_zeros(2, dtype=torch.uint64)  # unused
            gradients = private.varlen_attention_backward()(
                *map(to_rows, tensors),
                total.transpose(0, 1).flatten(1),
                ends,
                ends,
                rng_state=random_state,
                **ctx.options,
            )
            gradients = [_from_rows(gradient, len(q)) for gradient in gradients]
        sums = (dy.float() * y).sum(-1)
        d_sinks = -(sinks - total).exp() * sums
        d_sinks = d_sinks.sum_to_size(sinks.shape)
        return *gradients, d_sinks, None, None, None, None


def window_size(window: int | None) -> tuple[int, int]:
    """Return how many tokens before and after its own a token attends to. -1 means all."""
    return (-1 if window is None else window - 1, 0)


def to_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, heads, T, K] as [B T, heads, K]."""
    return x.transpose(1, 2).flatten(0, 1)


def _from_rows(x: torch.Tensor, batch: int) -> torch.Tensor:
    x = x.unflatten(0, (batch, -1))
    return x.transpose(1, 2)
