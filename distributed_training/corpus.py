"""Where text comes from: local files, WikiText-2, or what every Python carries. No torch import."""

from __future__ import annotations

import hashlib
import importlib
import json
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distributed_training.errors import UserError
from distributed_training.files import check_unicode, parse_json, user_path

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
    records: bool
    """Whether a text is one sample (a .jsonl record); otherwise each line is one."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all texts and the split: equal corpora have equal fingerprints."""
        digest = hashlib.sha256(b"records" if self.records else b"lines")
        for part in (self.train, self.validation or []):
            digest.update(b"\0part\0")
            for text in part:
                data = text.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


def read_corpus(dataset: str) -> Corpus:
    """Read a resolved `dataset`: "embedded", "wikitext-2" (from the Hub's cache) or a path.

    Raises UserError for a path that is missing, empty, not UTF-8 or not understood.
    """
    if dataset == EMBEDDED:
        return Corpus(name=EMBEDDED, train=read_embedded(), validation=None, records=False)
    if dataset == WIKITEXT:
        from distributed_training import hub

        try:
            files = hub.fetch_wikitext()
        except OSError as error:
            raise hub.cannot_fetch("dataset", WIKITEXT, error, hub.WIKITEXT_COMMANDS) from None
        splits = {split: _read_wikitext(path) for split, path in files.items()}
        return Corpus(name=WIKITEXT, records=False, **splits)
    return _read_path(user_path("dataset", dataset))


def read_embedded() -> list[str]:
    """The standard library's sources and its pydoc topics, in an order fixed by their names."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not _SKIPPED.intersection(parts) and not any(p.startswith("config-") for p in parts):
            texts["/".join(parts)] = path.read_text(encoding="utf-8", errors="replace")
    topics = importlib.import_module("pydoc_data.topics").topics
    texts.update({f"topic/{name}": text for name, text in topics.items()})
    # Mixed by a hash of the name, so that the held-out end is not all of one kind.
    return [
        texts[name]
        for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
        if texts[name].strip()
    ]


def _read_wikitext(path: Path) -> list[str]:
    """Articles: WikiText stores one line a row; a line ` = Title = ` begins an article."""
    import pyarrow.parquet

    try:
        rows: list[str] = pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not WikiText's parquet file", str(error)) from None
    return split_articles(rows)


def split_articles(rows: Iterable[str]) -> list[str]:
    """Join rows into articles at level-one headings (` = Title = `, not ` = = Section = = `)."""
    articles: list[list[str]] = [[]]
    for row in rows:
        heading = row.strip()
        level_one = heading.startswith("= ") and heading.endswith(" =")
        if level_one and not heading.startswith("= ="):
            articles.append([])
        articles[-1].append(row)
    return [text for text in ("".join(article) for article in articles) if text.strip()]


def _read_path(path: Path) -> Corpus:
    if not path.exists():
        raise UserError(
            f"dataset={str(path)!r} does not exist",
            fix="give a .txt or .jsonl file or a folder of them, or one of "
            '"auto", "wikitext-2", "embedded"',
        )
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl"))
        if not files:
            raise UserError(f"dataset={str(path)!r} holds no .txt or .jsonl file")
    else:
        files = [path]
    kinds = {file.suffix for file in files}
    if kinds not in ({".txt"}, {".jsonl"}):
        raise UserError(
            f"dataset={str(path)!r} is not understood",
            f"found {', '.join(sorted(kind or 'no ending' for kind in kinds))}",
            "give .txt files or .jsonl files, not both",
        )
    records = kinds == {".jsonl"}
    texts = [text for file in files for text in (_records(file) if records else [_decode(file)])]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError(f"dataset={str(path)!r} holds no text", fix="give a file with text in it")
    return Corpus(name=str(path), train=texts, validation=None, records=records)


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"dataset file {path} is not UTF-8",
            f"byte {error.start} is 0x{error.object[error.start]:02x}",
            f"convert it: iconv -t UTF-8 {path}",
        ) from None
    except OSError as error:
        raise UserError(f"dataset file {path} cannot be read", str(error)) from None


def _records(path: Path) -> list[str]:
    """The "text" of each line of a .jsonl file."""
    texts = []
    # Not splitlines(): a line separator such as U+2028 may stand inside a JSON string.
    for number, line in enumerate(_decode(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path} line {number} column {error.colno} is not JSON", error.msg
            ) from None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise UserError(f'{path} line {number} has no "text" string', fix='{"text": "..."}')
        check_unicode(f"{path} line {number}", record["text"])
        texts.append(record["text"])
    return texts
