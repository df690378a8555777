"""Test the loss for a sharded vocabulary in one process that holds the whole padded vocabulary."""

import pytest
import torch
import torch.distributed as dist

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models.chunked_loss import ChunkedCrossEntropy, VocabularyShard
from distributed_training.models.decoder import summed_cross_entropy

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_loss_and_gradients_equal_torchs_cross_entropy(padding):
    torch.manual_seed(padding)
    vocab_size = 11
    x = torch.randn(1, 7, 4, requires_grad=True)
    weight = (9 * torch.randn(vocab_size + padding, 4)).requires_grad_()
    targets = torch.tensor([[0, 10, 3, IGNORE_INDEX, 5, IGNORE_INDEX, 10]])
    loss = ChunkedCrossEntropy(7, compiled=False)
    shard = VocabularyShard(0, dist.group.WORLD)
    actual = loss(x, weight, targets, vocab_size, shard)
    gradients = torch.autograd.grad(2 * actual, (x, weight))
    reference = summed_cross_entropy(x, weight, targets, vocab_size)
    torch.testing.assert_close(actual, reference)
    expected = torch.autograd.grad(2 * reference, (x, weight))
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-4)
    assert not gradients[1][vocab_size:].any(), "padding is never trained on"
    assert not gradients[0][targets == IGNORE_INDEX].any()
