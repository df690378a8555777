"""Compute losses that compare the two answers of each pair, from the losses of their tokens.

The answers of a pair are neighboring documents of one sample, the chosen answer first. E is the
number of documents of a sample, whose last one is padding. Padding has no targets."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.settings.config import Config

# Values of pairs that `pair_loss` sums, after the loss, as TRL defines them
METRICS = (
    "reward_accuracy",
    "reward_margin",
    "reward_chosen",
    "reward_rejected",
    "logps_chosen",
    "logps_rejected",
)


def pair_loss(
    config: Config,
    token_losses: torch.Tensor,
    targets: torch.Tensor,
    ends: torch.Tensor,
    values: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return fp32 sums over the pairs, [1 + len(METRICS)], of the loss, whose gradient is computed,
    and of METRICS. Without `values`, return each document's log-probability, [B, E].

    The arguments are the losses of targets [B, T], the targets, and `ends` and `values` from
    `Samples.batch`. If the ranks of `group` have consecutive targets of each sample, their results
    must be summed.

    Sources: arXiv 2305.18290 (dpo), 2403.00409 (its label smoothing), 2310.12036 (ipo), 2405.14734
    (simpo) and 2403.07691 (orpo), as TRL implements them."""
    rank = 0 if group is None else group.rank()
    positions = torch.arange(targets.shape[1], device=ends.device) + rank * targets.shape[1]
    starts = F.pad(ends[:, :-1], (1, 0))
    is_inside = (positions >= starts[..., None]) & (positions < ends[..., None])
    terms = torch.stack([-token_losses, (targets != IGNORE_INDEX).float()])
    sums = (is_inside * terms[:, :, None]).sum(-1)  # [2, B, E]
    if values is None:
        return sums[0]
    if group is not None:
        # Each rank computes the whole loss, but only the gradient of its own terms.
        whole = sums.detach().clone()
        dist.all_reduce(whole, group=group)
        sums = whole + (sums - sums.detach())
    # From here on, the last dimension has the chosen and the rejected answer of each pair.
    log_probs, counts = sums[:, :, :-1].unflatten(2, (-1, 2))
    reference, likelihood_scale = values[:, :-1].unflatten(1, (-1, 2)).unbind(-1)
    kind, beta = config.preference, config.preference_beta
    means = log_probs / counts.clamp(min=1)
    scores = log_probs - reference if config.has_reference else means
    margins = beta * _difference(scores)
    likelihood_weight = config.preference_sft
    if kind == "dpo":
        noise = config.preference_label_smoothing
        losses = noise * F.logsigmoid(-margins) - (1 - noise) * F.logsigmoid(margins)
        losses = losses / (1 - 2 * noise)
    elif kind == "ipo":
        losses = (_difference(scores / counts.clamp(min=1)) - 0.5 / beta) ** 2
    elif kind == "simpo":
        losses = -F.logsigmoid(margins - config.preference_margin)
    else:
        # For padding, the odds would be infinite.
        log_odds = means - torch.log(-torch.expm1(means.clamp(max=-1e-6)))
        losses = -beta * F.logsigmoid(_difference(log_odds))
        likelihood_weight += 1
    losses = losses - likelihood_weight * (likelihood_scale * log_probs).sum(-1)
    rewards = (beta * scores).unbind(-1)
    table = [losses, (margins > 0).float(), margins, *rewards, *log_probs.unbind(-1)]
    loss, *metrics = torch.where(counts[..., 0] > 0, torch.stack(table), 0.0).sum((1, 2))
    totals = torch.stack([loss, *(metric.detach() for metric in metrics)])
    return totals if rank == 0 else totals - totals.detach()


def _difference(answers: torch.Tensor) -> torch.Tensor:
    return answers[..., 0] - answers[..., 1]
