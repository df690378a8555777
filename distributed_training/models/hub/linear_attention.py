"""Compute Gated DeltaNet, a linear attention, with the kernels of flash-linear-attention.

That package forbids torch.compile for its own function. The operation in this module calls the two
halves of that function, which are private and were checked in version 0.6. It is one operation for
torch.compile, and CUDA graphs can capture it.

The letters in shapes are those of decoder.py, and N is the number of value heads of size V, a
multiple of the number H of query heads of size K."""

from typing import Any

import torch

CHUNK = 64  # tokens whose products are computed at once
_EPSILON = 1e-6  # of the L2 norm, as in transformers


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of a state that starts with zeros, [B, T, N, V].

    q and k [B, T, H, K] are normalized first. The state is multiplied by `exp(g)` before each
    token, and `beta` is the share of v [B, T, N, V] that is written. g and `beta` have the shape
    [B, T, N]."""
    return delta_rule(_normalize(q), _normalize(k), v, g, beta)[0]


def _normalize(x: torch.Tensor) -> torch.Tensor:
    numbers = x.float()
    squares = numbers.square().sum(-1, True)
    return (numbers * torch.rsqrt(squares + _EPSILON)).to(x.dtype)


@torch.library.custom_op("distributed_training::delta_rule", mutates_args=())
def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (outputs, sums of g within chunks, inverses of chunks' matrices)."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    scale = q.shape[-1] ** -0.5
    results = chunk_gated_delta_rule_fwd(q, k, v, g, beta, scale, None, False)
    sums, y, inverses, *_ = results
    return y.to(v.dtype), sums, inverses


@torch.library.custom_op("distributed_training::delta_rule_backward", mutates_args=())
def _delta_rule_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sums: torch.Tensor,
    beta: torch.Tensor,
    inverses: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v, g and beta."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    q, k, v, beta, grad = (x.contiguous() for x in (q, k, v, beta, grad))
    scale = q.shape[-1] ** -0.5
    dq, dk, dv, dbeta, dg, *_ = chunk_gated_delta_rule_bwd(
        q, k, v, sums, beta, inverses, scale, None, grad, None
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.to(sums.dtype), dbeta.to(beta.dtype)


@delta_rule.register_fake
def _(q, k, v, g, beta):  # type: ignore[no-untyped-def]
    inverses = k.new_empty((*v.shape[:3], CHUNK))
    return torch.empty_like(v), torch.empty_like(g), inverses


@_delta_rule_backward.register_fake
def _(grad, q, k, v, sums, beta, inverses):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x) for x in (q, k, v, sums, beta))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, _, beta = inputs
    _, sums, inverses = output
    ctx.save_for_backward(q, k, v, sums, beta, inverses)
    ctx.mark_non_differentiable(sums, inverses)


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
    q, k, v, sums, beta, inverses = ctx.saved_tensors
    return _delta_rule_backward(grad, q, k, v, sums, beta, inverses)


delta_rule.register_autograd(_backward, setup_context=_save)


def products(k: torch.Tensor, v: torch.Tensor) -> int:
    """Return the multiplications of the forward pass: three products of each token with the state,
    and the products of the tokens in a chunk with each other."""
    key_size = k.shape[-1]
    value_size = v.shape[-1]
    with_state = 3 * key_size * value_size
    within_chunk = CHUNK * (3 * key_size + 2 * value_size + CHUNK)
    num_heads_and_tokens = v.numel() // value_size
    return num_heads_and_tokens * (with_state + within_chunk)
