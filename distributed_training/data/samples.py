"""Load the samples of a run, which are cut from cached token ids. Choose the batch of each step.
This module does not import torch."""

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.data.cache import load_bytes, load_tokens, read_meta
from distributed_training.data.corpus import split_weights
from distributed_training.data.packing import pack_records
from distributed_training.data.pieces import RUNNING, TEXT
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.config import Config
from distributed_training.settings.errors import UserError

IGNORE_INDEX = -100
NO_SAMPLE = -1  # index of "no sample", which pads the last step of an epoch
# Fraction of samples kept for validation if the dataset has no validation split
VALIDATION_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one split. A sample is one part of the split or, if records are packed, a block of
    parts. Part i is `tokens[starts[i] : starts[i] + lengths[i] + 1]`. Its inputs are all of its
    tokens except the last, and its targets are all except the first. Blocks of running text overlap
    by one token, so that each token except the first is a target exactly once.

    In preference tuning, a part is a pair: two such texts, which are neighboring documents of a
    block."""

    tokens: np.ndarray  # ids of all documents, concatenated
    starts: np.ndarray  # index of the first token of each part, [num_parts]
    lengths: np.ndarray  # number of input tokens of each part, [num_parts]
    seq_len: int  # tokens per sample, including padding
    padding_id: int
    # Number of terms of the loss for each part, [num_parts]: targets, at least 1, or 1 for a pair
    num_targets: np.ndarray
    owners: np.ndarray  # index of each part's dataset, [num_parts]
    loss_mask: np.ndarray | None = None  # whether each token is in the loss; None if all are
    # Index of each block's first part, then the number of parts, [num_samples + 1]. None without
    # packing.
    firsts: np.ndarray | None = None
    max_documents: int = 0  # largest number of documents in a block, plus one for padding
    # Number of input tokens of both answers of each pair, [num_parts, 2]; None without pairs
    answer_lengths: np.ndarray | None = None
    # Number of targets in the loss of both answers of each pair, [num_parts, 2]
    answer_targets: np.ndarray | None = None
    # Log-probability of both answers before training, [num_parts, 2]
    reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts) if self.firsts is None else len(self.firsts) - 1

    def repeated(self, weights: Iterable[float]) -> "Samples":
        """Return the samples of an epoch. With weight 2, a dataset's samples are used twice. With
        weight 0.5, every second sample is used."""
        counts = np.zeros_like(self.owners)
        for owner, weight in enumerate(weights):
            is_own = self.owners == owner
            totals = np.floor(weight * np.arange(is_own.sum() + 1))
            counts[is_own] = np.diff(totals)
        return self.select(np.arange(len(self)).repeat(counts))

    def packed(self, *, one_per_block: bool = False) -> "Samples":
        """Return samples in which the parts are packed into blocks. Parts are not split, and tokens
        do not attend to other documents of their block."""
        order, firsts = np.arange(len(self)), np.arange(len(self) + 1)
        if not one_per_block:
            order, firsts = pack_records(self.lengths, self.seq_len)
        samples = replace(self.select(order), firsts=firsts)
        return replace(samples, max_documents=int(samples.count_documents().max(initial=1)))

    def count_documents(self) -> np.ndarray:
        """Return the number of documents in each block, plus one for padding."""
        assert self.firsts is not None
        return np.diff(self.firsts) * (1 if self.answer_lengths is None else 2) + 1

    def select(self, parts: Any) -> "Samples":
        """Return samples that contain only the given parts, in the given order, without copying
        tokens. `parts` is a slice or an array of part indices. Packed samples are not supported."""
        assert self.firsts is None
        names = ["starts", "lengths", "num_targets", "owners", "answer_lengths", "answer_targets"]
        arrays = {name: getattr(self, name) for name in names}
        arrays = {name: array[parts] for name, array in arrays.items() if array is not None}
        return replace(self, **arrays)

    def parts_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (part indices, rows) for the samples in `indices`. The row of a part is the
        position of the part's sample in `indices`. The index NO_SAMPLE contributes no parts."""
        rows = np.flatnonzero(indices != NO_SAMPLE)
        real = indices[rows]
        if self.firsts is None:
            return real, rows
        counts = self.firsts[real + 1] - self.firsts[real]
        parts = np.repeat(self.firsts[real], counts) + _concatenate_ranges(counts)
        return parts, np.repeat(rows, counts)

    def find_documents(self, parts: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts, lengths) of the documents of the given parts: of each part or, for a
        pair, of both answers."""
        starts, lengths = self.starts[parts], self.lengths[parts]
        if self.answer_lengths is not None:
            lengths = self.answer_lengths[parts].ravel()
            starts = starts.repeat(2)
            starts[1::2] += lengths[::2] + 1
        return starts, lengths

    def documents(self, parts: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, mask) of each document of the given parts. The mask is True for ids that are
        targets in the loss."""
        for start, length in zip(*self.find_documents(parts), strict=True):
            token_range = slice(start, start + length + 1)
            ids = self.tokens[token_range]
            mask = np.ones(len(ids), bool)
            if self.loss_mask is not None:
                mask = np.array(self.loss_mask[token_range])
            mask[0] = False  # The first token is never a target.
            yield ids, mask

    def batch(self, indices: np.ndarray, likelihood_scale: float = 0.0) -> tuple[np.ndarray, ...]:
        """Return (inputs, targets), each int64 [len(indices), seq_len]. Targets outside the loss
        are IGNORE_INDEX.

        For packed records, also return positions of the same shape, and the ends of the documents
        in each block, int64 [len(indices), max_documents]. Padding counts as the last document, and
        unused ends are seq_len.

        For pairs, also return fp32 [len(indices), max_documents, 2]: the log-probability of each
        document before training, and `likelihood_scale` for chosen answers (see
        `scale_likelihood`)."""
        shape = (len(indices), self.seq_len)
        parts, rows = self.parts_of(indices)
        starts, lengths = self.find_documents(parts)
        rows = rows.repeat(1 if self.answer_lengths is None else 2)
        ends = _running_sum(lengths, rows)  # end of each part within its row
        offsets = _concatenate_ranges(lengths)
        source = np.repeat(starts, lengths) + offsets
        destination = np.repeat(rows * self.seq_len + ends - lengths, lengths) + offsets
        inputs = np.full(shape, self.padding_id, dtype=np.int64)
        targets = np.full_like(inputs, IGNORE_INDEX)
        inputs.flat[destination] = self.tokens[source]
        next_tokens = self.tokens[source + 1].astype(np.int64)
        if self.loss_mask is not None:
            next_tokens = np.where(self.loss_mask[source + 1], next_tokens, IGNORE_INDEX)
        targets.flat[destination] = next_tokens
        if self.firsts is None:
            return inputs, targets
        sizes = np.bincount(rows, weights=lengths, minlength=len(indices)).astype(np.int64)
        positions = np.arange(self.seq_len) - sizes[:, None]  # positions within the padding
        positions.flat[destination] = offsets
        document_ends = np.full((len(indices), self.max_documents), self.seq_len, dtype=np.int64)
        columns = _running_sum(np.ones_like(rows), rows) - 1
        document_ends[rows, columns] = ends
        if self.answer_lengths is None:
            return inputs, targets, positions, document_ends
        values = np.zeros((*document_ends.shape, 2), np.float32)
        if self.reference is not None:
            values[rows, columns, 0] = self.reference[parts].ravel()
        values[rows[::2], columns[::2], 1] = likelihood_scale
        return inputs, targets, positions, document_ends, values

    def scale_likelihood(self, indices: np.ndarray) -> float:
        """Return the number of pairs in the samples `indices` per target of their chosen answers.
        The mean loss of these targets is the sum of their losses with this factor, divided by the
        number of pairs."""
        if self.answer_targets is None:
            return 0.0
        parts, _ = self.parts_of(indices)
        return float(len(parts) / self.answer_targets[parts, 0].sum())

    def count(self, indices: np.ndarray) -> tuple[int, int]:
        """Return (number of terms of the loss, number of input tokens) for the samples in
        `indices`."""
        parts, _ = self.parts_of(indices)
        return int(self.num_targets[parts].sum()), int(self.lengths[parts].sum())

    def count_bytes(self, bytes_per_token: np.ndarray) -> int:
        """Return the size in UTF-8 bytes of the text that all targets in the loss represent.
        `bytes_per_token` contains the number of bytes for each token id."""
        total = 0
        for ids, mask in self.documents(slice(None)):
            total += int(bytes_per_token[ids[mask]].sum())
        return total

    @property
    def real_share(self) -> float:
        """Fraction of positions that are not padding. 0 without samples."""
        return float(self.lengths.sum()) / max(1, len(self) * self.seq_len)


