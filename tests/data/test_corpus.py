"""Test text corpora from files, from folders and from the installed Python."""

import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from distributed_training.data import hub
from distributed_training.data.chats.prepare import Counts, read_pieces
from distributed_training.data.corpus import Source, find_corpus, fingerprint
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from distributed_training.settings.request import build_config
from tests.support import refused

ROWS = ["", " = Robert Boulter = \n", "", " An English film , television and theatre actor . \n"]
ROWS += [" = = Career = = \n", " = = = 2000 to 2005 = = = \n", " In 2000 = a year = a role . \n"]
ROWS += [" = Du Fu = \n", " Du Fu was a Chinese poet . \n"]


def corpus_of(dataset):
    return find_corpus(build_config({"dataset": str(dataset)}))


def pieces_of(source, *, by_line=False):
    return read_pieces(source, Tokenizer(EMBEDDED_DIR), by_line=by_line, counts=Counts())


def texts_of(source, *, by_line=False):
    """Read a source and return its documents. The pieces of each document are joined."""
    texts, pieces = [], []
    for piece in pieces_of(source, by_line=by_line):
        assert piece.spans is None
        assert not piece.templated
        pieces.append(piece.text)
        if piece.ends:
            texts.append("".join(pieces))
            pieces.clear()
    assert not pieces
    return texts


def write(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_document_is_a_file_a_line_or_a_record(tmp_path):
    """Blank documents are skipped. The text of a JSON Lines record may contain Unicode line
    separators."""
    corpus = corpus_of(write(tmp_path / "a.txt", "one", "", "two ä ☃"))
    assert (list(corpus), corpus["train"][0].columns) == (["train"], None)
    assert texts_of(corpus["train"][0]) == ["one\n\ntwo ä ☃"]
    assert texts_of(corpus["train"][0], by_line=True) == ["one", "two ä ☃"]
    rows = ['{"text": "1\\n2", "id": 1}', "", '{"text": "  "}', '{"text": "\\u2603\u2028b\x85"}\n']
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(rows).encode())
    source = corpus_of(tmp_path / "a.jsonl")["train"][0]
    assert source.columns == {}
    assert texts_of(source) == texts_of(source, by_line=True) == ["1\n2", "☃\u2028b\x85"]


def test_files_of_a_folder_are_read_in_name_order(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "ab.md", "a.png", ".hidden.txt", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, name)
    write(tmp_path / "blank.txt", " ")
    assert texts_of(corpus_of(tmp_path)["train"][0]) == ["a.txt", "ab.md", "b.txt", "sub/c.txt"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.png": b"x"}, [".png", ".txt"]),
        ({"a.jsonl": b" \n\n\t\n"}, ["contains no text"]),
        ({"a.jsonl": b'{"text": "a"}\n\n[]'}, ["line 3", '{"text": "..."}']),
    ],
)
def test_unusable_folder_is_refused(files, words, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with refused(str(tmp_path), *words):
        texts_of(corpus_of(tmp_path)["train"][0])


@pytest.mark.parametrize(
    ("name", "words"), [("a", "without a suffix"), ("missing.txt", "does not exist")]
)
def test_unusable_path_is_refused(name, words, tmp_path):
    (tmp_path / "a").touch()
    with refused("dataset", f"{tmp_path}/{name}", words):
        corpus_of(tmp_path / name)


def test_articles_of_wikitext_begin_at_level_one_headings(tmp_path, monkeypatch):
    splits = {"train": ["intro \n", *ROWS], "validation": ["", " \n"]}
    files = {split: tmp_path / f"{split}.parquet" for split in splits}
    for split, rows in splits.items():
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), files[split])
    monkeypatch.setattr(hub, "fetch_wikitext", lambda: files)
    corpus = corpus_of("wikitext-2")
    assert corpus["train"][0].columns is None
    intro, *articles = texts_of(corpus["train"][0])
    assert intro == "intro \n"
    assert [article.split(" = ")[1] for article in articles] == ["Robert Boulter", "Du Fu"]
    assert "".join(articles) == "".join(ROWS)
    assert texts_of(corpus["validation"][0]) == []


def test_embedded_corpora_come_from_the_standard_library():
    """Embedded corpora contain no installed packages and no tests, so they are identical on all
    machines with the same Python."""
    texts = texts_of(corpus_of("embedded")["train"][0])
    assert sum(map(len, texts)) > 5_000_000
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "argparse.py").read_text() in texts
    assert any(text.startswith('The "if" statement') for text in texts)  # a pydoc topic
    for folder in ("site-packages", "test", "idlelib", "ensurepip"):
        files = sorted(file for file in root.glob(f"{folder}/*.py") if file.stat().st_size > 999)
        for file in files[:5]:
            assert file.read_text(encoding="utf-8", errors="replace") not in texts
    lines = "".join(texts_of(corpus_of("embedded-prose")["train"][0])).splitlines()
    assert sum(map(len, lines)) > 200_000
    assert len(lines) == len(set(lines)), "what validates would be in what trains"
    assert all(line[0].isupper() and line[-1] in ".:" for line in lines)
    assert not any("assert_stmt" in line or "if __debug__:" in line for line in lines)


def test_fingerprint_depends_on_texts_split_and_form(tmp_path):
    def running(*texts, columns=None):
        return [Source(texts=texts, columns=columns)]

    corpora = [
        {"train": running("a", "b")},
        {"train": running("ab")},
        {"train": [*running("a"), *running("b")]},
        {"train": running("a"), "validation": running("b")},
        {"train": running("a", "b", columns={})},
        *(corpus_of(write(tmp_path / f"{text}.txt", text)) for text in ("one", "two")),
    ]
    assert len({*map(fingerprint, corpora)}) == len(corpora)
    same_corpus = corpus_of(write(tmp_path / "same.md", "one"))
    assert fingerprint(same_corpus) == fingerprint(corpora[-2])
