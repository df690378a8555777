"""Texts -> token ids, cached on disk -> samples -> the batches of each step. No torch import."""

import functools
import hashlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.data.cache import digest_of, load_bytes, load_tokens
from distributed_training.data.packing import pack_records
from distributed_training.data.pieces import ANSWERS, RUNNING, TEXT
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError

IGNORE_INDEX = -100
EMPTY = -1  # index of "no sample": fills up a step that the data do not
AUTO_SAMPLES = 1000
_AT_ONCE = 2**20  # tokens whose bytes are counted at a time
HELD_OUT = 0.05  # share kept for validation where the source has no split of its own


@dataclass(frozen=True, slots=True)
class Samples:
    """Part i of a text is `tokens[starts[i] : starts[i] + lengths[i] + 1]`: inputs, and as targets
    the same shifted by one. Blocks of running text overlap by one token: each token but the first
    is a target once. A sample is one part, or a block of several, each a record."""

    tokens: np.ndarray  # ids of all texts in a row
    starts: np.ndarray  # where each part starts, [num_parts]
    lengths: np.ndarray  # tokens of each part, [num_parts]
    seq_len: int  # tokens of a sample as the model sees it, padding included
    padding_id: int
    # Of each part, [num_parts], at least 1: neither padding nor outside of answers.
    num_targets: np.ndarray
    loss_mask: np.ndarray | None = None  # whether each of `tokens` is learnt; None: all are
    # The first part of each block, and the end, [num_samples + 1]; None: a sample is one part.
    firsts: np.ndarray | None = None
    max_documents: int = 0  # of the block that has most, and one for padding

    def __len__(self) -> int:
        return len(self.starts if self.firsts is None else self.firsts[1:])

    def take(self, first: int, last: int) -> "Samples":
        """Parts first..last-1, before they are packed, without copying tokens."""
        assert self.firsts is None
        return replace(
            self,
            starts=self.starts[first:last],
            lengths=self.lengths[first:last],
            num_targets=self.num_targets[first:last],
        )

    def packed(self) -> "Samples":
        """The parts in blocks: each is kept whole, and does not see the others of its block."""
        order, firsts = pack_records(self.lengths, self.seq_len)
        return replace(
            self,
            starts=self.starts[order],
            lengths=self.lengths[order],
            num_targets=self.num_targets[order],
            firsts=firsts,
            max_documents=int(np.diff(firsts).max()) + 1,
        )

    def parts_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the parts of some samples, the row of each). EMPTY has none."""
        rows = np.flatnonzero(indices != EMPTY)
        real = indices[rows]
        if self.firsts is None:
            return real, rows
        counts = self.firsts[real + 1] - self.firsts[real]
        parts = np.repeat(self.firsts[real], counts) + _count_up(counts)
        return parts, np.repeat(rows, counts)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, ...]:
        """(inputs, targets), each int64 [len(indices), seq_len]; targets are what is learnt. Of
        packed records also their positions, of the same shape, and the ends of each block's
        documents, int64 [len(indices), max_documents], of which padding is the last; after it
        seq_len is repeated."""
        shape = (len(indices), self.seq_len)
        parts, rows = self.parts_of(indices)
        lengths = self.lengths[parts]
        ends = _running_sum(lengths, rows)  # in the row
        within = _count_up(lengths)
        source = np.repeat(self.starts[parts], lengths) + within
        place = np.repeat(rows * self.seq_len + ends - lengths, lengths) + within
        inputs = np.full(shape, self.padding_id, dtype=np.int64)
        targets = np.full_like(inputs, IGNORE_INDEX)
        inputs.flat[place] = self.tokens[source]
        after = self.tokens[source + 1].astype(np.int64)
        if self.loss_mask is not None:
            after = np.where(self.loss_mask[source + 1], after, IGNORE_INDEX)
        targets.flat[place] = after
        if self.firsts is None:
            return inputs, targets
        sizes = np.bincount(rows, weights=lengths, minlength=len(indices)).astype(np.int64)
        positions = np.arange(self.seq_len) - sizes[:, None]  # of padding
        positions.flat[place] = within
        documents = np.full((len(indices), self.max_documents), self.seq_len, dtype=np.int64)
        documents[rows, _running_sum(np.ones_like(rows), rows) - 1] = ends
        return inputs, targets, positions, documents

    def count(self, indices: np.ndarray) -> tuple[int, int]:
        """(targets, tokens) of some samples."""
        parts, _ = self.parts_of(indices)
        return int(self.num_targets[parts].sum()), int(self.lengths[parts].sum())

    def count_bytes(self, bytes_of: np.ndarray) -> int:
        """UTF-8 bytes of the text that all targets stand for, with those `bytes_of` each token."""
        total = 0
        calls = -(-len(self) * self.seq_len // _AT_ONCE)
        for indices in np.array_split(np.arange(len(self)), max(1, min(calls, len(self)))):
            targets = self.batch(indices)[1]
            total += int(bytes_of[targets[targets != IGNORE_INDEX]].sum(dtype=np.int64))
        return total

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
    packs: bool = True  # whether samples are full blocks, or packed records, rather than padded
    counts: dict[str, Any] = field(default_factory=dict)  # as data/report.py says them
    # Bytes of text that each token stands for (data/text_bytes.py)
    bytes_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One replica's share of one optimizer step."""

    micro_batches: list[tuple[np.ndarray, ...]]  # `num_microbatches` times `Samples.batch`
    num_targets: int  # real ones of the global batch, over all replicas and micro-batches
    num_tokens: int  # likewise, prompts included


