"""Compare the chunked loss with the loss computed over all tokens at once."""

import weakref

import pytest
import torch

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models.chunked_loss import ChunkedCrossEntropy
from distributed_training.models.decoder import summed_cross_entropy
from tests.planner.helpers import plan_for
from tests.support import CPU_MACHINE, GPU_MACHINE

BATCH, TOKENS, HIDDEN, ROWS, VOCABULARY = 3, 20, 8, 128, 100


def values():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True)
    targets = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    targets[0, :7] = targets[1] = IGNORE_INDEX
    return x, weight, targets


def result(loss, x, weight, targets):
    """Return the loss and the gradients of twice the loss with respect to x and the weight."""
    total = loss(x, weight, targets, VOCABULARY)
    gradients = torch.autograd.grad(2 * total, (x, weight))
    return total.detach(), *gradients


@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_chunked_loss_and_gradients_equal_the_unchunked_ones(tokens):
    expected = result(summed_cross_entropy, *values())
    actual = result(ChunkedCrossEntropy(tokens, compiled=False), *values())
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not actual[2][VOCABULARY:].any(), "padding has no gradient"
    assert not actual[1][1].any(), "nor what is before a target that does not count"
    with torch.no_grad():
        evaluated = ChunkedCrossEntropy(tokens, compiled=False)(*values(), VOCABULARY)
    torch.testing.assert_close(evaluated, expected[0], rtol=1e-6, atol=0)


def test_chunked_loss_saves_nothing_as_large_as_the_logits():
    saved_tensors = []

    def pack(tensor):
        saved_tensors.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ChunkedCrossEntropy(7, compiled=False)(*values(), VOCABULARY)
    assert sorted(saved_tensors) == sorted([BATCH * TOKENS * HIDDEN, ROWS * HIDDEN])


def test_one_chunk_of_logits_exists_at_a_time():
    chunked = ChunkedCrossEntropy(7, compiled=False)
    compute = chunked.compute
    earlier = []

    def watch(logits, *arguments):
        assert not any(chunk() is not None for chunk in earlier)
        earlier.append(weakref.ref(logits))
        return compute(logits, *arguments)

    chunked.compute = watch
    chunked(*values(), VOCABULARY)
    assert len(earlier) == 9


def test_chunks_in_fp16_sum_what_would_overflow():
    """With 60 frequent tokens, the sum of the unscaled gradients exceeds fp16's largest number."""
    x, weight, targets = (values()[0] + 3) * 1000, values()[1] / 1000, torch.zeros(BATCH, TOKENS)
    x, weight = (tensor.detach().half().requires_grad_() for tensor in (x, weight))
    total = ChunkedCrossEntropy(7, compiled=False)(x, weight, targets.long(), VOCABULARY)
    gradients = torch.autograd.grad(total / (BATCH * TOKENS), (x, weight))
    exact = [tensor.detach().float().requires_grad_() for tensor in (x, weight)]
    loss = summed_cross_entropy(*exact, targets.long(), VOCABULARY) / (BATCH * TOKENS)
    for ours, theirs in zip(gradients, torch.autograd.grad(loss, exact), strict=True):
        assert ours.dtype is torch.float16
        assert (ours - theirs).norm() < 2e-3 * theirs.norm()


def test_default_chunks_cost_little(tmp_path):
    """The default chunk is small if additional chunks cost little. This is the case if the output
    layer is a small part of the model. It is also the case in LoRA training, because the output
    layer then needs no gradient."""

    def chunk(model, machine=GPU_MACHINE, **values):
        values = {"strategy": "dp", "precision": "bf16", "max_length": 1024, **values}
        plan = plan_for(tmp_path, machine, 2, model=model, checked=False, **values)
        return plan.config.loss_chunk_tokens

    assert chunk("gpt2", batch_size=64) == 8192
    assert chunk("gpt2-xl", batch_size=64) == 1024
    assert chunk("gpt2", batch_size=64, lora_rank=4) == 1024
    assert chunk("gpt2", batch_size=8) == 0, "a single chunk"
    assert chunk("gpt2", batch_size=64, precision="fp16") == 8192
    assert chunk("gpt2", CPU_MACHINE, batch_size=64, precision="fp32") == 0
    gpipe = {"strategy": "pp", "pipeline_schedule": "gpipe", "num_microbatches": 2}
    assert chunk("gpt2-xl", batch_size=64, **gpipe) == 0
