"""Compressed gradients: what is kept, what is lost, and that nothing is lost for good."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.parallel.compression import LEVELS, compress, decompress

SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**16)


def gradients(seed, rows, columns):
    """Of magnitudes that differ by powers of ten, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    powers = torch.randint(-6, 3, (rows, columns), generator=generator)
    return values * 10.0**powers * (torch.rand(rows, columns, generator=generator) > 0.2)


@given(SEEDS, st.integers(1, 4), SIZES, st.data())
@settings(max_examples=60, deadline=None)
def test_top_values_are_exact_and_others_within_half_a_level(seed, rows, columns, data):
    num_exact = data.draw(st.integers(1, columns))
    x = gradients(seed, rows, columns)
    message = compress(x, num_exact)
    assert message.shape == (rows, 8 * num_exact + 4 + columns)
    assert message.dtype is torch.uint8
    y = decompress(message, num_exact)
    for before, after in zip(x, y, strict=True):
        rest = before.abs().sort(descending=True).values[num_exact:]
        largest_of_rest = rest[0] if len(rest) else torch.tensor(0.0)
        exact = before.abs() > largest_of_rest
        assert torch.equal(before[exact], after[exact])
        bound = largest_of_rest / LEVELS / 2 * (1 + 1e-4)
        assert ((before - after).abs() <= bound + 1e-30).all()


@given(SEEDS, st.integers(1, 4), SIZES)
@settings(max_examples=30, deadline=None)
def test_all_values_kept_are_all_bits_kept(seed, rows, columns):
    x = gradients(seed, rows, columns)
    assert torch.equal(decompress(compress(x, columns), columns), x)
