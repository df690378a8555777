"""Texts -> token ids on disk, once, in little memory; every process maps them. No torch import.
A folder of the cache is named by a hash of all that decides its contents: the texts, the tokenizer,
and whether a text or a line is a sample. While it is filled it is called <name>.partial."""

import hashlib
import itertools
import json
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from distributed_training.data.chats.prepare import SPECIAL, Counts, check_records, read_pieces
from distributed_training.data.corpus import Corpus, Source, fingerprint
from distributed_training.data.pieces import ANSWERS, RUNNING, Piece
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.cache import CACHE, private_folder
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import open_regular, publish, read_small
from distributed_training.settings.machine import available_cpus

_VERSION = 9
_META = "meta.json"
_BYTES = "bytes.npy"  # of text that each token stands for
_CHECKSUM = "sha256"  # of all other files
_BATCH = 2**21  # characters that are tokenised at a time, spread over all cores
_AHEAD = 2  # batches in work while one is written
_READ = 16 * 2**20  # bytes that are read at a time
_LONG = 20_000_000  # bytes that are worth a line
_THREADS = 64  # of the tokenizer at most; with so many it takes 0.7 GiB
logger = logging.getLogger(__name__)


def tokenise(
    corpus: Corpus, tokenizer: Tokenizer, config: RunConfig, cache_dir: Path, *, rows: int = 2**31
) -> Path:
    """The folder below `cache_dir` with the ids of `corpus`; of several processes one fills it and
    the others wait. Raises UserError for texts that cannot be read, a disk that is full, or a
    tokenizer with more tokens than a model has `rows` for."""
    by_line = config.pack is False
    settings = [_VERSION, fingerprint(corpus), tokenizer.fingerprint, by_line]
    folder = cache_dir / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
    if not is_whole(folder):  # a cache that is there may be read-only
        tokenizer.facts.check_rows(rows, config.model)
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not is_whole(folder):
                    if folder.is_dir():
                        logger.warning("rebuilding the token cache %s, which is damaged", folder)
                    _fill(folder, corpus, tokenizer, config)
        except OSError as error:
            what = f"the token cache {cache_dir} cannot be written"
            raise UserError(what, str(error), f"set {CACHE} to another folder") from None
    tokenizer.recall(read_meta(folder)["tokenizer"])
    tokenizer.facts.check_rows(rows, config.model)
    return folder


def token_cache() -> Path:
    """Return this user's folder of token caches. In a run's output_dir others could put tokens that
    are not of the text. Raises UserError if it cannot be used."""
    folder, why = private_folder("tokens")
    if why:
        fix = f"set {CACHE} to a folder of your own"
        raise UserError(f"the token cache {folder} cannot be used", why, fix)
    return folder


def read_meta(folder: Path) -> dict[str, Any]:
    """What is said about the tokens in a folder that is whole: `form`, `splits`, `counts` of each
    split (see Counts), and `tokenizer` (see Facts)."""
    return json.loads((folder / _META).read_bytes())


def load_bytes(folder: Path) -> np.ndarray:
    """Bytes of text that each token stands for, as in data/text_bytes.py."""
    return np.load(folder / _BYTES)


