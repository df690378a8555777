"""Unpack packed records into one record per row. Training on these rows serves as the reference for
packing."""

import itertools
from dataclasses import replace

import numpy as np

from distributed_training.data.samples import IGNORE_INDEX, Sampler, Samples, StepBatch


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


class OneByOneSampler(Sampler):
    """Sampler that puts one record in each row. Each step uses the same records as the
    corresponding step of a run with packing."""

    def step_batch(self, samples: Samples, step: int) -> StepBatch:
        batch = Sampler.step_batch(self, samples, step)
        unpacked = [unpack_rows(blocks, samples.padding_id) for blocks in batch.micro_batches]
        size = self.micro_batch_size
        # Number of rows that the last micro-batch lacks
        num_missing = -sum(rows.shape[1] for rows in unpacked) % size
        empty = np.full((2, num_missing, samples.seq_len), IGNORE_INDEX)
        empty[0] = samples.padding_id
        rows = np.concatenate([*unpacked, empty], axis=1)
        micro_batches = np.split(rows, rows.shape[1] // size, axis=1)
        return replace(batch, micro_batches=[tuple(cut) for cut in micro_batches])
