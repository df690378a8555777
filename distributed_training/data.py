"""Texts -> cached token ids -> samples -> the batches of each optimizer step. No torch import.

Everything here is a pure function of the settings, so every rank computes the same order by
itself and takes its own share; nothing is communicated.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distributed_training.config import RunConfig
from distributed_training.corpus import Corpus
from distributed_training.errors import UserError
from distributed_training.tokenizer import Tokenizer

IGNORE_INDEX = -100
EMPTY = -1  # stands for "no sample" where a step's last places are not filled
HELD_OUT = 0.05  # share kept for validation where the source has no split of its own
PARTS = ("tokens", "starts")  # of a cached split: ids in a row, where each text starts
_CACHE_VERSION = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of at most `seq_len` targets each, over one array of token ids.

    Sample i is `tokens[starts[i] : starts[i] + lengths[i] + 1]`: `lengths[i]` inputs, and as
    targets the same shifted by one. Packed blocks overlap by one token, so that every token but
    the first is a target exactly once.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    seq_len: int
    padding_id: int

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, first: int, last: int) -> Samples:
        """Samples first..last-1, without copying tokens."""
        return Samples(
            self.tokens,
            self.starts[first:last],
            self.lengths[first:last],
            self.seq_len,
            self.padding_id,
        )

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
    fingerprint: str
    """Hash of text, tokenizer and settings: equal means the same tokens in the same order."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's share of one optimizer step."""

    micro_batches: list[tuple[np.ndarray, np.ndarray]]
    """(inputs, targets), each [micro_batch_size, seq_len], one pair per accumulation step."""
    num_targets: int
    """Real targets of the whole global batch, over all ranks and micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """The order of samples: a function of (seed, epoch) alone, whatever the number of ranks.

    Its position is the number of optimizer steps done, so saving and restoring that number
    saves and restores the sampler.
    """

    num_samples: int
    micro_batch_size: int
    grad_accum_steps: int
    dp_size: int
    dp_rank: int
    seed: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.grad_accum_steps * self.dp_size

    @property
    def steps_per_epoch(self) -> int:
        """The last step may be part empty: every sample is seen once an epoch, none twice."""
        return -(-self.num_samples // self.global_batch_size)

    def step_indices(self, step: int) -> np.ndarray:
        """Sample indices of global step `step`: int64 [grad_accum_steps, dp_size, micro_batch]."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        chosen = order[position * self.global_batch_size : (position + 1) * self.global_batch_size]
        return self._shape(chosen)

    def is_full(self, step: int) -> bool:
        """Whether the data fill every place of this step's batch."""
        position = step % self.steps_per_epoch
        return (position + 1) * self.global_batch_size <= self.num_samples

    def eval_indices(self) -> Iterator[np.ndarray]:
        """This rank's micro-batches over all samples once, in order; same count on every rank."""
        per_call = self.micro_batch_size * self.dp_size
        for first in range(0, self.num_samples, per_call):
            chosen = np.arange(first, min(first + per_call, self.num_samples))
            padded = np.full(per_call, EMPTY)
            padded[: len(chosen)] = chosen
            yield padded.reshape(self.dp_size, self.micro_batch_size)[self.dp_rank]

    def step_batch(self, samples: Samples, step: int) -> StepBatch:
        """This rank's micro-batches of global step `step`."""
        indices = self.step_indices(step)
        return StepBatch(
            [samples.batch(micro) for micro in indices[:, self.dp_rank]],
            samples.count_targets(indices),
        )

    def _shape(self, chosen: np.ndarray) -> np.ndarray:
        padded = np.full(self.global_batch_size, EMPTY)
        padded[: len(chosen)] = chosen
        return padded.reshape(self.grad_accum_steps, self.dp_size, self.micro_batch_size)


