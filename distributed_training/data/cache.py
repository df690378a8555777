"""Tokenize text once and cache the ids in files that every process memory-maps. This module does
not import torch.

Each folder in the cache is named after a hash of everything that determines its contents: the text,
the tokenizer, and whether running text is read line by line. While a folder is being filled, its
name begins with .writing-."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from distributed_training.data.chats.prepare import SPECIAL, UNKNOWN, Counts, read_pieces
from distributed_training.data.corpus import Corpus, Source, count_corpus_bytes, fingerprint
from distributed_training.data.files import sha256_of
from distributed_training.data.pieces import MESSAGES, PROMPT, RUNNING, TEXT, Piece
from distributed_training.data.text_bytes import count_bytes
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.cache import private_folder
from distributed_training.settings.config import Config
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import atomic_folder, plural

_VERSION = 22
_META_FILE = "meta.json"
_BYTES_FILE = "bytes.npy"  # number of bytes of text that each token represents
_BATCH_CHARACTERS = 2**21  # characters per batch, which all cores tokenize together


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    config: Config,
    cache_dir: Path,
    *,
    embedding_rows: int = 2**31,
) -> Path:
    """Return the folder in `cache_dir` that contains the ids of `corpus`. If the folder does not
    exist or is damaged, tokenize the corpus first.

    If several processes call this function, one process fills the folder and the others wait.
    Raises UserError if the text cannot be read. Also raises
    UserError if the tokenizer has more than `embedding_rows` tokens, the number of rows in the
    model's embedding."""
    folder = cache_folder(corpus, tokenizer, config, cache_dir)
    is_cached = is_intact(folder)
    if is_cached:
        tokenizer.restore_facts(read_meta(folder)["tokenizer"])
    tokenizer.facts.check_rows(embedding_rows, config.model)
    if not is_cached:  # A complete cache may be read-only, so do not lock it.
        with FileLock(f"{folder}.lock"):
            if not is_intact(folder):
                with atomic_folder(folder) as unfinished:
                    _fill(unfinished, corpus, tokenizer, config)
    return folder


def cache_folder(corpus: Corpus, tokenizer: Tokenizer, config: Config, cache_dir: Path) -> Path:
    """Return the folder in `cache_dir` for the ids of `corpus`, whether or not it exists. This
    function reads all text."""
    by_line = config.pack is False
    settings = [_VERSION, fingerprint(corpus), tokenizer.fingerprint, by_line]
    return cache_dir / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]