@dataclass(frozen=True, slots=True)
class Data:
    """Training and validation samples of a run."""

    train: Samples
    validation: Samples
    fingerprint: str  # equal for the same tokens in the same order
    tokenizer: Tokenizer  # the tokenizer that produced the tokens
    cache: str  # name of the folder in the token cache
    form: str  # form of the training text (data/pieces.py)
    packs: bool  # True for full blocks and packed records, False for padded samples
    # Number of bytes of text that each token represents (data/text_bytes.py)
    bytes_per_token: np.ndarray
    counts: dict[str, Any] = field(default_factory=dict)  # statistics (data/report.py)
    # For data from a sample of the text: size of the text relative to the sample, and relative
    # uncertainty of numbers that are scaled up
    scale: float = 1.0
    error: float = 0.0

    @property
    def is_chat(self) -> bool:
        """True if the training text is treated as conversations."""
        return self.tokenizer.is_chat_form(self.form)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One replica's share of the batch of one optimizer step."""

    micro_batches: list[tuple[np.ndarray, ...]]  # results of `Samples.batch`
    num_targets: int  # targets in the loss, or pairs, of the global batch, over all replicas
    num_tokens: int  # input tokens of the global batch, including prompts


def cut_samples(
    folder: Path, tokenizer: Tokenizer, config: Config, *, can_pack: bool = True
) -> Data:
    """Cut the tokens in a cache folder into the samples that a run uses.

    `can_pack` is True if the model can keep packed records separate. Raises UserError if `pack` is
    True but records cannot be packed. Also raises UserError if there are no training samples or no
    validation samples."""
    form, packs, splits = read_samples(
        folder, config, can_pack=can_pack, padding_id=tokenizer.eos_id
    )
    train, validation = divide(splits, config)
    if len(train) == 0 or len(validation) == 0:
        why = f"the run would have {len(train):,} training and {len(validation):,} validation "
        why += f"samples of {config.max_length} tokens"
        what = f"dataset={config.dataset!r}"
        if config.validation_dataset:
            what += f" or validation_dataset={config.validation_dataset!r}"
        fix = "use more text or records (or larger weights of several datasets). If prompts fill "
        fix += "max_length, set a larger one"
        raise UserError(f"{what} is too short", why, fix)
    weights = [*split_weights(config.dataset).values()]
    if config.eval_samples != -1:
        validation = validation.select(slice(config.eval_samples))
    identity = f"{read_meta(folder)['sha256']} {packs} {config.max_length} {len(train)}"
    if len(splits) == 1 and train.loss_mask is not None:
        identity += " held out at random"
    if weights != [1]:
        identity += f" with weights {weights}"
    if config.has_pairs or (packs and form != RUNNING):
        train = train.packed(one_per_block=not packs)
        validation = validation.packed(one_per_block=not packs)
        identity += f" in {len(train)} shuffled blocks"
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
    bytes_per_token = load_bytes(folder)
    return Data(
        train, validation, fingerprint, tokenizer, folder.name, form, packs, bytes_per_token
    )


