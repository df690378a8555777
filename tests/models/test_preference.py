"""Compare the losses of pairs of answers with their definitions, which autograd differentiates."""

import pytest
import torch
import torch.nn.functional as F

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models.chunked_loss import ChunkedCrossEntropy
from distributed_training.models.preference import METRICS, pair_loss
from distributed_training.settings.request import build_config
from tests.models.test_loss import BATCH, HIDDEN, ROWS, TOKENS, VOCABULARY

# Two samples with two pairs, and one sample with a pair, whose last document is padding
ENDS = torch.tensor([[4, 9, 12, 18, 20], [3, 7, 15, 20, 20], [8, 13, 20, 20, 20]])
NUM_PAIRS, E = 5, ENDS.shape[1]


def arrays():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True)
    targets = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    for row, ends in zip(targets, ENDS.tolist(), strict=True):
        for start in (0, *ends[:-1]):
            row[start : start + 1] = IGNORE_INDEX
    for row, start in ((0, 18), (2, 13)):
        targets[row, start:] = IGNORE_INDEX
    values = torch.randn(BATCH, E, 2, generator=generator) * 3
    values[..., 0] -= 10
    values[..., 1] = torch.tensor([0.2, 0, 0.2, 0, 0])
    return x, weight, targets, values


def by_hand(x, weight, targets, values, config):
    """Return each pair's loss and its METRICS by the papers' formulas."""
    log_probs = torch.log_softmax(F.linear(x, weight)[..., :VOCABULARY], -1)
    beta, rows = config.preference_beta, []
    for row, ends in enumerate(ENDS.tolist()):
        answers = []
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            labels = targets[row, start:end]
            chosen = labels[labels != IGNORE_INDEX]
            if len(chosen):
                places = torch.arange(start, end)[labels != IGNORE_INDEX]
                answers.append((log_probs[row, places, chosen].sum(), len(chosen), number))
        for (w, n_w, i), (v, n_v, j) in zip(answers[::2], answers[1::2], strict=True):
            ref_w, ref_v = values[row, i, 0], values[row, j, 0]
            sft = -values[row, i, 1] * w
            if config.preference == "dpo":
                p = torch.sigmoid(beta * ((w - ref_w) - (v - ref_v)))
                eps = config.preference_label_smoothing
                loss = (-(1 - eps) * p.log() + eps * (1 - p).log()) / (1 - 2 * eps)
                rewards = beta * (w - ref_w), beta * (v - ref_v)
            elif config.preference == "ipo":
                loss = ((w - ref_w) / n_w - (v - ref_v) / n_v - 1 / (2 * beta)) ** 2
                rewards = beta * (w - ref_w), beta * (v - ref_v)
            else:
                rewards = beta * w / n_w, beta * v / n_v
                if config.preference == "simpo":
                    margin = rewards[0] - rewards[1] - config.preference_margin
                    loss = -torch.sigmoid(margin).log()
                else:
                    odds = [p / (1 - p) for p in ((w / n_w).exp(), (v / n_v).exp())]
                    loss = sft - beta * torch.sigmoid((odds[0] / odds[1]).log()).log()
            loss = loss + config.preference_sft * sft
            accuracy = (rewards[0] > rewards[1]).float()
            rows.append(torch.stack([loss, accuracy, rewards[0] - rewards[1], *rewards, w, v]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "keys",
    [
        {"preference": "dpo"},
        {"preference": "dpo", "preference_label_smoothing": 0.2, "preference_sft": 0.5},
        {"preference": "ipo", "preference_beta": 0.3},
        {"preference": "simpo", "preference_beta": 2.0, "preference_margin": 0.7},
        {"preference": "orpo", "preference_beta": 0.5},
    ],
)
@pytest.mark.parametrize("tokens", [7, 60])
def test_losses_metrics_and_gradients(keys, tokens):
    config = build_config(keys)
    x, weight, targets, values = arrays()
    expected = by_hand(x, weight, targets, values, config)
    assert expected.shape == (NUM_PAIRS, 1 + len(METRICS))
    gradients = torch.autograd.grad(expected[:, 0].sum(), (x, weight))
    token_losses = ChunkedCrossEntropy(tokens, compiled=False, per_token=True)(
        x, weight, targets, VOCABULARY
    )
    result = pair_loss(config, token_losses, targets, ENDS, values)
    torch.testing.assert_close(result, expected.sum(0), rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(result.sum() * 2, (x, weight))
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, 2 * theirs, rtol=1e-3, atol=1e-4)
    log_probs = pair_loss(config, token_losses, targets, ENDS)
    answers = log_probs[:, :-1].reshape(-1, 2)[[0, 1, 2, 3, 4]]
    torch.testing.assert_close(answers.detach(), expected[:, 5:].detach(), rtol=1e-4, atol=1e-4)


def test_token_losses_in_fp16_sum_what_would_overflow():
    x = torch.full((1, 40, HIDDEN), 90.0).half().requires_grad_()
    weight = (torch.zeros(ROWS, HIDDEN) + 1e-4).half().requires_grad_()
    losses = ChunkedCrossEntropy(7, compiled=False, per_token=True)(
        x, weight, torch.zeros(1, 40, dtype=torch.long), VOCABULARY
    )
    (gradient,) = torch.autograd.grad(losses.sum() / 4, weight)
    assert gradient.dtype is torch.float16
    expected = -90.0 * 10 * (1 - 1 / VOCABULARY)
    assert float(gradient[0, 0]) == pytest.approx(expected, rel=0.01)
