"""Texts -> token ids, cached on disk -> samples -> the batches of each step. No torch import."""

import functools
import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distributed_training.data.cache import load_tokens
from distributed_training.data.pieces import RUNNING
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError

IGNORE_INDEX = -100
EMPTY = -1  # index of "no sample": fills up a step that the data do not
AUTO_SAMPLES = 1000
HELD_OUT = 0.05  # share kept for validation where the source has no split of its own


@dataclass(frozen=True, slots=True)
class Samples:
    """Sample i is `tokens[starts[i] : starts[i] + lengths[i] + 1]`: inputs, and as targets the same
    shifted by one. Packed blocks overlap by one token: each but the first is a target once."""

    tokens: np.ndarray  # ids of all texts in a row
    starts: np.ndarray  # where each sample starts, [num_samples]
    lengths: np.ndarray  # tokens of each sample, [num_samples]
    seq_len: int  # tokens of a sample as the model sees it, padding included
    padding_id: int
    # Of each sample, [num_samples], at least 1: neither padding nor outside of answers.
    num_targets: np.ndarray
    loss_mask: np.ndarray | None = None  # whether each of `tokens` is learnt; None: all are

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, first: int, last: int) -> "Samples":
        """Samples first..last-1, without copying tokens."""
        return replace(
            self,
            starts=self.starts[first:last],
            lengths=self.lengths[first:last],
            num_targets=self.num_targets[first:last],
        )

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), each int64 [len(indices), seq_len]; targets are what is learnt."""
        inputs = np.full((len(indices), self.seq_len), self.padding_id, dtype=np.int64)
        targets = np.full_like(inputs, IGNORE_INDEX)
        for row, index in enumerate(indices):
            if index != EMPTY:
                start = self.starts[index]
                length = self.lengths[index]
                after = slice(start + 1, start + length + 1)
                inputs[row, :length] = self.tokens[start : start + length]
                mask = True if self.loss_mask is None else self.loss_mask[after]
                np.copyto(targets[row, :length], self.tokens[after], where=mask)
        return inputs, targets

    @property
    def real_share(self) -> float:
        """Share of positions that hold a token; 1.0 when nothing is padded."""
        return float(self.lengths.sum()) / (len(self) * self.seq_len)


@dataclass(frozen=True, slots=True)
class Data:
    """What a run trains and evaluates on."""

    train: Samples
    validation: Samples
    fingerprint: str  # equal means the same tokens in the same order
    tokenizer: Tokenizer  # whose tokens they are
    cache: str = ""  # name of its folder in the token cache
    form: str = RUNNING  # of the training texts, as in data/pieces.py


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One replica's share of one optimizer step."""

    # (inputs, targets), each int64 [micro_batch_size, seq_len]; `num_microbatches` pairs
    micro_batches: list[tuple[np.ndarray, np.ndarray]]
    num_targets: int  # real ones of the global batch, over all replicas and micro-batches
    num_tokens: int  # likewise, prompts included


def cut_samples(folder: Path, tokenizer: Tokenizer, config: RunConfig) -> Data:
    """The samples of a folder of the cache; UserError where they are fewer than asked for."""
    form, splits = load_tokens(folder)
    seq_len = config.max_length
    train, *rest = (_cut(split, config, tokenizer.eos_id) for split in splits)
    if rest:
        validation = rest[0]
    else:
        num_left = len(train) - max(1, round(HELD_OUT * len(train)))
        validation = train.take(num_left, len(train))
        train = train.take(0, num_left)
    why = f"cut into samples of {seq_len} tokens, {config.dataset!r} gives {len(train)} for "
    why += f"training and {len(validation)} for validation"
    if len(train) == 0 or len(validation) == 0:
        own = config.validation_dataset if len(train) else None
        what = f"validation_dataset={own!r}" if own else f"dataset={config.dataset!r}"
        raise UserError(f"{what} is too short", why, "use a longer text or a smaller max_length")
    asked = config.num_samples
    wanted = min(AUTO_SAMPLES, len(train)) if isinstance(asked, str) else asked
    if wanted > len(train):
        what = f"num_samples={wanted} is more than the dataset has"
        fix = f"set num_samples to at most {len(train)}, or to auto or -1 for all"
        raise UserError(what, why, fix)
    if wanted != -1:
        train = train.take(0, wanted)
    if config.eval_samples != -1:
        validation = validation.take(0, config.eval_samples)
    fingerprint = hashlib.sha256(f"{folder.name} {seq_len} {len(train)}".encode()).hexdigest()[:16]
    return Data(train, validation, fingerprint, tokenizer, cache=folder.name, form=form)


def _cut(split: dict[str, np.ndarray], config: RunConfig, padding_id: int) -> Samples:
    """A split as blocks without padding, or as one sample per text; those in which nothing is
    learnt, such as a prompt that fills the whole sample, are left out."""
    ids = split["ids"]
    loss_mask = split.get("loss_mask")
    seq_len = config.max_length
    if config.pack:  # what does not fill a block is left out
        starts = np.arange(0, max(0, len(ids) - seq_len), seq_len)
        lengths = np.broadcast_to(np.int64(seq_len), len(starts))
    else:
        lengths = np.minimum(np.diff(split["starts"]) - 1, seq_len)
        starts = split["starts"][:-1][lengths > 0]
        lengths = lengths[lengths > 0]
    if loss_mask is None or len(starts) == 0:
        return Samples(ids, starts, lengths, seq_len, padding_id, lengths)
    # Targets of sample i are ids[starts[i] + 1 : starts[i] + lengths[i] + 1].
    edges = np.stack([starts + 1, starts + lengths + 1], axis=1).ravel()
    if edges[-1] == len(ids):
        edges = edges[:-1]
    learnt = np.add.reduceat(loss_mask, edges, dtype=np.int64)[::2]
    kept = learnt > 0
    return Samples(ids, starts[kept], lengths[kept], seq_len, padding_id, learnt[kept], loss_mask)


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
        order = _order(self.seed, epoch, self.num_samples)
        first = position * self.global_batch_size
        shape = (self.num_microbatches, self.num_replicas, self.micro_batch_size)
        return _fill(order[first : first + self.global_batch_size], shape)

    def step_batch(self, samples: Samples, step: int) -> StepBatch:
        """This replica's micro-batches of optimizer step `step`."""
        indices = self.step_indices(step)
        own = [samples.batch(micro_batch) for micro_batch in indices[:, self.replica]]
        real = indices[indices != EMPTY]
        num_targets = int(samples.num_targets[real].sum())
        return StepBatch(own, num_targets, int(samples.lengths[real].sum()))

    def is_full(self, step: int) -> bool:
        """Whether the step has a sample in every place of its batch."""
        return (step % self.steps_per_epoch + 1) * self.global_batch_size <= self.num_samples

    def eval_indices(self, num_samples: int) -> np.ndarray:
        """This replica's micro-batches over `num_samples` samples, each once and in order: int64
        [calls, micro_batch_size], padded with EMPTY so that every replica gets as many."""
        num_calls = math.ceil(num_samples / (self.num_replicas * self.micro_batch_size))
        shape = (num_calls, self.num_replicas, self.micro_batch_size)
        return _fill(np.arange(num_samples), shape)[:, self.replica]


@functools.lru_cache(maxsize=1)  # of millions of samples it takes longer than a step
def _order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def _fill(indices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    missing = math.prod(shape) - len(indices)
    return np.pad(indices, (0, missing), constant_values=EMPTY).reshape(shape)
