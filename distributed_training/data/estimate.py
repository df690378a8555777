"""Take a small sample of a large text, to estimate how many training samples the text has. This
module does not import torch."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distributed_training.data.corpus import Corpus
from distributed_training.data.files import encoding_of

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
    files = train.files
    if any(file.suffix not in SUFFIXES or encoding_of(file) == "utf-16" for file in files):
        return None
    source = replace(train, texts=train.texts[:: len(train.texts) // 64 + 1])
    error = MIN_ERROR
    if files:
        chunks = _read_chunks(files)
        if len(chunks) < 2:  # the text is one long line
            return None
        names = [folder / f"{number}{files[0].suffix}" for number in range(len(chunks))]
        for name, chunk in zip(names, chunks, strict=True):
            name.write_bytes(chunk)
        source = replace(train, files=names)
        if files[0].suffix == ".jsonl":
            densities = [chunk.count(b"\n") / len(chunk) for chunk in chunks]
            spread = statistics.stdev(densities) / statistics.fmean(densities)
            error = max(error, 2 * spread / math.sqrt(len(chunks)))
    return dict.fromkeys(corpus, source), train.num_bytes / source.num_bytes, error


def _read_chunks(files: Sequence[Path]) -> list[bytes]:
    """Return whole lines from NUM_CHUNKS evenly spaced positions in the concatenated files."""
    sizes = [file.stat().st_size for file in files]
    chunks = []
    for number in range(NUM_CHUNKS):
        offset = (2 * number + 1) * sum(sizes) // (2 * NUM_CHUNKS)
        index = 0
        while offset >= sizes[index]:
            offset -= sizes[index]
            index += 1
        with open(files[index], "rb") as file:
            file.seek(offset)
            file.readline(MAX_LINE_BYTES)
            chunks.append(file.read(CHUNK_BYTES) + file.readline(MAX_LINE_BYTES))
    return [chunk for chunk in chunks if chunk]
