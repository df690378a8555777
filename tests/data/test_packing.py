import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.data.packing import pack_records

some = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=60), st.just(capacity))
)


def best_fit_decreasing(lengths, capacity):
    """Return the number of tokens in each block. Records are placed from longest to shortest, each
    in the fullest block that has enough free space."""
    blocks = []
    for length in sorted(lengths, reverse=True):
        fits = [block for block, size in enumerate(blocks) if size + length <= capacity]
        if fits:
            blocks[max(fits, key=blocks.__getitem__)] += length
        else:
            blocks.append(length)
    return blocks


@given(some)
def test_records_are_packed_by_best_fit_decreasing(given_lengths):
    lengths, capacity = given_lengths
    order, firsts = pack_records(np.array(lengths, np.int64), capacity)
    assert sorted(order) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in order[a:b]) for a, b in itertools.pairwise(firsts)]
    assert sorted(sizes) == sorted(best_fit_decreasing(lengths, capacity))
    assert firsts[-1] == len(lengths)


def test_copies_of_a_record_are_in_different_blocks():
    order, firsts = pack_records(np.full(90, 10), 50)
    copied = order // 3  # three copies of each of 30 records
    distinct = [len(set(copied[a:b])) for a, b in itertools.pairwise(firsts)]
    assert np.mean(distinct) > 4.5