def divide(splits: list[Samples], config: Config) -> tuple[Samples, Samples]:
    """Return the training samples of an epoch and the validation samples. If there is only one
    split, its last samples are kept for validation. Answers are chosen at random instead, because
    neighboring records are often about one topic. The choice is the same for every `seed`."""
    train, validation = splits[0], splits[-1]
    if len(splits) == 1:
        num_train = len(train) - max(1, round(VALIDATION_SHARE * len(train)))
        order = np.arange(len(train))
        if train.loss_mask is not None:
            order = np.random.default_rng(0).permutation(order)
        validation = train.select(np.sort(order[num_train:]))
        train = train.select(np.sort(order[:num_train]))
    train = train.repeated(split_weights(config.dataset).values())
    if config.num_samples != -1:
        train = train.select(slice(config.num_samples))
    return train, validation


def will_pack(form: str, config: Config, *, can_pack: bool) -> bool:
    """Return whether a sample may contain text from several documents. If so, running text is cut
    into full blocks, and records are packed. By default, a sample has only one pair, so that
    batch_size counts pairs. `can_pack` has the same meaning as in `cut_samples`.
    Raises UserError if `pack` is True but records cannot be packed."""
    packs = config.pack is not False and (form == RUNNING or can_pack)
    if config.has_pairs:
        packs = config.pack is True
    if config.pack is True and not packs:
        what = f"pack=True does not work with model={config.model!r}"
        why = "the model cannot keep packed records separate"
        raise UserError(what, why, "set pack to auto")
    return packs


