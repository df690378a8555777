import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from distributed_training.models.gpt2 import SIZES, gpt2_size

PEAK = 989.5e12  # H200, dense bf16


@pytest.mark.parametrize("name", SIZES)
def test_parameters_equal_hugging_faces(name):
    size = SIZES[name]
    config = GPT2Config(
        vocab_size=size.vocab_size,
        n_positions=size.num_positions,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        n_embd=size.hidden_size,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == size.num_parameters


@pytest.mark.parametrize(
    ("name", "seq_len", "tokens_per_s", "mfu"),
    [
        ("gpt2-medium", 512, 199_344, 45.8),
        ("gpt2", 1024, 509_478, 44.0),
        ("gpt2-xl", 1024, 47_426, 49.2),
    ],
)
def test_flops_give_the_measured_mfu(name, seq_len, tokens_per_s, mfu):
    """Rows of FACTS.md, which leaves the position embedding out of N: up to 0.6% lower."""
    flops = SIZES[name].flops_per_token(seq_len)
    assert 100 * flops * tokens_per_s / PEAK == pytest.approx(mfu, rel=0.007, abs=0.06)


def test_flops_by_hand():
    size = gpt2_size(vocab_size=10, num_positions=4, num_layers=2, num_heads=1, hidden_size=3)
    # embeddings 14 x 3, two blocks of 12 x 9 + 13 x 3, last norm 6
    assert size.num_parameters == 42 + 2 * 147 + 6
    assert size.padded_vocab_size == 128
    assert size.flops_per_token(4) == 6 * 342 + 12 * 2 * 3 * 4
