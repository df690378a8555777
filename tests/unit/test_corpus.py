import json
import sysconfig
from pathlib import Path

import pytest

from distributed_training import hub
from distributed_training.corpus import Corpus, read_corpus, read_embedded, split_articles
from tests.unit.conftest import refused

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


def write(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_text_file_is_one_text(tmp_path):
    path = write(tmp_path / "a.txt", "one", "", "two ä ☃")
    corpus = read_corpus(path)
    assert corpus.train == ["one\n\ntwo ä ☃"]
    assert (corpus.name, corpus.validation, corpus.records) == (path, None, False)


def test_jsonl_gives_its_records(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        '{"text": "one\\ntwo", "id": 1}',
        "",
        '{"text": "  "}',
        '{"text": "\\u2603"}',
    )
    corpus = read_corpus(path)
    assert corpus.train == ["one\ntwo", "☃"]
    assert corpus.records


def test_windows_line_ends_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\r\n{"text": "two"}\r\n')
    assert read_corpus(str(tmp_path / "a.jsonl")).train == ["one", "two"]


def test_folder_is_read_in_the_order_of_its_names(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        write(tmp_path / name, name)
    write(tmp_path / "README.md", "not text to train on")
    assert read_corpus(str(tmp_path)).train == ["a.txt", "b.txt", "sub/c.txt"]


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.txt", "one")
    assert read_corpus("~/a.txt").train == ["one"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a" "b"}', ("line 3 column 14", "is not JSON")),
        ("{", ("line 3 column 2",)),
        ("text", ("line 3 column 1",)),
        ("[]", ("line 3", 'no "text" string', '{"text": "..."}')),
        ('"text"', ("line 3", 'no "text" string')),
        ('{"Text": "a"}', ("line 3", 'no "text" string')),
        ('{"text": 5}', ("line 3", 'no "text" string')),
    ],
)
def test_bad_record_is_named_by_line_and_column(line, words, tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}', "", line, '{"text": "two"}')
    with refused("a.jsonl", *words):
        read_corpus(path)


def test_missing_path():
    with refused("dataset='/no/such.txt' does not exist", "embedded", "wikitext-2"):
        read_corpus("/no/such.txt")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("content", ["", " \n\n\t\n"])
def test_empty_file(name, content, tmp_path):
    with refused(name, "holds no text"):
        read_corpus(write(tmp_path / name, content))


def test_folder_without_text(tmp_path):
    write(tmp_path / "a.md", "x")
    with refused(str(tmp_path), "holds no .txt or .jsonl file"):
        read_corpus(str(tmp_path))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_other_encodings_are_named_by_byte(name, tmp_path):
    (tmp_path / name).write_bytes('{"text": "café"}'.encode("latin-1"))
    with refused(name, "is not UTF-8", "byte 13 is 0xe9", "iconv"):
        read_corpus(str(tmp_path / name))


def test_mixed_kinds(tmp_path):
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.jsonl", '{"text": "two"}')
    with refused("is not understood", ".jsonl, .txt", "not both"):
        read_corpus(str(tmp_path))


@pytest.mark.parametrize(("name", "kind"), [("a.csv", ".csv"), ("a", "no ending")])
def test_unknown_kind(name, kind, tmp_path):
    with refused("is not understood", f"found {kind}"):
        read_corpus(write(tmp_path / name, "one"))


def test_articles_begin_at_level_one_headings():
    articles = split_articles(ROWS)
    assert [article.split(" = ")[1] for article in articles] == ["Robert Boulter", "Du Fu"]
    assert "".join(articles) == "".join(ROWS)


def test_text_before_the_first_heading_is_kept():
    assert split_articles(["intro \n", *ROWS])[0] == "intro \n"
    assert split_articles([]) == []
    assert split_articles(["", " \n"]) == []


def parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_wikitext_is_read_with_its_own_split(tmp_path, monkeypatch):
    files = {
        "train": parquet(tmp_path / "t.parquet", text=ROWS),
        "validation": parquet(tmp_path / "v.parquet", text=[" = Only = \n", " One . \n"]),
    }
    monkeypatch.setattr(hub, "fetch_wikitext", lambda: files)
    corpus = read_corpus("wikitext-2")
    assert corpus.train == split_articles(ROWS)
    assert corpus.validation == [" = Only = \n One . \n"]
    assert not corpus.records


def test_wikitext_that_is_not_parquet(tmp_path, monkeypatch):
    (tmp_path / "cut").write_bytes(b"PAR1 cut off")
    for path in (tmp_path / "cut", parquet(tmp_path / "other", words=["a"])):
        monkeypatch.setattr(hub, "fetch_wikitext", lambda path=path: {"train": path})
        with refused(f"{path} is not WikiText's parquet file"):
            read_corpus("wikitext-2")


def test_wikitext_that_is_not_to_be_had_says_how_to_fetch_it():
    with refused("dataset='wikitext-2'", "hf download Salesforce/wikitext --repo-type dataset"):
        read_corpus("wikitext-2")


def test_embedded_corpus_is_this_pythons_own_and_always_the_same():
    texts = read_embedded()
    assert texts == read_embedded()
    corpus = read_corpus("embedded")
    assert corpus.train == texts
    assert sum(map(len, texts)) > 5_000_000
    assert Path(sysconfig.get_path("stdlib"), "argparse.py").read_text() in texts
    assert any(text.startswith('The "if" statement') for text in texts)  # a pydoc topic


def test_embedded_corpus_holds_no_installed_package_and_no_test():
    """Otherwise two machines with the same Python would train on different text."""
    texts = set(read_embedded())
    root = Path(sysconfig.get_path("stdlib"))
    for folder in ("site-packages", "test", "idlelib", "ensurepip"):
        files = sorted(file for file in root.glob(f"{folder}/**/*.py") if file.stat().st_size > 999)
        for file in files[:20]:
            assert file.read_text(encoding="utf-8", errors="replace") not in texts


def corpus_of(train=("a", "b"), validation=("c",), records=False, name="n"):
    parts = dict(train=list(train), validation=None if validation is None else list(validation))
    return Corpus(name=name, records=records, **parts)


def test_fingerprint_is_of_texts_split_and_form():
    base = corpus_of().fingerprint
    assert corpus_of(name="other").fingerprint == base
    others = [
        corpus_of(train=("ab",)),
        corpus_of(train=("b", "a")),
        corpus_of(train=("a", "b", "c"), validation=()),
        corpus_of(train=("a",), validation=("b", "c")),
        corpus_of(records=True),
        corpus_of(train=("a", "b\0part\0c"), validation=()),
    ]
    assert len({base, *(corpus.fingerprint for corpus in others)}) == 1 + len(others)


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_jsonl_lines_end_at_line_feeds_only(character, tmp_path):
    text = f"one{character}two"
    path = write(tmp_path / "a.jsonl", json.dumps({"text": text}, ensure_ascii=False))
    assert read_corpus(path).train == [text]


@pytest.mark.parametrize("line", ["[" * 100_000, "1" * 5000], ids=["deep", "long"])
def test_records_that_python_refuses_to_parse(line, tmp_path):
    with refused("a.jsonl line 1"):
        read_corpus(write(tmp_path / "a.jsonl", line))


@pytest.mark.parametrize("path", ["a" * 300 + ".txt", "~nobody-of-that-name/a.txt"])
def test_paths_that_pathlib_refuses(path):
    with refused("dataset="):
        read_corpus(path)


def test_half_of_a_surrogate_pair_is_named_by_its_line(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}', '{"text": "\\ud83d"}')
    with refused("a.jsonl line 2", "ud83d", "surrogate"):
        read_corpus(path)
    whole = write(tmp_path / "b.jsonl", '{"text": "\\ud83d\\ude00"}')
    assert read_corpus(whole).train == ["\U0001f600"]


def test_a_number_that_is_too_long_is_no_text(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one", "id": ' + "1" * 5000 + "}")
    with refused("a.jsonl line 1", "digits"):
        read_corpus(path)