def is_whole(folder: Path) -> bool:
    """Whether a folder of the cache is there, as it was written."""
    try:
        return read_small(folder / _CHECKSUM) == _checksum(folder)
    except OSError:
        return False


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of the tokens in a folder that is whole, and of how they are split."""
    return (folder / _CHECKSUM).read_text().splitlines()[0]


def _checksum(folder: Path) -> bytes:
    """Return two lines: the SHA-256 of the tokens, and that of what is known about them."""
    tokens = hashlib.sha256()
    for file in sorted(folder.glob("*.bin")):
        tokens.update(f"{file.name} {file.stat().st_size} ".encode())
        with open_regular(file) as stream:
            while chunk := stream.read(_READ):
                tokens.update(chunk)
    about = hashlib.sha256(read_small(folder / _META))
    about.update(read_small(folder / _BYTES))
    return f"{tokens.hexdigest()}\n{about.hexdigest()}\n".encode()


def load_tokens(folder: Path) -> tuple[str, list[dict[str, np.ndarray]]]:
    """(form of the texts, splits) of a folder that is whole. A split has `ids` of all texts in a
    row, end-of-text after each; `starts` of texts, and the end, int64 [num_texts + 1]; and
    `loss_mask`, whether each id is learnt, where not all are."""
    meta = read_meta(folder)
    splits: list[dict[str, np.ndarray]] = []
    for split, dtypes in meta["splits"].items():
        splits.append({})
        for part, dtype in dtypes.items():
            file = folder / f"{split}-{part}.bin"
            there = file.exists()  # not where a split has no text
            splits[-1][part] = np.memmap(file, dtype, "r") if there else np.empty(0, dtype)
    return meta["form"], splits


def _fill(folder: Path, corpus: Corpus, tokenizer: Tokenizer, config: RunConfig) -> None:
    num_bytes = sum(source.num_bytes for source in corpus.values())
    os.environ.setdefault("RAYON_NUM_THREADS", str(min(_THREADS, available_cpus())))
    if num_bytes > _LONG:
        print(f"tokenising {config.dataset}, {num_bytes / 1e6:.0f} MB, once", file=sys.stderr)
    by_line = config.pack is False
    # All is parsed before anything is tokenised, which takes much longer.
    counts = {split: Counts() for split in corpus}
    sizes = [
        _measure(source, tokenizer, by_line, found)
        for source, found in zip(corpus.values(), counts.values(), strict=True)
    ]
    if not sizes[0]:
        found = counts["train"]
        reasons = ", ".join(found.left_out)
        why = f"all {found.records:,} records are left out: {reasons}" if reasons else ""
        raise UserError(f"dataset={config.dataset!r} contains no text to train on", why)
    building = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
    building.mkdir()
    ids_dtype = "uint16" if tokenizer.num_tokens <= 2**16 else "int32"
    splits = {}
    counts = {split: Counts() for split in corpus}
    with tqdm(
        desc="tokenising", total=sum(sizes), unit="B", unit_scale=True, disable=None, leave=False
    ) as bar:
        for split, source in corpus.items():
            dtypes = {"ids": ids_dtype, "starts": "int64"}
            if source.form in ANSWERS:
                dtypes["loss_mask"] = "bool"
            splits[split] = dtypes
            read = read_pieces(source, tokenizer, by_line=by_line, counts=counts[split])
            for arrays in _tokenise_split(read, tokenizer, counts[split], bar):
                for part in dtypes.keys() & arrays.keys():
                    with open(building / f"{split}-{part}.bin", "ab") as file:
                        file.write(arrays[part].astype(dtypes[part]).tobytes())
    meta = {
        "form": corpus["train"].form, "splits": splits, "tokenizer": asdict(tokenizer.facts),
        "counts": {split: found.as_dict() for split, found in counts.items()},
    }  # fmt: skip
    (building / _META).write_text(json.dumps(meta))
    np.save(building / _BYTES, tokenizer.count_bytes())
    (building / _CHECKSUM).write_bytes(_checksum(building))
    publish(building, folder)  # over one that was damaged, if any


def _measure(source: Source, tokenizer: Tokenizer, by_line: bool, counts: Counts) -> int:
    """Characters of a split, about. Raises UserError for what cannot be read."""
    if source.form == RUNNING:
        return sum(len(piece.text) for piece in source.read_texts(by_line=by_line))
    size = 0
    records = check_records(source, tokenizer, counts)
    for item in tqdm(records, "reading records", leave=False, unit_scale=True, disable=None):
        if isinstance(item, list):
            size += sum(len(piece.text) for piece in item)
        else:
            size += sum(len(str(message["content"])) for message in item[1].messages)
    return size


def _tokenise_split(
    pieces: Iterator[Piece], tokenizer: Tokenizer, counts: Counts, bar: tqdm
) -> Iterator[dict[str, np.ndarray]]:
    """What follows in each file of a split, by part; the next batches are in work meanwhile."""
    yield {"starts": np.zeros(1)}
    length = 0
    is_special = np.zeros(tokenizer.num_tokens, bool)
    is_special[tokenizer.special_ids] = True
    at_ends = sum(map(len, tokenizer.ends))
    marked = 0  # special tokens in the pieces of the text so far
    with ThreadPoolExecutor(_AHEAD) as pool:
        batches = iter(partial(_take_batch, pieces), [])
        work = ((batch, pool.submit(tokenizer.encode, batch)) for batch in batches)
        queue = deque(itertools.islice(work, _AHEAD))
        while queue:
            batch, future = queue.popleft()
            queue.extend(itertools.islice(work, 1))
            rows = []
            masks = []
            for piece, (row, mask) in zip(batch, future.result(), strict=True):
                if piece.eos:
                    marked = marked * (not piece.begins) + int(is_special[row].sum())
                    if piece.ends:
                        counts.notes[SPECIAL] += marked > at_ends
                if mask is None:
                    mask = np.ones(len(row), bool)
                if piece.eos and piece.ends and row[-1:] != [tokenizer.eos_id]:
                    row = np.append(row, tokenizer.eos_id)
                    mask = np.append(mask, True)
                rows.append(row)
                masks.append(mask)
            sizes = [len(row) for row in rows]
            ends = length + np.cumsum(sizes)
            length = ends[-1]
            yield {
                "ids": np.concatenate(rows),
                "starts": ends[[piece.ends for piece in batch]],
                "loss_mask": np.concatenate(masks),
            }
            bar.update(sum(len(piece.text) for piece in batch))


def _take_batch(pieces: Iterator[Piece]) -> list[Piece]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 64  # a short piece costs something, too
        if size > _BATCH:
            break
    return batch