def token_cache_dir() -> Path:
    """Return this user's folder for cached tokens. The folder is private because other users could
    replace the tokens in a shared folder. Raises UserError if the folder cannot be used."""
    return private_folder("tokens")


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the metadata of a complete folder: the form of the text, facts about the tokenizer
    and, for each split, the array dtypes, the `Counts` and the first id of each dataset. Also the
    SHA-256 of the tokens, including their division into splits."""
    return json.loads((folder / _META_FILE).read_bytes())


def load_bytes(folder: Path) -> np.ndarray:
    """Return the number of UTF-8 bytes of text that each token id represents, int32 [num_tokens].
    `text_bytes.count_bytes` computes these numbers."""
    return np.load(folder / _BYTES_FILE)


def is_intact(folder: Path) -> bool:
    """Return whether a cache folder is complete and its tokens are unchanged. This function reads
    all tokens."""
    try:
        return bool(read_meta(folder)["sha256"] == _digest(folder))
    except (OSError, ValueError, KeyError):  # a file is missing, or meta.json is damaged
        return False


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.bin")):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with open(file, "rb") as stream:
            digest.update(sha256_of(stream))
    return digest.hexdigest()


def load_tokens(folder: Path) -> tuple[str, list[dict[str, np.ndarray]]]:
    """Return (form of the text, splits) from a complete folder. Each split is a dictionary with

    - `ids`: the ids of all documents, concatenated, including special tokens;
    - `starts`: the index of the first id of each document, followed by the total number of ids,
      int64 [num_documents + 1];
    - `firsts`: the same for each dataset, int64 [num_datasets + 1];
    - `loss_mask`: whether each id is in the loss. This key is absent if all ids are in the loss."""
    meta = read_meta(folder)
    splits = []
    for split, dtypes in meta["splits"].items():
        arrays = {"firsts": np.array(meta["firsts"][split])}
        for name, dtype in dtypes.items():
            arrays[name] = np.empty(0, dtype)
            file = folder / f"{split}-{name}.bin"
            if file.exists():  # A split without text has no file.
                arrays[name] = np.memmap(file, dtype, "r")
        splits.append(arrays)
    return meta["form"], splits


def _fill(folder: Path, corpus: Corpus, tokenizer: Tokenizer, config: Config) -> None:
    """Tokenize a corpus into an empty cache folder. Raises UserError if there is no text to train
    on."""
    tokenizer.check_splits()
    splits, firsts = {}, {}
    counts = {split: Counts() for split in corpus}
    with tqdm(
        desc="tokenizing",
        total=count_corpus_bytes(corpus),
        leave=False,
        disable=None,
        bar_format="{l_bar}{bar:20}| {elapsed}<{remaining}{postfix}",
    ) as bar:
        for split, sources in corpus.items():
            splits[split], firsts[split] = _write_split(
                folder / split, sources, tokenizer, counts[split], bar, by_line=config.pack is False
            )
    train = counts["train"]
    if firsts["train"][-1] == 0:
        reasons = ", ".join([*train.left_out, *train.notes])
        why = f"{plural(train.records, 'record')} left out: {reasons}" if reasons else ""
        raise UserError(f"dataset={config.dataset!r} contains no text", why)
    meta = {
        "form": next((form for form in (MESSAGES, PROMPT, TEXT) if form in train.forms), RUNNING),
        "splits": splits,
        "firsts": firsts,
        "tokenizer": asdict(tokenizer.facts),
        "counts": {split: vars(split_counts) for split, split_counts in counts.items()},
        "sha256": _digest(folder),
    }
    (folder / _META_FILE).write_text(json.dumps(meta))
    np.save(folder / _BYTES_FILE, count_bytes(tokenizer))


def _write_split(
    prefix: Path,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    counts: Counts,
    bar: tqdm,
    *,
    by_line: bool,
) -> tuple[dict[str, str], list[int]]:
    """Tokenize the sources of a split into files whose names begin with `prefix`. Return (dtype of
    each array, index of the first id of each source, followed by the number of ids)."""
    dtypes = {"ids": "uint16" if tokenizer.num_tokens <= 2**16 else "int32", "starts": "int64"}
    if sources[0].columns is not None:
        dtypes["loss_mask"] = "bool"
    Path(f"{prefix}-starts.bin").write_bytes(bytes(8))
    num_ids = 0
    firsts = [0]
    for source in sources:
        pieces = read_pieces(source, tokenizer, by_line=by_line, counts=counts)
        for arrays in _tokenize_split(pieces, tokenizer, counts, bar):
            arrays["starts"] += num_ids
            num_ids += len(arrays["ids"])
            bar.set_postfix_str(f"{counts.records:,} records", refresh=False)
            for name, dtype in dtypes.items():
                with open(f"{prefix}-{name}.bin", "ab") as file:
                    file.write(arrays[name].astype(dtype).tobytes())
        firsts.append(num_ids)
    if counts.forms.keys() == {TEXT}:
        Path(f"{prefix}-loss_mask.bin").unlink(missing_ok=True)
        del dtypes["loss_mask"]
    return dtypes, firsts


def _tokenize_split(
    pieces: Iterator[Piece], tokenizer: Tokenizer, counts: Counts, bar: tqdm
) -> Iterator[dict[str, np.ndarray]]:
    """Yield dictionaries of arrays to append to the files of a split: `ids` and `loss_mask` as in
    `load_tokens`, and in `starts` the end of each document, counted from the first of these
    ids."""
    unknown_id = tokenizer.unknown_id
    is_special = np.zeros(tokenizer.num_tokens, bool)
    is_special[tokenizer.special_ids[tokenizer.special_ids != unknown_id]] = True
    prefix, suffix = tokenizer.added_ids
    begins = True  # whether the next piece is the first one of a document
    num_special = num_unknown = 0  # special and unknown tokens in the text of the document so far
    for batch in iter(partial(_take_batch, pieces), []):
        rows = []
        masks = []
        for piece, (row, mask) in zip(batch, tokenizer.encode_pieces(batch), strict=True):
            if begins:
                num_special = num_unknown = 0
            num_special += int(is_special[row].sum())
            num_unknown += int((row == unknown_id).sum())
            if begins and not piece.templated:
                row = np.append(prefix, row)
                mask = np.append(np.zeros(len(prefix), bool), mask)
            if piece.ends and num_unknown:
                counts.notes[UNKNOWN] += 1
            if piece.ends and not piece.templated:
                if num_special:
                    counts.notes[SPECIAL] += 1
                # An added end belongs to an answer that ends the text.
                row = np.append(row, suffix)
                mask = np.append(mask, np.full(len(suffix), mask[-1:].any()))
                if len(row) == 0 or row[-1] != tokenizer.eos_id:
                    row = np.append(row, tokenizer.eos_id)
                    mask = np.append(mask, True)
            begins = piece.ends
            rows.append(row)
            masks.append(mask)
        ends = np.cumsum([len(row) for row in rows])
        yield {
            "ids": np.concatenate(rows),
            "starts": ends[[piece.ends for piece in batch]],
            "loss_mask": np.concatenate(masks),
        }
        bar.update(sum(len(piece.text) for piece in batch))


def _take_batch(pieces: Iterator[Piece]) -> list[Piece]:
    batch = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 64  # Each piece has a fixed cost.
        if size > _BATCH_CHARACTERS:
            break
    return batch