def read_samples(
    folder: Path,
    config: Config,
    *,
    can_pack: bool,
    padding_id: int = 0,
    special_ids: np.ndarray | None = None,
) -> tuple[str, bool, list[Samples]]:
    """Return the form of the text in a cache folder, the result of `will_pack`, and all samples of
    each split.

    If `special_ids` are given, the samples are for measuring a text: include the last block of
    running text even if it is incomplete, and leave these ids out of the loss of texts, because the
    texts do not have the tokens that separate them.

    Records are not packed, so each sample has one part. Parts without a target in the loss are left
    out, for example parts that contain only a prompt. The samples of several datasets are spread
    evenly, and the samples of one dataset keep their order."""
    form, splits = load_tokens(folder)
    packs = will_pack(form, config, can_pack=can_pack)
    seq_len = config.max_length
    samples_by_split = []
    for split in splits:
        if packs and form == RUNNING:
            num_targets = len(split["ids"]) - 1
            end = num_targets - seq_len + 1 if special_ids is None else num_targets
            starts = np.arange(0, max(0, end), seq_len)
            lengths = num_targets - starts
        elif config.has_pairs:
            starts, lengths = split["starts"][:-1], np.diff(split["starts"]) - 1
        else:
            starts, lengths = _find_records(split["starts"], packs and form == TEXT, seq_len)
        if not config.has_pairs:  # Pairs are never cut.
            lengths = np.minimum(lengths, seq_len)
        loss_mask = split.get("loss_mask")
        if loss_mask is None and special_ids is not None:
            loss_mask = ~np.isin(split["ids"], special_ids)
        targets = lengths if loss_mask is None else count_targets(loss_mask, starts, lengths)
        is_used = targets > 0
        pairs: dict[str, Any] = {}
        if config.has_pairs:
            pairs = {"answer_lengths": lengths, "answer_targets": targets}
            pairs = {name: values.reshape(-1, 2) for name, values in pairs.items()}
            starts, lengths = starts[::2], pairs["answer_lengths"].sum(axis=1)
            has_both = np.logical_and(*pairs.values()).all(axis=1)
            is_used = has_both & (lengths <= seq_len)
            targets = np.ones_like(starts)
        owners = np.searchsorted(split["firsts"], starts, "right") - 1
        samples = Samples(
            split["ids"], starts, lengths, seq_len, padding_id, targets, owners, loss_mask, **pairs
        ).select(is_used)
        sizes = np.bincount(samples.owners)
        positions = _concatenate_ranges(sizes) / sizes[samples.owners]
        samples_by_split.append(samples.select(np.argsort(positions, kind="stable")))
    return form, packs, samples_by_split


def _find_records(
    bounds: np.ndarray, split_long: bool, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts, lengths) of one part per document. If `split_long` is set, a document with
    more than `seq_len` input tokens has several parts."""
    starts = bounds[:-1]
    lengths = np.diff(bounds) - 1
    if split_long:
        counts = -(-lengths // seq_len)
        offsets = _concatenate_ranges(counts) * seq_len
        starts = np.repeat(starts, counts) + offsets
        lengths = np.repeat(lengths, counts) - offsets
    is_nonempty = lengths > 0
    return starts[is_nonempty], lengths[is_nonempty]


def count_targets(mask: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return, for each part, the number of targets that are in the loss, int64 [num_parts].

    The targets of part i are the tokens `starts[i] + 1` to `starts[i] + lengths[i]`, and `mask` is
    True for tokens in the loss. Each part must have at least one target, and `starts` must be in
    ascending order."""
    edges = np.stack([starts + 1, starts + lengths + 1], axis=1).ravel()
    padded = np.append(mask, False)  # The last part may end at the end of the mask.
    return np.add.reduceat(padded, edges, dtype=np.int64)[::2]


