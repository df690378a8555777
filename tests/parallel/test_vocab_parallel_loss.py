"""Test the loss for a sharded vocabulary in one process that holds the whole padded vocabulary."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.parallel.tensor import _pad_rows, vocab_parallel_cross_entropy

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_loss_and_gradient_equal_torchs_cross_entropy(padding):
    torch.manual_seed(padding)
    vocab_size = 11
    logits = (20 * torch.randn(7, vocab_size + padding)).requires_grad_()
    targets = torch.tensor([0, 10, 3, IGNORE_INDEX, 5, IGNORE_INDEX, 10])
    actual = vocab_parallel_cross_entropy(logits, targets, 0, vocab_size, dist.group.WORLD)
    (gradient,) = torch.autograd.grad(2 * actual, logits)
    unpadded_logits = logits.detach()[:, :vocab_size].requires_grad_()
    reference = F.cross_entropy(
        unpadded_logits, targets, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    (expected,) = torch.autograd.grad(2 * reference, unpadded_logits)
    torch.testing.assert_close(actual, reference)
    torch.testing.assert_close(gradient[:, :vocab_size], expected)
    assert not gradient[:, vocab_size:].any(), "padding is never trained on"
    assert not gradient[targets == IGNORE_INDEX].any()


@pytest.mark.parametrize(("rows", "parts", "padded"), [(8, 4, 8), (8, 5, 10), (7, 2, 8)])
def test_rows_are_padded_to_a_multiple_of_the_ranks(rows, parts, padded):
    embedding = nn.Embedding(rows, 3)
    weight_before = embedding.weight.detach().clone()
    _pad_rows(embedding, parts)
    assert embedding.num_embeddings == len(embedding.weight) == padded
    assert torch.equal(embedding.weight[:rows], weight_before)
    assert not embedding.weight[rows:].any()
