"""Cached token ids -> samples of equal length. No torch import."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distributed_training.data.cache import load_split, tokenise_once
from distributed_training.data.corpus import Corpus
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError

IGNORE_INDEX = -100
EMPTY = -1  # index of "no sample": fills up a step that the data do not
HELD_OUT = 0.05  # share kept for validation where the source has no split of its own


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of at most `seq_len` targets each, over one array of token ids.

    Sample i is `tokens[starts[i] : starts[i] + lengths[i] + 1]`: inputs, and as targets the same
    shifted by one. Packed blocks overlap by one token: each but the first is a target once.
    """

    tokens: np.ndarray  # ids of all texts in a row
    starts: np.ndarray  # where each sample starts, [num_samples]
    lengths: np.ndarray  # targets of each sample, [num_samples]
    seq_len: int  # tokens of a sample as the model sees it, padding included
    padding_id: int

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, first: int, last: int) -> Samples:
        """Samples first..last-1, without copying tokens."""
        starts, lengths = self.starts[first:last], self.lengths[first:last]
        return Samples(self.tokens, starts, lengths, self.seq_len, self.padding_id)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), each int64 [len(indices), seq_len]; padding has no target."""
        inputs = np.full((len(indices), self.seq_len), self.padding_id, dtype=np.int64)
        targets = np.full((len(indices), self.seq_len), IGNORE_INDEX, dtype=np.int64)
        for row, index in enumerate(indices):
            if index != EMPTY:
                start, length = self.starts[index], self.lengths[index]
                inputs[row, :length] = self.tokens[start : start + length]
                targets[row, :length] = self.tokens[start + 1 : start + length + 1]
        return inputs, targets

    def count_targets(self, indices: np.ndarray) -> int:
        """Real (not padding) targets of these samples."""
        return int(self.lengths[indices[indices != EMPTY]].sum())

    @property
    def real_share(self) -> float:
        """Share of positions that hold a real target; 1.0 when nothing is padded."""
        return float(self.lengths.sum()) / (len(self) * self.seq_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What a run trains and evaluates on."""

    train: Samples
    validation: Samples
    fingerprint: str  # equal means the same tokens in the same order


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One replica's share of one optimizer step."""

    # (inputs, targets), each int64 [micro_batch_size, seq_len]; `num_microbatches` pairs
    micro_batches: list[tuple[np.ndarray, np.ndarray]]
    num_targets: int  # real ones of the global batch, over all replicas and micro-batches


def prepare_data(corpus: Corpus, tokenizer: Tokenizer, config: RunConfig, cache_dir: Path) -> Data:
    """Tokenise (or find in `cache_dir`) and cut into samples.

    Raises UserError when there is not enough text for `max_length` and `num_samples`.
    """
    seq_len = config.max_length
    folder = tokenise_once(corpus, tokenizer, config.pack, cache_dir)
    train = _cut(folder, "train", config, tokenizer.eos_id)
    if corpus.validation is not None:
        validation = _cut(folder, "validation", config, tokenizer.eos_id)
    else:
        num_left = len(train) - max(1, round(HELD_OUT * len(train)))
        train, validation = train.take(0, num_left), train.take(num_left, len(train))
    counts = f"{len(train)} for training and {len(validation)} for validation"
    why = f"cut into samples of {seq_len} tokens, {corpus.name!r} gives {counts}"
    if len(train) == 0 or len(validation) == 0:
        what = f"dataset={corpus.name!r} is too short"
        raise UserError(what, why, "use a longer text or a smaller max_length")
    if config.num_samples > len(train):
        what = f"num_samples={config.num_samples} is more than the dataset has"
        raise UserError(what, why, f"set num_samples to at most {len(train)}, or to -1 for all")
    if config.num_samples != -1:
        train = train.take(0, config.num_samples)
    if config.eval_samples != -1:
        validation = validation.take(0, config.eval_samples)
    fingerprint = hashlib.sha256(f"{folder.name} {seq_len} {len(train)}".encode()).hexdigest()[:16]
    return Data(train=train, validation=validation, fingerprint=fingerprint)


def _cut(folder: Path, split: str, config: RunConfig, padding_id: int) -> Samples:
    """A split of the cache as blocks without padding, or as one sample per text."""
    (tokens, texts), seq_len = load_split(folder, split), config.max_length
    if config.pack:  # what does not fill a block is left out
        starts = np.arange(0, max(0, len(tokens) - seq_len), seq_len)
        return Samples(tokens, starts, np.full(len(starts), seq_len), seq_len, padding_id)
    lengths = np.minimum(np.diff(texts) - 1, seq_len)
    return Samples(tokens, texts[:-1][lengths > 0], lengths[lengths > 0], seq_len, padding_id)
