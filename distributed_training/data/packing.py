"""Pack records into blocks of equal length by best fit decreasing (Johnson 1973). This module does
not import torch.

Records are packed from the longest to the shortest, each into the fullest block with enough free
space. The number of blocks is at most 11/9 of the smallest possible number, plus 6/9 (Dosa
2007)."""

import bisect

import numpy as np


def pack_records(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack records into blocks of `capacity` tokens. `lengths`, [num_records], contains the length
    of each record, from 1 to `capacity`.

    Return (order, firsts): block b holds the records order[firsts[b] : firsts[b + 1]]. The result
    depends only on the arguments. Records of equal length keep their order.

    Records of equal length are placed together. A block with space for two records of this length
    receives both, because the block is still the fullest one with enough space after the first
    record. The number of iterations therefore grows with the number of distinct lengths rather than
    with the number of records."""
    by_length = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(-lengths, return_counts=True)
    block_of = np.empty(len(lengths), np.int64)  # block of each record, in the order `by_length`
    free = dict[int, list[np.ndarray]]()  # number of free tokens -> blocks with that number
    sizes = list[int]()  # the keys of `free`, ascending
    num_blocks = 0
    done = 0

    def put_back(space: int, blocks: np.ndarray) -> None:
        if space and len(blocks):
            if space not in free:
                free[space] = []
                bisect.insort(sizes, space)
            free[space].append(blocks)

    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        while count:
            index = bisect.bisect_left(sizes, length)
            if index < len(sizes):
                space = sizes.pop(index)
                blocks = np.concatenate(free.pop(space))
            else:
                space = capacity
                blocks = num_blocks + np.arange(-(-count // (capacity // length)))
                num_blocks += len(blocks)
            per_block = space // length  # records that one of these blocks can hold
            num_full, in_last = divmod(min(count, per_block * len(blocks)), per_block)
            used = np.repeat(blocks[:num_full], per_block)
            put_back(space - per_block * length, blocks[:num_full])
            if in_last:
                used = np.append(used, np.repeat(blocks[num_full], in_last))
                put_back(space - in_last * length, blocks[num_full : num_full + 1])
            put_back(space, blocks[num_full + (in_last > 0) :])
            block_of[done : done + len(used)] = used
            done += len(used)
            count -= len(used)
    order = np.argsort(block_of, kind="stable")
    firsts = np.searchsorted(block_of[order], np.arange(num_blocks + 1))
    return by_length[order], firsts
