"""Token ids on disk: each corpus is tokenised once, whatever is cut from it later."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from distributed_training.data.corpus import Corpus
from distributed_training.data.tokenizer import Tokenizer

_VERSION = 1
logger = logging.getLogger(__name__)


def cache_key(corpus: Corpus, tokenizer: Tokenizer, pack: bool) -> str:
    """Name of the cache folder: a hash of everything that decides the ids in it."""
    settings = [_VERSION, corpus.fingerprint, tokenizer.fingerprint, pack]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]


def load_split(folder: Path, split: str) -> list[np.ndarray]:
    """[ids of all texts in a row, mapped from disk; where each text starts, and the end].

    Raises OSError naming the file that is missing or truncated.
    """
    arrays = []
    for file in _files(folder, split):
        try:
            arrays.append(np.load(file, mmap_mode="r"))
        except (OSError, ValueError, EOFError) as error:
            raise OSError(f"{file}: {error}") from None
    return arrays


def tokenise_once(corpus: Corpus, tokenizer: Tokenizer, pack: bool, folder: Path) -> None:
    """Fill `folder` unless it is complete; of several processes one works and the others wait."""
    from filelock import FileLock

    wanted = {"train": corpus.train}
    if corpus.validation is not None:
        wanted["validation"] = corpus.validation
    if _is_complete(folder, wanted):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if _is_complete(folder, wanted):
            return
        megabytes = sum(len(text) for text in corpus.train) / 1e6
        logger.info("Tokenising %s (%.1f MB of text), once ...", corpus.name, megabytes)
        with TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as building:
            for split, texts in wanted.items():
                arrays = _concatenate(tokenizer, _units(corpus, texts, pack))
                for file, array in zip(_files(Path(building), split), arrays, strict=True):
                    np.save(file, array)
            shutil.rmtree(folder, ignore_errors=True)  # exists only if it was damaged
            os.replace(building, folder)  # so that a cache is never half written


def _files(folder: Path, split: str) -> list[Path]:
    return [folder / f"{split}-{part}.npy" for part in ("tokens", "starts")]


def _is_complete(folder: Path, splits: Iterable[str]) -> bool:
    try:
        for split in splits:
            load_split(folder, split)
    except OSError as error:
        if folder.is_dir():
            logger.warning("rebuilding the token cache, which cannot be read: %s", error)
        return False
    return True


def _units(corpus: Corpus, texts: list[str], pack: bool) -> list[str]:
    """Documents when packing; else one text a sample: a record, or a line that is not blank."""
    if pack or corpus.records:
        return texts
    return [line for text in texts for line in text.splitlines() if line.strip()]


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
