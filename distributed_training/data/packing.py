"""Pack records into blocks of equal length by best fit decreasing (Johnson 1973). This module does
not import torch.

Records are packed from the longest to the shortest, each into the fullest block with enough free
space. The number of blocks is at most 11/9 times the smallest possible number, plus a constant."""

import bisect

import numpy as np


def pack_records(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack records into blocks of `capacity` tokens. `lengths` contains the number of tokens in
    each record, from 1 to `capacity`.

    Return (order, firsts). Block b holds the records `order[firsts[b] : firsts[b + 1]]`. The result
    depends only on the arguments. Records of equal length keep their order.

    Records of equal length are placed together. A block with space for two of them receives both.
    After it has received the first, it is still the fullest block with enough space for the second.
    The number of iterations therefore grows with the number of distinct lengths rather than with
    the number of records."""
    by_length = np.argsort(-lengths, kind="stable")
    negative_lengths, counts = np.unique(-lengths, return_counts=True)
    block_of = np.empty(len(lengths), np.int64)  # block of each record, in the order `by_length`
    blocks_by_space = dict[int, list[np.ndarray]]()  # free tokens -> blocks with this number
    spaces = list[int]()  # the keys of `blocks_by_space`, ascending
    num_blocks = 0
    num_packed = 0

    def put_back(space: int, blocks: np.ndarray) -> None:
        if space and len(blocks):
            if space not in blocks_by_space:
                blocks_by_space[space] = []
                bisect.insort(spaces, space)
            blocks_by_space[space].append(blocks)

    for length, count in zip((-negative_lengths).tolist(), counts.tolist(), strict=True):
        while count:
            index = bisect.bisect_left(spaces, length)
            if index < len(spaces):
                space = spaces.pop(index)
                blocks = np.concatenate(blocks_by_space.pop(space))
            else:
                space = capacity
                blocks = num_blocks + np.arange(-(-count // (capacity // length)))
                num_blocks += len(blocks)
            per_block = space // length  # records that one of these blocks can hold
            num_full, num_in_last = divmod(min(count, per_block * len(blocks)), per_block)
            chosen_blocks = np.repeat(blocks[:num_full], per_block)
            put_back(space - per_block * length, blocks[:num_full])
            if num_in_last:
                chosen_blocks = np.append(chosen_blocks, np.repeat(blocks[num_full], num_in_last))
                put_back(space - num_in_last * length, blocks[num_full : num_full + 1])
            put_back(space, blocks[num_full + (num_in_last > 0) :])
            block_of[num_packed : num_packed + len(chosen_blocks)] = chosen_blocks
            num_packed += len(chosen_blocks)
            count -= len(chosen_blocks)
    order = np.argsort(block_of, kind="stable")
    firsts = np.searchsorted(block_of[order], np.arange(num_blocks + 1))
    return by_length[order], firsts
