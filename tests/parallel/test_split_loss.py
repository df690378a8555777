"""The loss over a split vocabulary, on one process that holds all of it, padding included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from distributed_training.models.decoder import IGNORE_INDEX, summed_cross_entropy
from distributed_training.parallel.tensor import _pad_rows, _split_loss


@pytest.fixture(scope="module", autouse=True)
def _group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_it_is_torchs_cross_entropy_and_its_gradient(padding):
    torch.manual_seed(padding)
    vocab_size = 11
    x = torch.randn(1, 7, 4).requires_grad_()
    weight = (10 * torch.randn(vocab_size + padding, 4)).requires_grad_()
    targets = torch.tensor([[0, 10, 3, IGNORE_INDEX, 5, IGNORE_INDEX, 10]])
    mesh = init_device_mesh("cpu", (1,))
    rows = DTensor.from_local(weight, mesh, [Shard(0)])
    ours = _split_loss(mesh, Replicate(), x, rows, targets, vocab_size)
    theirs = summed_cross_entropy(x, weight, targets, vocab_size)
    torch.testing.assert_close(ours, theirs)
    gradients = torch.autograd.grad(2 * ours, (x, weight))
    torch.testing.assert_close(gradients, torch.autograd.grad(2 * theirs, (x, weight)))
    assert not gradients[1][vocab_size:].any(), "padding is never learnt"
    assert not gradients[0][targets == IGNORE_INDEX].any()


@pytest.mark.parametrize(("rows", "parts", "padded"), [(8, 4, 8), (8, 5, 10), (7, 2, 8)])
def test_rows_are_appended_until_they_divide(rows, parts, padded):
    embedding = nn.Embedding(rows, 3)
    before = embedding.weight.detach().clone()
    _pad_rows(embedding, parts)
    assert embedding.num_embeddings == len(embedding.weight) == padded
    assert torch.equal(embedding.weight[:rows], before)
    assert not embedding.weight[rows:].any()
