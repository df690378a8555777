import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from distributed_training.data import hub
from distributed_training.data.corpus import (
    Corpus,
    Source,
    read_corpus,
    read_embedded,
    read_prose,
    split_articles,
)
from distributed_training.data.pieces import RUNNING, TEXT
from tests.support import refused

ROWS = [
    "",
    " = Robert Boulter = \n",
    "",
    " Robert Boulter is an English film , television and theatre actor . \n",
    " = = Career = = \n",
    " = = = 2000 to 2005 = = = \n",
    " In 2000 = a year = he had a role . \n",
    " = Du Fu = \n",
    " Du Fu was a Chinese poet . \n",
]


def texts_of(source, *, by_line=False):
    """Its texts, whole."""
    texts, parts = [], []
    for piece in source.read(by_line=by_line):
        assert piece.in_loss
        assert piece.eos == piece.ends
        parts.append(piece.text)
        if piece.ends:
            texts.append("".join(parts))
            parts.clear()
    assert not parts
    return texts


def write(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_text_file_is_one_text(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "one", "", "two ä ☃")
    corpus = read_corpus(path)
    assert texts_of(corpus.train) == ["one\n\ntwo ä ☃"]
    assert texts_of(corpus.train, by_line=True) == ["one", "two ä ☃"]
    assert (corpus.name, corpus.validation, corpus.train.form) == (path, None, RUNNING)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_corpus("~/a.txt") == corpus


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (
            '{"text": "one\\ntwo", "id": 1}\n\n{"text": "  "}\n{"text": "\\u2603"}',
            ["one\ntwo", "☃"],
        ),
        ('{"text": "one"}\r\n{"text": "two"}\r\n', ["one", "two"]),
        ('{"text": "a\u2028b\x85"}', ["a\u2028b\x85"]),
    ],
    ids=["blank ones are left out", "Windows", "other ends of lines"],
)
def test_jsonl_gives_its_records(content, texts, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content.encode())
    corpus = read_corpus(str(tmp_path / "a.jsonl"))
    assert texts_of(corpus.train) == texts_of(corpus.train, by_line=True) == texts
    assert corpus.train.form == TEXT


