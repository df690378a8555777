"""Take a small sample of a large text, to estimate how many training samples the text has. This
module does not import torch."""

import codecs
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from distributed_training.data.corpus import Corpus, count_corpus_bytes
from distributed_training.data.files import open_file

SAMPLE_BYTES = 2**21
ERROR = 0.05  # relative uncertainty of the number of samples, with a few thousand lines
SUFFIXES = (".txt", ".md", ".jsonl")  # files with lines of text


def sample_corpus(
    corpus: Corpus,
    folder: Path,
) -> tuple[Corpus, float] | None:
    """Write evenly spaced lines of the training text to `folder`. Return (corpus of these lines,
    size of the text relative to the lines). A validation split consists of the same lines. Return
    None if the files do not consist of many lines."""
    train = corpus["train"]
    num_bytes = count_corpus_bytes({"train": train})
    step = num_bytes // SAMPLE_BYTES + 1
    sources = []
    for index, source in enumerate(train):
        sample = replace(source, texts=source.texts[::step])
        if source.files:
            if any(file.suffix not in SUFFIXES for file in source.files):
                return None
            file = folder / f"{index}{source.files[0].suffix}"
            lines = itertools.islice(_read_lines(source.files), 0, None, step)
            file.write_bytes(b"\n".join(lines))
            sample = replace(sample, files=[file])
        sources.append(sample)
    scale = num_bytes / count_corpus_bytes({"train": sources})
    if scale < 2:  # most of the text is in a few long lines
        return None
    return dict.fromkeys(corpus, sources), scale


def _read_lines(files: Sequence[Path]) -> Iterator[bytes]:
    for file in files:
        with open_file(file) as lines:
            for line in lines:
                yield line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")