def cut_samples(
    folder: Path, tokenizer: Tokenizer, config: RunConfig, *, can_pack: bool = True
) -> Data:
    """The samples of a folder of the cache; UserError where they are fewer than asked for.
    `can_pack`: whether the engine keeps packed records apart."""
    form, splits = load_tokens(folder)
    packs = config.pack is not False and (form == RUNNING or can_pack)
    if config.pack is True and not packs:
        what = f"pack=True does not go with strategy={config.strategy!r} and this model"
        raise UserError(what, "one of them does not keep packed records apart", "set pack to auto")
    as_blocks = packs and form == RUNNING
    seq_len = config.max_length
    cut = functools.partial(_cut, seq_len=seq_len, padding_id=tokenizer.eos_id)
    parts = functools.partial(find_parts, form=form, config=config, packs=packs)
    train, *rest = (cut(split, parts(split)) for split in splits)
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
        fix = "use a longer text or a smaller max_length"
        if form in ANSWERS:
            what += " has too few records whose answer is seen"
            fix = "give more records, or set a larger max_length if prompts fill it"
            raise UserError(what, why, fix)
        raise UserError(f"{what} is too short", why, fix)
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
    identity = f"{digest_of(folder)} {packs} {seq_len} {len(train)}"
    if packs and not as_blocks:
        train = train.packed()
        validation = validation.packed()
        identity += f" in {len(train)} blocks"
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return Data(
        train, validation, fingerprint, tokenizer, folder.name, form, packs,
        bytes_of=load_bytes(folder),
    )  # fmt: skip


def all_samples(
    folder: Path, config: RunConfig, *, padding_id: int = 0, with_tail: bool = False
) -> Samples:
    """All samples of the first split of a folder of the cache; `with_tail`: with the rest of
    running text that does not fill a block."""
    form, (split, *_) = load_tokens(folder)
    starts, lengths = find_parts(split, form, config)
    if with_tail and form == RUNNING and config.pack is not False:
        starts = np.arange(0, len(split["ids"]) - 1, config.max_length)
        lengths = np.minimum(len(split["ids"]) - 1 - starts, config.max_length)
    samples = _cut(split, (starts, lengths), seq_len=config.max_length, padding_id=padding_id)
    packs = config.pack is not False and form != RUNNING and len(samples) > 0
    return samples.packed() if packs else samples


Parts = tuple[np.ndarray, np.ndarray]  # starts and lengths, as in Samples


def find_parts(
    split: dict[str, np.ndarray], form: str, config: RunConfig, packs: bool | None = None
) -> Parts:
    """The parts that a split is cut into, also those in which nothing is learnt."""
    packs = config.pack is not False if packs is None else packs
    if packs and form == RUNNING:
        return _find_blocks(split, config.max_length)
    return _find_records(split, config.max_length, packs and form == TEXT)


def _find_blocks(split: dict[str, np.ndarray], seq_len: int) -> Parts:
    """Blocks of running text; what does not fill the last is left out."""
    starts = np.arange(0, max(0, len(split["ids"]) - seq_len), seq_len)
    return starts, np.broadcast_to(np.int64(seq_len), len(starts))


def _find_records(split: dict[str, np.ndarray], seq_len: int, whole: bool) -> Parts:
    """One part per text, its first `seq_len` tokens; `whole`: as many as a longer one fills."""
    starts = split["starts"][:-1]
    lengths = np.diff(split["starts"]) - 1
    if whole:
        counts = -(-lengths // seq_len)
        before = _count_up(counts) * seq_len
        starts = np.repeat(starts, counts) + before
        lengths = np.repeat(lengths, counts) - before
    kept = lengths > 0
    return starts[kept], np.minimum(lengths[kept], seq_len)


def _cut(split: dict[str, np.ndarray], parts: Parts, *, seq_len: int, padding_id: int) -> Samples:
    """A split as samples of one part each; parts in which nothing is learnt, such as a prompt that
    fills the whole sample, are left out."""
    ids = split["ids"]
    starts, lengths = parts
    loss_mask = split.get("loss_mask")
    if loss_mask is None or len(starts) == 0:
        return Samples(ids, starts, lengths, seq_len, padding_id, lengths)
    learnt = count_targets(loss_mask, starts, lengths)
    kept = learnt > 0
    return Samples(ids, starts[kept], lengths[kept], seq_len, padding_id, learnt[kept], loss_mask)


def count_targets(mask: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Targets of each part i, which are among ids[starts[i] + 1 : starts[i] + lengths[i] + 1]; a
    part has at least one token, and the parts are in their order."""
    edges = np.stack([starts + 1, starts + lengths + 1], axis=1).ravel()
    if edges[-1] == len(mask):
        edges = edges[:-1]
    return np.add.reduceat(mask, edges, dtype=np.int64)[::2]


def _count_up(counts: np.ndarray) -> np.ndarray:
    """0 .. counts[0] - 1, 0 .. counts[1] - 1, ..."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _running_sum(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The sum of the values so far within each row; `rows` ascend."""
    sums = np.cumsum(values)
    first = np.searchsorted(rows, rows)  # of the same row
    return sums - (sums[first] - values[first])


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
        num_targets, num_tokens = samples.count(indices.ravel())
        return StepBatch(own, num_targets, num_tokens)

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