def test_folder_is_read_in_the_order_of_its_names(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        write(tmp_path / name, name)
    write(tmp_path / "ab.md", "ab.md")
    for name in ("picture.png", ".hidden.txt", ".git/d.txt", "blank.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, " " if name == "blank.txt" else name)
    (tmp_path / "folder.txt").mkdir()
    assert texts_of(read_corpus(str(tmp_path)).train) == ["a.txt", "ab.md", "b.txt", "sub/c.txt"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a" "b"}', ("line 3 column 14", "is not JSON")),
        ("[]", ("line 3", 'no "text" string', '{"text": "..."}')),
        ('{"text": 5}', ("line 3", 'no "text" string')),
    ],
)
def test_bad_record_is_named_by_line_and_column(line, words, tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}', "", line, '{"text": "two"}')
    with refused("a.jsonl", *words):
        texts_of(read_corpus(path).train)


LATIN = '{"text": "café"}'.encode("latin-1")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.png": b"x"}, ["no .txt or .md or"]),
        ({"a.jsonl": b" \n\n\t\n"}, ["contains no text"]),
        ({"a.jsonl": LATIN}, ["a.jsonl cannot be read", "utf-8", "0xe9 after", "iconv"]),
        ({"a.txt": b"one", "b.jsonl": b'{"text": "two"}'}, [".jsonl, .txt", "not both"]),
    ],
)
def test_unusable_folder_is_refused(files, words, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with refused(str(tmp_path), *words):
        texts_of(read_corpus(str(tmp_path)).train)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a", ["cannot be read", "without an extension"]),
        ("a" * 300 + ".txt", []),
        ("~nobody-of-that-name/a.txt", []),
    ],
)
def test_unusable_path_is_refused(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if len(name) < 6:
        write(tmp_path / name, "one")
    with refused("dataset=", *words):
        read_corpus(name)


def test_articles_begin_at_level_one_headings():
    articles = split_articles(ROWS)
    assert [article.split(" = ")[1] for article in articles] == ["Robert Boulter", "Du Fu"]
    assert "".join(articles) == "".join(ROWS)
    assert split_articles(["intro \n", *ROWS]) == ["intro \n", *articles]
    assert split_articles(["", " \n"]) == split_articles([]) == []


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_wikitext_is_read_with_its_own_split(tmp_path, monkeypatch):
    files = {
        "train": parquet(tmp_path / "t.parquet", text=ROWS),
        "validation": parquet(tmp_path / "v.parquet", text=[" = Only = \n", " One . \n"]),
    }
    monkeypatch.setattr(hub, "fetch_wikitext", lambda: files)
    corpus = read_corpus("wikitext-2")
    assert texts_of(corpus.train) == split_articles(ROWS)
    assert texts_of(corpus.validation) == [" = Only = \n One . \n"]
    assert corpus.train.form == RUNNING


def test_wikitext_that_is_not_parquet(tmp_path, monkeypatch):
    (tmp_path / "cut").write_bytes(b"PAR1 cut off")
    for path in (tmp_path / "cut", parquet(tmp_path / "other", words=["a"])):
        monkeypatch.setattr(hub, "fetch_wikitext", lambda path=path: {"train": path})
        with refused(f"{path} is not WikiText's parquet file"):
            read_corpus("wikitext-2")


def test_embedded_corpus_is_this_pythons_own_and_always_the_same():
    """No installed package and no test: otherwise machines with the same Python would differ."""
    texts = texts_of(read_corpus("embedded").train)
    assert texts == read_embedded()
    assert sum(map(len, texts)) > 5_000_000
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "argparse.py").read_text() in texts
    assert any(text.startswith('The "if" statement') for text in texts)  # a pydoc topic
    for folder in ("site-packages", "test", "idlelib", "ensurepip"):
        files = sorted(file for file in root.glob(f"{folder}/**/*.py") if file.stat().st_size > 999)
        for file in files[:20]:
            assert file.read_text(encoding="utf-8", errors="replace") not in texts


def test_embedded_prose_is_the_sentences_of_the_help_topics():
    texts = texts_of(read_corpus("embedded-prose").train)
    assert texts == read_prose()
    assert sum(map(len, texts)) > 200_000
    lines = "".join(texts).splitlines()
    assert len(lines) == len(set(lines)), "what validates would be in what trains"
    assert all(line[0].isupper() and line[-1] in ".:" for line in lines)
    assert any(line.startswith("Assert statements are a convenient way to") for line in lines)
    assert not any("assert_stmt" in line or "if __debug__:" in line for line in lines)
    topics = ["".join(text.split()) for text in read_embedded() if len(text) < 300_000]
    first = ["".join(text.partition("\n")[0].split()) for text in texts]
    assert all(any(line in topic for topic in topics) for line in first)


def corpus_of(train=("a", "b"), validation=("c",), form=RUNNING, name="n"):
    parts = [
        Source(form=form, texts=tuple(texts)) if texts else None for texts in (train, validation)
    ]
    return Corpus(name=name, train=parts[0], validation=parts[1])


def test_fingerprint_is_of_texts_split_and_form():
    base = corpus_of().fingerprint
    assert corpus_of(name="other").fingerprint == base
    others = [
        corpus_of(train=("ab",)),
        corpus_of(train=("b", "a")),
        corpus_of(train=("a", "b", "c"), validation=()),
        corpus_of(train=("a",), validation=("b", "c")),
        corpus_of(form=TEXT),
        corpus_of(train=("a", "b\0part\0c"), validation=()),
    ]
    assert len({base, *(corpus.fingerprint for corpus in others)}) == 1 + len(others)


def test_fingerprint_of_files_is_of_their_contents(tmp_path):
    prints = [
        read_corpus(write(tmp_path / name, text)).fingerprint
        for name, text in [("a.txt", "one"), ("b.txt", "one"), ("c.txt", "two"), ("d.md", "one")]
    ]
    assert prints[0] == prints[1] == prints[3]
    assert prints[0] != prints[2]
