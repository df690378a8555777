"""Texts -> token ids, cached on disk -> samples -> the batches of each step. No torch import."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from filelock import FileLock

from distributed_training.data.corpus import Corpus
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError

IGNORE_INDEX = -100
EMPTY = -1  # index of "no sample": fills up a step that the data do not
AUTO_SAMPLES = 1000
HELD_OUT = 0.05  # share kept for validation where the source has no split of its own
_CACHE_VERSION = 1
_PARTS = ("tokens", "starts")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Samples:
    """Sample i is `tokens[starts[i] : starts[i] + lengths[i] + 1]`: inputs, and as targets the same
    shifted by one. Packed blocks overlap by one token: each but the first is a target once."""

    tokens: np.ndarray  # ids of all texts in a row
    starts: np.ndarray  # where each sample starts, [num_samples]
    lengths: np.ndarray  # targets of each sample, [num_samples]
    seq_len: int  # tokens of a sample as the model sees it, padding included
    padding_id: int

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, first: int, last: int) -> Samples:
        """Samples first..last-1, without copying tokens."""
        return replace(self, starts=self.starts[first:last], lengths=self.lengths[first:last])

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
    """Tokenise (or find in `cache_dir`) and cut into samples; UserError where text is too short."""
    seq_len = config.max_length
    folder = _tokenise_once(corpus, tokenizer, config.pack, cache_dir)
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
    asked = config.num_samples
    wanted = min(AUTO_SAMPLES, len(train)) if isinstance(asked, str) else asked
    if wanted > len(train):
        what, fix = f"num_samples={wanted} is more than the dataset has", f"at most {len(train)}"
        raise UserError(what, why, f"set num_samples to {fix}, or to auto or -1 for all")
    if wanted != -1:
        train = train.take(0, wanted)
    if config.eval_samples != -1:
        validation = validation.take(0, config.eval_samples)
    fingerprint = hashlib.sha256(f"{folder.name} {seq_len} {len(train)}".encode()).hexdigest()[:16]
    return Data(train=train, validation=validation, fingerprint=fingerprint)


def _cut(folder: Path, split: str, config: RunConfig, padding_id: int) -> Samples:
    """A split of the cache as blocks without padding, or as one sample per text."""
    (tokens, texts), seq_len = _load_split(folder, split), config.max_length
    if config.pack:  # what does not fill a block is left out
        starts = np.arange(0, max(0, len(tokens) - seq_len), seq_len)
        return Samples(tokens, starts, np.full(len(starts), seq_len), seq_len, padding_id)
    lengths = np.minimum(np.diff(texts) - 1, seq_len)
    return Samples(tokens, texts[:-1][lengths > 0], lengths[lengths > 0], seq_len, padding_id)


def _tokenise_once(corpus: Corpus, tokenizer: Tokenizer, pack: bool, cache_dir: Path) -> Path:
    """The folder below `cache_dir` with the ids of `corpus`, named by a hash of all that decides
    them; of several processes one fills it and the others wait."""
    settings = [_CACHE_VERSION, corpus.fingerprint, tokenizer.fingerprint, pack]
    folder = cache_dir / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
    splits = {"train": corpus.train, "validation": corpus.validation}
    wanted = {split: texts for split, texts in splits.items() if texts is not None}
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        try:
            for split in wanted:
                _load_split(folder, split)
            return folder
        except (OSError, ValueError, EOFError) as error:
            if folder.is_dir():
                logger.warning("rebuilding the token cache %s: %s", folder, error)
        megabytes = sum(len(text) for text in corpus.train) / 1e6
        logger.info("Tokenising %s (%.1f MB of text), once ...", corpus.name, megabytes)
        with TemporaryDirectory(dir=cache_dir, ignore_cleanup_errors=True) as building:
            for split, texts in wanted.items():
                if not (pack or corpus.records):  # a sample is a line
                    texts = [line for text in texts for line in text.splitlines() if line.strip()]
                for part, array in zip(_PARTS, _concatenate(tokenizer, texts), strict=True):
                    np.save(Path(building, f"{split}-{part}.npy"), array)
            shutil.rmtree(folder, ignore_errors=True)  # exists only if it was damaged
            os.replace(building, folder)  # so that a cache is never half written
    return folder


def _concatenate(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """All ids in a row, end-of-text after each text, and where each text starts (plus the end)."""
    dtype = np.uint16 if tokenizer.num_tokens <= 2**16 else np.int32
    arrays = [
        np.append(ids, tokenizer.eos_id).astype(dtype)
        for first in range(0, len(texts), 1024)
        for ids in tokenizer.encode_batch(texts[first : first + 1024])
    ]
    starts = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    return np.concatenate([np.zeros(0, dtype), *arrays]), starts


def _load_split(folder: Path, split: str) -> list[np.ndarray]:
    """[ids of all texts in a row, mapped from disk; where each text starts, and the end]."""
    return [np.load(folder / f"{split}-{part}.npy", mmap_mode="r") for part in _PARTS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Which samples each step sees: a pure function of (seed, step), under every layout with this
    global batch. Every rank computes the whole order and takes its share."""

    num_samples: int
    global_batch_size: int  # sequences of one optimizer step, over all replicas
    micro_batch_size: int  # sequences in one forward pass of one replica
    num_microbatches: int  # of one replica in one optimizer step
    num_replicas: int
    replica: int  # of this rank; ranks of one tensor or pipeline group share one
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The last step may be partly empty: every sample is seen once an epoch, none twice."""
        return math.ceil(self.num_samples / self.global_batch_size)

    def step_indices(self, step: int) -> np.ndarray:
        """Samples of a step, EMPTY where an epoch's last step has none left: int64
        [num_microbatches, num_replicas, micro_batch_size], the same on every rank."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        first = position * self.global_batch_size
        chosen = _fill(order[first : first + self.global_batch_size], self.global_batch_size)
        return chosen.reshape(self.num_microbatches, self.num_replicas, self.micro_batch_size)

    def step_batch(self, samples: Samples, step: int) -> StepBatch:
        """This replica's micro-batches of optimizer step `step`."""
        indices = self.step_indices(step)
        own = [samples.batch(micro_batch) for micro_batch in indices[:, self.replica]]
        return StepBatch(own, samples.count_targets(indices))

    def is_full(self, step: int) -> bool:
        """Whether the step has a sample in every place of its batch."""
        position = step % self.steps_per_epoch
        return (position + 1) * self.global_batch_size <= self.num_samples

    def eval_indices(self, num_samples: int) -> Iterator[np.ndarray]:
        """This replica's micro-batches over `num_samples` samples, each once and in order: int64
        [micro_batch_size], padded with EMPTY so that every replica gets as many."""
        per_call = self.micro_batch_size * self.num_replicas
        for first in range(0, num_samples, per_call):
            chosen = _fill(np.arange(first, min(first + per_call, num_samples)), per_call)
            yield chosen.reshape(self.num_replicas, self.micro_batch_size)[self.replica]


def _fill(indices: np.ndarray, length: int) -> np.ndarray:
    return np.pad(indices, (0, length - len(indices)), constant_values=EMPTY)
