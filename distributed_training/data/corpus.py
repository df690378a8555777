"""Where text comes from: local files, the Hub, or Python's own sources. No torch import."""

import hashlib
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from distributed_training.data import files as on_disk
from distributed_training.data import hub, pieces
from distributed_training.data.files import RECORD_KINDS, TEXT_KINDS
from distributed_training.data.pieces import RUNNING, ChatTemplate, Piece
from distributed_training.settings.errors import UserError

EMBEDDED = "embedded"
PROSE = "embedded-prose"
WIKITEXT = "wikitext-2"
_KINDS = (*TEXT_KINDS, *RECORD_KINDS)
# A paragraph from a capital letter to a full stop or colon, without code or grammar.
_SENTENCES = re.compile(r"(?!.*(?:::=|>>>|\*\*\*|===))[A-Z].{60,}[.:]")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?")
# Standard library folders that hold tests, vendored code or generated tables, not prose or code.
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
_SKIPPED |= {"ensurepip", "encodings", "pydoc_data", "turtledemo"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The texts of a split, in files that are read anew each time, or in memory."""

    form: str  # RUNNING, where a padded sample is a line; else that of the records
    files: Sequence[Path] = ()
    texts: Sequence[str] = ()

    @property
    def num_bytes(self) -> int:
        """About as long as the text is; Parquet is compressed."""
        return sum(file.stat().st_size for file in self.files) + sum(map(len, self.texts))

    def read(self, *, by_line: bool, chat: ChatTemplate | None = None) -> Iterator[Piece]:
        """What is tokenised, in its order; of running text, where asked, line by line, of questions
        and answers through the model's template."""
        if self.form == RUNNING:
            read = partial(on_disk.read_text, by_line=by_line)
            cut = pieces.cut_lines if by_line else pieces.cut_text
            in_memory = ([text] for text in self.texts)
            for parts in itertools.chain(map(read, self.files), in_memory):
                yield from cut(parts)
        else:
            for where, record in on_disk.read_records(*self.files):
                yield from pieces.cut_record(record, self.form, where, chat)

    def digest(self) -> str:
        """SHA-256 of form and contents."""
        digest = hashlib.sha256(self.form.encode())
        for file in self.files:
            own = hashlib.sha256()
            for block in on_disk.read_bytes(file):
                own.update(block)
            digest.update(own.digest())
        for text in self.texts:
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


# By split: "train", and "validation" where there is one of its own.
Corpus = dict[str, Source]


def fingerprint(corpus: Corpus) -> str:
    """SHA-256 over all contents and the split, for which all is read."""
    splits = ("train", "validation")
    digests = [corpus[split].digest() if split in corpus else "" for split in splits]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def read_corpus(dataset: str, validation: str | None = None) -> Corpus:
    """Find a resolved `dataset`, and another for validation; the texts are read later. Raises
    UserError for one that is missing, empty or of an unsupported kind."""
    corpus = _find_corpus(dataset, "dataset")
    if validation is not None:
        own = _find_corpus(validation, "validation_dataset")
        corpus["validation"] = own.get("validation", own["train"])
    return corpus


def _find_corpus(dataset: str, key: str) -> Corpus:
    what = f"{key}={dataset!r}"
    if dataset in (EMBEDDED, PROSE):
        texts = read_embedded() if dataset == EMBEDDED else read_prose()
        return {"train": Source(form=RUNNING, texts=texts)}
    if dataset == WIKITEXT:
        try:
            parquet = hub.fetch_wikitext()
        except OSError as error:
            raise hub.cannot_fetch(key, WIKITEXT, error, hub.WIKITEXT_COMMAND) from None
        corpus = {}
        for split, path in parquet.items():
            lines = "".join(row["text"] for _, row in on_disk.read_records(path))
            # An article begins at ` = Title = `.
            articles = re.split(r"(?m)^(?= *= [^=\n].* = *$)", lines)
            texts = [text for text in articles if text.strip()]
            corpus[split] = Source(form=RUNNING, texts=texts)
        return corpus
    if is_hub_name(dataset):
        splits = hub.ask_for_dataset(key, dataset, download=True)
        if "train" not in splits:
            raise UserError(f"{what} has no split called train", f"it has {', '.join(splits)}")
        used = [split for split in ("train", "validation") if split in splits]
        return {split: _find_form(splits[split], what) for split in used}
    return {"train": _find_source(Path(dataset), what)}


def is_hub_name(dataset: str) -> bool:
    """Whether this is user/name or user/name:config, and no path."""
    path = Path(dataset)
    named = _HUB_NAME.fullmatch(dataset) is not None
    return named and path.suffix not in _KINDS and not path.exists()


def _find_source(path: Path, what: str) -> Source:
    if not path.exists():
        fix = f'give a {", ".join(_KINDS)} file, a folder of them, "wikitext-2" or "embedded"'
        raise UserError(f"{what} does not exist", fix=fix)
    files = [path]
    if path.is_dir():  # in the order of their names, but for hidden ones
        below = [file for file in sorted(path.rglob("*")) if file.suffix in _KINDS]
        shown = [file for file in below if "/." not in f"/{file.relative_to(path).as_posix()}"]
        files = [file for file in shown if not file.is_dir()]
    found = sorted({file.suffix or "a file without an extension" for file in files})
    are_texts = set(found) <= set(TEXT_KINDS)
    if not files or not (are_texts or set(found) <= set(RECORD_KINDS)):
        why = f"found {', '.join(found) or 'no ' + ' or '.join(_KINDS) + ' file'}"
        fix = f"give {' and '.join(TEXT_KINDS)} files, or {', '.join(RECORD_KINDS)} files, not both"
        raise UserError(f"{what} cannot be read", why, fix)
    for file in files:
        on_disk.check_file(file)
    return Source(form=RUNNING, files=files) if are_texts else _find_form(files, what)


def _find_form(files: Sequence[Path], what: str) -> Source:
    """Records, all of the form of the first."""
    for where, record in on_disk.read_records(*files):
        return Source(form=pieces.find_form(record, where), files=files)
    raise UserError(f"{what} contains no text")


def read_embedded() -> list[str]:
    """The standard library's sources and its pydoc topics, in an order fixed by their names."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    texts = {f"topic/{name}": text for name, text in topics.items()}
    for folder, below, files in os.walk(root):  # installed packages are not even walked through
        below[:] = [name for name in below if name not in _SKIPPED and name[:7] != "config-"]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            name = path.relative_to(root).as_posix()
            texts[name] = path.read_text(encoding="utf-8", errors="replace")
    return [text for text in _shuffle(texts) if text.strip()]


def read_prose() -> list[str]:
    """The sentences of the pydoc topics, a paragraph a line: no code, grammar, tables or titles.
    Topics repeat each other, which would put what validates into what trains: each comes once."""
    from pydoc_data.topics import topics

    found = list[str]()
    seen = set[str]()
    for text in _shuffle(topics):
        parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
        new = [part for part in dict.fromkeys(parts) if _SENTENCES.fullmatch(part)]
        found.append("".join(f"{part}\n" for part in new if part not in seen))
        seen.update(new)
    return [text for text in found if text]


def _shuffle(texts: dict[str, str]) -> list[str]:
    """Ordered by a hash of the name, so that the held-out end is not all of one kind."""
    names = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [texts[name] for name in names]
