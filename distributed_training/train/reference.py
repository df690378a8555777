"""Compute the log-probabilities of answers before training, with which preference tuning compares
those of the trained model. A resumed run reads them from its folder."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from distributed_training.data.samples import Data, Sampler, Samples
from distributed_training.engines.base import Engine
from distributed_training.parallel.agree import broadcast_from_rank_0

REFERENCE_FILE = "reference.npz"


def add_reference(
    data: Data,
    engine: Engine,
    sampler: Sampler,
    file: Path | None,
    set_activity: Callable[[str], object] = str,
) -> Data:
    """Return `data` with the log-probabilities of all answers. Rank 0 reads them from `file` if it
    is of the same pairs, and otherwise writes them to it. Without a file, the loss does not use
    them. The engine must have its initial weights. All ranks must call this function."""
    splits = {"train": data.train, "validation": data.validation}
    values = {name: np.zeros((len(samples.starts), 2)) for name, samples in splits.items()}
    if file is not None:
        ids = {f"{name}_ids": identify_pairs(samples) for name, samples in splits.items()}
        stored = broadcast_from_rank_0(_read(file, ids) if dist.get_rank() == 0 else None)
        if stored is None:
            for name, samples in splits.items():
                values[name] = _compute(engine, sampler, samples, set_activity)
            if dist.get_rank() == 0:
                partial_file = file.with_name(f".writing-{file.name}")
                np.savez(partial_file, **values, **ids)
                partial_file.replace(file)
        values = stored or values
    return replace(data, **{name: replace(splits[name], reference=values[name]) for name in splits})


def identify_pairs(samples: Samples) -> np.ndarray:
    """Return a checksum of each pair's tokens and of which of them are in the loss."""
    checksums = np.zeros(len(samples.starts), np.uint32)
    for index in range(len(checksums)):
        for ids, mask in samples.documents([index]):
            text = np.stack([ids.astype(np.int32), mask.astype(np.int32)])
            checksums[index] = zlib.crc32(text.tobytes(), int(checksums[index]))
    return checksums


def _read(file: Path, ids: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    if not file.is_file():
        return None
    with np.load(file) as arrays:
        stored = dict(arrays)
    is_same = all(np.array_equal(stored[name], checksums) for name, checksums in ids.items())
    return stored if is_same else None


def _compute(
    engine: Engine, sampler: Sampler, samples: Samples, set_activity: Callable[[str], object]
) -> np.ndarray:
    """Return the log-probabilities of the chosen and the rejected answer of each pair, fp32
    [num_parts, 2]."""
    log_probs = torch.zeros(len(samples.starts), 2, dtype=torch.float64)
    for indices in sampler.eval_indices(len(samples)):
        set_activity("the computation of the reference's log-probabilities")
        result = engine.eval_step(*samples.batch(indices)).double().cpu()
        parts, rows, columns = samples.place_documents(indices)
        if result.dim():  # This rank has a result.
            log_probs[parts] = result[rows, columns].view(-1, 2)
    dist.all_reduce(log_probs)
    return log_probs.float().numpy()