def _concatenate_ranges(counts: np.ndarray) -> np.ndarray:
    """Return one array that contains `0, ..., counts[0] - 1`, then `0, ..., counts[1] - 1`, and so
    on."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _running_sum(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the cumulative sum of `values` within each row. `rows` must be in ascending order."""
    sums = np.cumsum(values)
    row_starts = np.searchsorted(rows, rows)  # first index with the same row
    return sums - (sums[row_starts] - values[row_starts])


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Sampler that chooses the samples of each step as a pure function of the seed and the step.

    Layouts with the same global batch size choose the same samples. Every rank computes the order
    of all samples and takes its share."""

    num_samples: int
    global_batch_size: int  # sequences per optimizer step, over all replicas
    micro_batch_size: int  # sequences in one forward pass of one replica
    num_microbatches: int  # per replica per optimizer step
    num_replicas: int
    replica: int  # index of this rank's replica, equal within a tensor or pipeline group
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch. Each sample is used once per epoch, so the batch of the last
        step may be incomplete."""
        return math.ceil(self.num_samples / self.global_batch_size)

    def step_indices(self, step: int) -> np.ndarray:
        """Return the indices of a step's samples, int64 [num_microbatches, num_replicas,
        micro_batch_size]. The indices are the same on every rank. The last step of an epoch is
        padded with NO_SAMPLE."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = _order(self.seed, epoch, self.num_samples)
        first = position * self.global_batch_size
        shape = (self.num_microbatches, self.num_replicas, self.micro_batch_size)
        return _pad_to_shape(order[first : first + self.global_batch_size], shape)

    def step_batch(self, samples: Samples, step: int) -> StepBatch:
        """Return this replica's micro-batches of optimizer step `step` (0-based)."""
        indices = self.step_indices(step)
        scale = samples.scale_likelihood(indices.ravel())
        micro_batches = [samples.batch(rows, scale) for rows in indices[:, self.replica]]
        num_targets, num_tokens = samples.count(indices.ravel())
        return StepBatch(micro_batches, num_targets, num_tokens)

    def count_max_documents(self, samples: Samples, num_steps: int) -> int:
        """Return the largest number of documents in a micro-batch of packed `samples`, over all
        replicas and all epochs that begin within the first `num_steps` steps. Padding counts as one
        document per sample."""
        counts = np.append(samples.count_documents(), 1)  # the last entry is for NO_SAMPLE
        max_count = 0
        for epoch in range(math.ceil(num_steps / self.steps_per_epoch)):
            order = _order(self.seed, epoch, self.num_samples)
            num_micro_batches = self.steps_per_epoch * self.num_microbatches * self.num_replicas
            micro_batches = _pad_to_shape(order, (num_micro_batches, self.micro_batch_size))
            max_count = max(max_count, int(counts[micro_batches].sum(axis=1).max()))
        return max_count

    def eval_indices(self, num_samples: int) -> np.ndarray:
        """Return the sample indices of this replica's micro-batches for one pass over `num_samples`
        samples in order.

        The result is int64 [num_calls, micro_batch_size]. It is padded with NO_SAMPLE, so that
        every replica has the same number of micro-batches."""
        num_calls = math.ceil(num_samples / (self.num_replicas * self.micro_batch_size))
        shape = (num_calls, self.num_replicas, self.micro_batch_size)
        return _pad_to_shape(np.arange(num_samples), shape)[:, self.replica]


@functools.lru_cache(maxsize=1)  # With millions of samples, a permutation takes longer than a step.
def _order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def _pad_to_shape(indices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    num_missing = math.prod(shape) - len(indices)
    return np.pad(indices, (0, num_missing), constant_values=NO_SAMPLE).reshape(shape)
