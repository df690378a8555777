"""Unpack packed records into one record per row. Training on these rows serves as the reference for
packing."""

import itertools

import numpy as np

from distributed_training.data.samples import IGNORE_INDEX


def unpack_rows(micro_batch: tuple[np.ndarray, ...], padding_id: int) -> np.ndarray:
    """Return the inputs and targets of the documents in packed blocks as an int64 array of shape
    [2, documents, seq_len]. Each document is padded to the length of a block. `micro_batch` comes
    from `Samples.batch`."""
    inputs, targets, _, ends = micro_batch
    rows = []
    for *block, bounds in zip(inputs, targets, ends, strict=True):
        for start, end in itertools.pairwise([0, *np.unique(bounds).tolist()]):
            row = np.full((2, len(block[0])), IGNORE_INDEX)
            row[0] = padding_id
            row[:, : end - start] = [tokens[start:end] for tokens in block]
            rows.append(row)
    return np.stack(rows, axis=1)
