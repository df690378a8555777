"""Records packed into blocks of equal length: best fit decreasing (Johnson 1973). No torch import.

Records are taken from the longest to the shortest, and each goes into the fullest block that has
room for it. At most 11/9 of the fewest possible blocks, and 6/9 of one, are needed (Dosa 2007)."""

import bisect

import numpy as np


def pack_records(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack records of `lengths`, [num_records], each from 1 to `capacity`. Returns (order, firsts):
    block b holds the records order[firsts[b] : firsts[b + 1]]. Depends on nothing but the lengths;
    records of equal length stay in their order.

    Records of one length are placed together: a block with room for two takes two in a row, as
    after the first it is still the fullest that has room. So the work grows with the number of
    different lengths rather than of records."""
    by_length = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(-lengths, return_counts=True)
    block_of = np.empty(len(lengths), np.int64)  # of each record, in the order of `by_length`
    free = dict[int, list[np.ndarray]]()  # tokens that are free -> blocks
    sizes = list[int]()  # the keys of `free`, ascending
    num_blocks = 0
    done = 0

    def put_back(room: int, blocks: np.ndarray) -> None:
        if room and len(blocks):
            if room not in free:
                free[room] = []
                bisect.insort(sizes, room)
            free[room].append(blocks)

    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        while count:
            place = bisect.bisect_left(sizes, length)
            if place < len(sizes):
                room = sizes.pop(place)
                blocks = np.concatenate(free.pop(room))
            else:
                room = capacity
                blocks = num_blocks + np.arange(-(-count // (capacity // length)))
                num_blocks += len(blocks)
            each = room // length  # records that one of these blocks takes
            num_full, rest = divmod(min(count, each * len(blocks)), each)
            used = np.repeat(blocks[:num_full], each)
            put_back(room - each * length, blocks[:num_full])
            if rest:
                used = np.append(used, np.repeat(blocks[num_full], rest))
                put_back(room - rest * length, blocks[num_full : num_full + 1])
            put_back(room, blocks[num_full + (rest > 0) :])
            block_of[done : done + len(used)] = used
            done += len(used)
            count -= len(used)
    order = np.argsort(block_of, kind="stable")
    firsts = np.searchsorted(block_of[order], np.arange(num_blocks + 1))
    return by_length[order], firsts
