"""Exchange tensors between the ranks of a group, in operations with gradients.

These are operations instead of autograd functions, whose results full checkpointing would keep
(torch 2.11). Operations are computed again."""

from typing import Any

import torch
import torch.distributed as dist

from distributed_training.parallel.private import group_of_name


@torch.library.custom_op("distributed_training::all_to_all", mutates_args=())
def all_to_all(x: torch.Tensor, group: str) -> torch.Tensor:
    """Send n equal parts of the rows of x to the n ranks of `group`, and return the parts from all
    ranks."""
    received = x.new_empty(x.shape)
    dist.all_to_all_single(received, x.contiguous(), group=group_of_name(group))
    return received


@torch.library.custom_op("distributed_training::gather_tokens", mutates_args=())
def gather_tokens(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the rows of all n ranks, [N, ..] -> [n N, ..]."""
    ranks = group_of_name(group)
    gathered = x.new_empty(ranks.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=ranks)
    return gathered


@torch.library.custom_op("distributed_training::sum_tokens", mutates_args=())
def sum_tokens(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum over ranks of the rows of this rank's tokens, [n N, ..] -> [N, ..]."""
    ranks = group_of_name(group)
    total = x.new_empty(len(x) // ranks.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(total, x.contiguous(), group=ranks)
    return total


@all_to_all.register_fake
def _(x, _group):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@gather_tokens.register_fake
def _(x, group):  # type: ignore[no-untyped-def]
    return x.new_empty(group_of_name(group).size() * len(x), *x.shape[1:])


@sum_tokens.register_fake
def _(x, group):  # type: ignore[no-untyped-def]
    return x.new_empty(len(x) // group_of_name(group).size(), *x.shape[1:])


def _keep_group(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


# Operation -> operation that computes its gradient
for _forward, _backward in (
    (all_to_all, all_to_all),
    (gather_tokens, sum_tokens),
    (sum_tokens, gather_tokens),
):
    _forward.register_autograd(
        lambda ctx, gradient, backward=_backward: (backward(gradient, ctx.group), None),
        setup_context=_keep_group,
    )
