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
from filelock import FileLock

from distributed_training.data.corpus import Corpus
from distributed_training.data.tokenizer import Tokenizer

_VERSION = 1
_PARTS = ("tokens", "starts")
logger = logging.getLogger(__name__)


def load_split(folder: Path, split: str) -> list[np.ndarray]:
    """[ids of all texts in a row, mapped from disk; where each text starts, and the end]."""
    return [np.load(folder / f"{split}-{part}.npy", mmap_mode="r") for part in _PARTS]


def tokenise_once(corpus: Corpus, tokenizer: Tokenizer, pack: bool, cache_dir: Path) -> Path:
    """The folder below `cache_dir` with the ids of `corpus`, named by a hash of all that decides
    them; of several processes one fills it and the others wait."""
    settings = [_VERSION, corpus.fingerprint, tokenizer.fingerprint, pack]
    folder = cache_dir / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
    wanted = {"train": corpus.train}
    if corpus.validation is not None:
        wanted["validation"] = corpus.validation
    if _is_complete(folder, wanted):
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if _is_complete(folder, wanted):
            return folder
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


def _is_complete(folder: Path, splits: Iterable[str]) -> bool:
    try:
        for split in splits:
            load_split(folder, split)
    except (OSError, ValueError, EOFError) as error:
        if folder.is_dir():
            logger.warning("rebuilding the token cache %s, which cannot be read: %s", folder, error)
        return False
    return True


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
