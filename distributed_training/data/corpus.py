"""Where text comes from: local files, WikiText-2, or Python's own sources. No torch import."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distributed_training.data import hub
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import user_path

EMBEDDED = "embedded"
WIKITEXT = "wikitext-2"
# Standard library folders that hold tests, vendored code or generated tables, not prose or code.
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
_SKIPPED |= {"ensurepip", "encodings", "pydoc_data", "turtledemo"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Texts with their split. `validation` is None when the source has no split of its own."""

    name: str
    train: list[str]
    validation: list[str] | None
    records: bool  # whether a text is one sample (a .jsonl record); otherwise each line is one

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all texts and the split: equal corpora have equal fingerprints."""
        digest = hashlib.sha256(b"records" if self.records else b"lines")
        for part in (self.train, self.validation or []):
            digest.update(b"\0part\0")
            for text in part:
                data = text.encode()
                digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


def read_corpus(dataset: str) -> Corpus:
    """Read a resolved `dataset`: "embedded", "wikitext-2" or a path. Raises UserError for a path
    that is missing, empty, not UTF-8 or of an unsupported kind."""
    if dataset == EMBEDDED:
        return Corpus(name=EMBEDDED, train=read_embedded(), validation=None, records=False)
    if dataset == WIKITEXT:
        try:
            parquet = hub.fetch_wikitext()
        except OSError as error:
            raise hub.cannot_fetch("dataset", WIKITEXT, error, hub.WIKITEXT_COMMAND) from None
        splits = {split: _read_wikitext(path) for split, path in parquet.items()}
        return Corpus(name=WIKITEXT, records=False, **splits)
    path = user_path("dataset", dataset)
    what = f"dataset={str(path)!r}"
    if not path.exists():
        fix = 'give a .txt or .jsonl file, a folder of them, "auto", "wikitext-2" or "embedded"'
        raise UserError(f"{what} does not exist", fix=fix)
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".jsonl"))
    kinds = ", ".join(sorted({file.suffix or "a file without an extension" for file in files}))
    if kinds not in (".txt", ".jsonl"):
        why = f"found {kinds or 'no .txt or .jsonl file'}"
        raise UserError(f"{what} cannot be read", why, "give .txt files or .jsonl files, not both")
    read = _read_records if kinds == ".jsonl" else lambda file: [_read_text(file)]
    texts = [text for file in files for text in read(file) if text.strip()]
    if not texts:
        raise UserError(f"{what} contains no text")
    return Corpus(name=str(path), train=texts, validation=None, records=kinds == ".jsonl")


def read_embedded() -> list[str]:
    """The standard library's sources and its pydoc topics, in an order fixed by their names."""
    root = Path(sysconfig.get_path("stdlib"))
    topics = importlib.import_module("pydoc_data.topics").topics
    texts = {f"topic/{name}": text for name, text in topics.items()}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not _SKIPPED.intersection(parts) and not any(p.startswith("config-") for p in parts):
            texts["/".join(parts)] = path.read_text(encoding="utf-8", errors="replace")
    # Ordered by a hash of the name, so that the held-out end is not all of one kind.
    names = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [texts[name] for name in names if texts[name].strip()]


def _read_wikitext(path: Path) -> list[str]:
    """Articles of one split: WikiText stores one line per row."""
    import pyarrow.parquet

    try:
        rows: list[str] = pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not WikiText's parquet file", str(error)) from None
    return split_articles(rows)


def split_articles(rows: Iterable[str]) -> list[str]:
    """Join rows into articles at level-one headings (` = Title = `, not ` = = Section = = `)."""
    articles = re.split(r"(?m)^(?= *= [^=\n].* = *$)", "".join(rows))
    return [text for text in articles if text.strip()]


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what, fix = f"dataset file {path} cannot be read", "give UTF-8 text; iconv converts other"
        raise UserError(what, str(error), fix) from None


def _read_records(path: Path) -> list[str]:
    """The "text" of each line of a .jsonl file."""
    texts = []
    # Not splitlines(): a line separator such as U+2028 may occur inside a JSON string.
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            where = f"{path} line {number} column {error.colno}"
            raise UserError(f"{where} is not JSON", error.msg) from None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise UserError(f'{path} line {number} has no "text" string', fix='{"text": "..."}')
        texts.append(record["text"])
    return texts
