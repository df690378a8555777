"""Take a small sample of a large text, to estimate how many training samples the text has. This
module does not import torch."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from distributed_training.data.corpus import Corpus, count_corpus_bytes

NUM_CHUNKS = 64
CHUNK_BYTES = 2**14
MAX_LINE_BYTES = 2**24
MIN_ERROR = 0.05  # smallest uncertainty that is stated
SUFFIXES = (".txt", ".md", ".jsonl")  # files that can be read from any line


def sample_corpus(corpus: Corpus, folder: Path) -> tuple[Corpus, float, float] | None:
    """Write evenly spaced chunks of the training text to `folder`. Return (corpus of the chunks,
    size of the text relative to the chunks, relative uncertainty of the number of samples). A
    validation split consists of the same chunks. Return None if the files cannot be read from the
    middle, or have no lines there."""
    train = corpus["train"]
    files = [file for source in train for file in source.files]
    if any(file.suffix not in SUFFIXES for file in files):
        return None
    chunks = _write_chunks(files, folder) if files else []
    if files and len(chunks) < 2:  # the text is one long line
        return None
    error = MIN_ERROR
    lines = [chunk.read_bytes() for _, chunk in chunks if chunk.suffix == ".jsonl"]
    if lines:
        densities = [text.count(b"\n") / len(text) for text in lines]
        spread = np.std(densities, ddof=1) / np.mean(densities)
        error = max(error, float(2 * spread / math.sqrt(len(lines))))
    sources = [
        replace(
            source,
            files=[chunk for file, chunk in chunks if file in source.files],
            texts=source.texts[:: len(source.texts) // 64 + 1],
        )
        for source in train
    ]
    sizes = [count_corpus_bytes({"train": part}) for part in (train, sources)]
    return dict.fromkeys(corpus, sources), sizes[0] / sizes[1], error


def _write_chunks(files: Sequence[Path], folder: Path) -> list[tuple[Path, Path]]:
    """Write whole lines from NUM_CHUNKS evenly spaced positions in the concatenated files to
    `folder`. Return (file, file of the chunk) for each chunk."""
    ends = np.cumsum([file.stat().st_size for file in files])
    chunks = []
    for number in range(NUM_CHUNKS):
        position = (2 * number + 1) * ends[-1] // (2 * NUM_CHUNKS)
        index = np.searchsorted(ends, position, "right")
        with open(files[index], "rb") as file:
            file.seek(position - ends[index], os.SEEK_END)
            file.readline(MAX_LINE_BYTES)
            text = file.read(CHUNK_BYTES) + file.readline(MAX_LINE_BYTES)
        if text:
            chunk = folder / f"{number}{files[index].suffix}"
            chunk.write_bytes(text)
            chunks.append((files[index], chunk))
    return chunks