def prepare_data(corpus: Corpus, tokenizer: Tokenizer, config: RunConfig, cache_dir: Path) -> Data:
    """Tokenise (or find in `cache_dir`) and cut into samples as `config` asks.

    Raises UserError when there is not enough text or `num_samples` is beyond it.
    """
    settings = [_CACHE_VERSION, corpus.fingerprint, tokenizer.fingerprint, config.pack]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
    folder = cache_dir / key
    _tokenise_once(corpus, tokenizer, config.pack, folder)
    train = _cut(folder, "train", config, tokenizer)
    if corpus.validation is not None:
        validation = _cut(folder, "validation", config, tokenizer)
    else:
        held_out = max(1, round(HELD_OUT * len(train)))
        cut = len(train) - held_out
        train, validation = train.take(0, cut), train.take(cut, len(train))
    if len(train) == 0 or len(validation) == 0:
        raise UserError(
            f"dataset={corpus.name!r} is too short",
            f"{config.seq_len} tokens a sample leave {len(train)} to train and "
            f"{len(validation)} to validate on",
            "use a longer text or a smaller max_length",
        )
    if config.num_samples > len(train):
        raise UserError(
            f"num_samples={config.num_samples} is beyond the data",
            f"dataset={corpus.name!r} has {len(train)} training samples of {config.seq_len} tokens",
            f"set num_samples to at most {len(train)}, or -1 for all",
        )
    if config.num_samples != -1:
        train = train.take(0, config.num_samples)
    if config.eval_samples != -1:
        validation = validation.take(0, config.eval_samples)
    fingerprint = hashlib.sha256(f"{key} {config.seq_len} {len(train)}".encode()).hexdigest()[:16]
    return Data(train=train, validation=validation, fingerprint=fingerprint)


def _tokenise_once(corpus: Corpus, tokenizer: Tokenizer, pack: bool, folder: Path) -> None:
    """Fill `folder` unless it is there; processes that come at the same time wait for one."""
    from filelock import FileLock

    splits = {"train": corpus.train, "validation": corpus.validation}
    wanted = {split: texts for split, texts in splits.items() if texts is not None}
    if _is_readable(folder, wanted):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if _is_readable(folder, wanted):
            return
        num_bytes = sum(len(text) for text in corpus.train)
        logger.info("Tokenising %s (%.1f MB of text), once ...", corpus.name, num_bytes / 1e6)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
        try:
            for split, texts in wanted.items():
                tokens, starts = _concatenate(tokenizer, _samples_of(corpus, texts, pack))
                np.save(_array_file(building, split, "tokens"), tokens)
                np.save(_array_file(building, split, "starts"), starts)
            shutil.rmtree(folder, ignore_errors=True)  # there only if it could not be read
            os.replace(building, folder)  # published whole or not at all
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _array_file(folder: Path, split: str, part: str) -> Path:
    return folder / f"{split}-{part}.npy"


def _is_readable(folder: Path, splits: Iterable[str]) -> bool:
    """Whether the cache is there at its full length; a warning names a file that was cut off."""
    if not folder.is_dir():
        return False
    for file in [_array_file(folder, split, part) for split in splits for part in PARTS]:
        try:
            np.load(file, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            logger.warning("the token cache is made anew: %s cannot be read: %s", file, error)
            return False
    return True


def _samples_of(corpus: Corpus, texts: list[str], pack: bool) -> list[str]:
    """Documents when packing; else one text a sample: a record, or a line that is not blank."""
    if pack or corpus.records:
        return texts
    return [line for text in texts for line in text.splitlines() if line.strip()]


def _concatenate(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """All ids in a row, end-of-text after each text, and where each text starts (plus the end)."""
    eos = np.array([tokenizer.eos_id], dtype=np.int32)
    arrays: list[np.ndarray] = []
    starts = [0]
    for first in range(0, len(texts), 1024):
        for ids in tokenizer.encode_batch(texts[first : first + 1024]):
            arrays += [ids, eos]
            starts.append(starts[-1] + len(ids) + 1)
    dtype = np.uint16 if tokenizer.num_tokens <= 2**16 else np.int32
    tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    return tokens.astype(dtype), np.array(starts, dtype=np.int64)


def _cut(folder: Path, split: str, config: RunConfig, tokenizer: Tokenizer) -> Samples:
    tokens = np.load(_array_file(folder, split, "tokens"), mmap_mode="r")
    if config.pack:
        count = max(0, (len(tokens) - 1) // config.seq_len)
        starts = np.arange(count, dtype=np.int64) * config.seq_len
        lengths = np.full(count, config.seq_len, dtype=np.int64)
    else:
        bounds = np.load(_array_file(folder, split, "starts"))
        starts = bounds[:-1]
        lengths = np.minimum(np.diff(bounds) - 1, config.seq_len)
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    return Samples(tokens, starts, lengths, config.seq_len, tokenizer.eos_id)
