"""Compute losses that compare the two answers of each pair, from the losses of their tokens.

The answers of a pair are neighboring documents of one sample, the chosen answer first. Documents
without targets are padding. E is the number of documents of a sample."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.settings.config import Config

# Values of pairs that `PairLoss` sums, after the loss. Rewards, their accuracy and margin have
# the definitions of TRL.
METRICS = (
    "reward_accuracy",
    "reward_margin",
    "reward_chosen",
    "reward_rejected",
    "logps_chosen",
    "logps_rejected",
)


@dataclass
class PairLoss:
    """Loss of a model in preference tuning. If `group` is set, each of its ranks has consecutive
    tokens of every sample."""

    config: Config
    group: dist.ProcessGroup | None = None

    def __call__(
        self,
        token_losses: torch.Tensor,
        targets: torch.Tensor,
        ends: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return fp32 sums over the pairs, [1 + len(METRICS)], of the loss, whose gradient is
        computed, and of METRICS. Without `values`, return each document's log-probability, [B, E].

        The arguments are the losses of targets [B, T] of this rank, the targets, and `ends` and
        `values` from `Samples.batch`. The results of the ranks of `group` must be summed."""
        rank = 0 if self.group is None else self.group.rank()
        first = rank * targets.shape[1]
        log_probs = -sum_documents(token_losses, ends, first)
        counts = sum_documents((targets != IGNORE_INDEX).float(), ends, first)
        if values is None:
            return log_probs
        if self.group is not None:
            # The gradient of each rank's terms is that of the whole loss, which each rank computes.
            own = log_probs
            sums = torch.stack([own.detach(), counts])
            dist.all_reduce(sums, group=self.group)
            log_probs, counts = sums[0] + (own - own.detach()), sums[1]
        losses, rewards = self.compare(log_probs, counts, values)
        chosen, rejected = _answers(rewards.detach())
        metrics = ((chosen > rejected).float(), chosen - rejected, chosen, rejected)
        table = torch.stack([losses, *metrics, *_answers(log_probs.detach())])
        sums = torch.where(_answers(counts)[0] > 0, table, 0.0).sum((1, 2))
        return sums if rank == 0 else sums - sums.detach()

    def compare(
        self, log_probs: torch.Tensor, counts: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of pairs [B, E // 2] and the rewards of documents [B, E], given the
        documents' log-probabilities and numbers of targets.

        Sources: arXiv 2305.18290 (dpo), 2403.00409 (its label smoothing), 2310.12036 (ipo),
        2405.14734 (simpo) and 2403.07691 (orpo), as TRL implements them."""
        config = self.config
        kind, beta = config.preference, config.preference_beta
        reference, likelihood_scale = values.unbind(-1)
        counts = counts.clamp(min=1)
        scores = log_probs - reference if config.has_reference else log_probs / counts
        likelihood_weight = config.preference_sft
        if kind == "dpo":
            share = config.preference_label_smoothing
            margin = beta * _difference(scores)
            losses = (share * F.logsigmoid(-margin) - (1 - share) * F.logsigmoid(margin)) / (
                1 - 2 * share
            )
        elif kind == "ipo":
            losses = (_difference(scores / counts) - 0.5 / beta) ** 2
        elif kind == "simpo":
            losses = -F.logsigmoid(beta * _difference(scores) - config.preference_margin)
        else:
            # For padding, the odds would be infinite.
            log_odds = scores - torch.log(-torch.expm1(scores.clamp(max=-1e-6)))
            losses = -beta * F.logsigmoid(_difference(log_odds))
            likelihood_weight += 1
        if likelihood_weight:
            losses = losses - likelihood_weight * _answers(log_probs * likelihood_scale)[0]
        return losses, beta * scores


def sum_documents(values: torch.Tensor, ends: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the sums [B, E] over the tokens of each document of `values` [B, T], which begin at
    the position `first` of the sample. `ends` [B, E] is from `Samples.batch`."""
    positions = first + torch.arange(values.shape[1], device=values.device)
    starts = F.pad(ends[:, :-1], (1, 0))
    is_inside = (positions >= starts[..., None]) & (positions < ends[..., None])
    return (is_inside * values[:, None]).sum(-1)


def _answers(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of chosen and of rejected answers, [B, E // 2], from values of documents
    [B, E]. The last document is padding."""
    return values[:, :-1:2], values[:, 1::2]


def _difference(values: torch.Tensor) -> torch.Tensor:
    chosen, rejected = _answers(values)
    return chosen - rejected
