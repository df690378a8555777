"""Compute the log-probabilities of answers before training, with which preference tuning compares
those of the trained model. A resumed run reads them from its folder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distributed_training.data.samples import Data, Sampler
from distributed_training.engines.base import Engine
from distributed_training.parallel.agree import broadcast_from_rank_0
from distributed_training.records.record import write_json
from distributed_training.settings.files import load_json

REFERENCE_FILE = "reference.json"


def add_reference(
    data: Data,
    engine: Engine,
    sampler: Sampler,
    file: Path,
    set_activity: Callable[[str], object] = str,
) -> Data:
    """Return `data` with the log-probabilities of all answers. Rank 0 reads them from `file`, and
    writes to it those of other pairs. The engine must have its initial weights. All ranks must call
    this function."""
    rank = dist.get_rank()
    exists = rank == 0 and file.is_file()
    stored = broadcast_from_rank_0(load_json(file, "reference") if exists else {})
    splits: dict[str, Any] = {"train": data.train, "validation": data.validation}
    for name, samples in splits.items():
        # The fingerprint identifies the tokens, and its first token each pair.
        key, ids = f"{name} {data.fingerprint}", samples.starts.tolist()
        if stored.get(key) != ids:
            # Number the answers from 1, to find them in batches. Padding has the number 0.
            numbers = np.arange(2 * len(ids)).reshape(-1, 2) + 1
            numbered = replace(samples, reference=numbers)
            log_probs = torch.zeros(numbers.size + 1, dtype=torch.float64)
            for indices in sampler.eval_indices(len(samples)):
                set_activity("the computation of the reference's log-probabilities")
                *arrays, values = numbered.batch(indices)
                result = engine.eval_step(*arrays).double().cpu()
                log_probs[values[..., 0].astype(int)] = result
            dist.all_reduce(log_probs)
            stored |= {key: ids, name: log_probs[1:].view(-1, 2).float().tolist()}
        splits[name] = replace(samples, reference=np.array(stored[name]))
    if rank == 0:
        write_json(file, stored)
    return replace(data, **splits)
