"""Test reading data files in every supported format and encoding."""

import gzip
import os
import struct
import subprocess

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from distributed_training.data import files
from distributed_training.data.files import read_records, read_text
from tests.data.test_corpus import corpus_of, pieces_of, texts_of
from tests.support import refused

STORY = "Größe, “naïve” 日本 🙂\nsecond line\n"
ROWS = [{"text": 'a "quoted", one\nin two lines'}, {"text": "zwei ä"}, {"text": "three"}]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_encodings_byte_order_marks_and_windows_line_ends_are_read(
    newline, encoding, tmp_path, monkeypatch
):
    text = STORY.replace("\n", newline)
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    for block in (1, 3, 2**20):
        monkeypatch.setattr(files, "BLOCK_SIZE", block)
        for by_line in (False, True):
            assert "".join(read_text(tmp_path / "a.txt", by_line=by_line)) == STORY


@pytest.mark.processes
@pytest.mark.parametrize(
    ("content", "encoding", "words"),
    [
        ("ein Café ä", "latin-1", ["0xe9", "ein Caf"]),
        ("plain words", "utf-16", ["-f UTF-16"]),
        ("plain words", "utf-16-le", ["-f UTF-16LE"]),
        ("plain words", "utf-16-be", ["-f UTF-16BE"]),
        ("caf\xff", "latin-1", ["-f LATIN1"]),
    ],
)
def test_other_encodings_are_refused_with_a_command_that_converts_the_file(
    content, encoding, words, tmp_path
):
    file = tmp_path / "my notes.txt"
    file.write_bytes(content.encode(encoding))
    with refused("my notes.txt", *words) as caught:
        "".join(read_text(file))
    command = str(caught.value)[str(caught.value).index("iconv ") :]
    subprocess.run(command, shell=True, check=True)
    assert "".join(read_text(tmp_path / "my notes.utf8.txt")) == content


def test_joined_files_with_byte_order_marks_are_read(tmp_path):
    content = '{"text": "ä"}\r\n'.encode("utf-8-sig")
    (tmp_path / "a.jsonl").write_bytes(content * 3)
    assert texts_of(corpus_of(tmp_path / "a.jsonl")["train"][0]) == ["ä"] * 3


def test_records_give_the_same_pieces_in_every_file_format(tmp_path):
    rows = [{"prompt": f'"{n}" + 1,\n=', "completion": f" {n + 1} ä"} for n in range(5)]
    dataset = datasets.Dataset.from_list(rows).add_column("id", list(range(5)))
    dataset.to_parquet(tmp_path / "a.parquet", batch_size=2)
    dataset.to_csv(tmp_path / "b.csv", lineterminator="\r\n")  # as in spreadsheets' files
    dataset.to_json(tmp_path / "c.jsonl")
    for name in ("a.parquet", "b.csv", "c.jsonl"):
        source = corpus_of(tmp_path / name)["train"][0]
        assert source.columns == {}
        texts = [piece.text for piece in pieces_of(source)]
        assert texts == [row["prompt"] + row["completion"] for row in rows]
        assert {piece.spans[0][0] for piece in pieces_of(source)} == {len(rows[0]["prompt"])}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"text;label\nabc;1\n", "'text;label'"),
        ("a.csv", b'text\n"abc\n', "line 2"),
        ("a.csv", b'prompt,completion\n"abc"\n', "line 2"),
        ("a.csv", b"text,label\none,1\none, two,1\n", "line 3"),
        ("a.csv", b"text,label,text\none,1,two\n", "'text'"),
        ("a.parquet", b"PAR1 cut off", "parquet"),
        ("a.jsonl", gzip.compress(b'{"text": "a"}', mtime=0), "gunzip"),
        ("a.jsonl", b'\n{"text": "\\ud83d"}', "line 2"),
        ("a.json", b'{\n "text": "a"\n}\n{\n "text": "b"\n}', "line 1"),
        ("a.jsonl", b'[\n{"text": "a"}\n]', "line 1"),
        ("a.jsonl", b'{"text": "a"}\n{"text":', "line 2"),  # cut off
        ("a.jsonl", b'{"text": "one", "id": ' + b"1" * 5000 + b"}", "ut of range"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ' + b"[" * 2000 + b"]" * 2000 + b"}", "line 2"),
        ("a.json", b"[" * 2000 + b"]" * 2000, "Recursion limit"),
    ],
)
def test_unusable_records_are_refused_with_a_reason(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with refused(f"{name} ", words):
        texts_of(corpus_of(tmp_path / name)["train"][0])


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "broken link"])
def test_pipes_and_devices_are_refused_without_blocking(kind, tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    file = tmp_path / "b.txt"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "link to a device" else tmp_path / "gone")
    with refused(str(file)):
        texts_of(corpus_of(tmp_path)["train"][0])


def test_arrow_tables_are_read(tmp_path):
    batch = pyarrow.record_batch({"text": ["one", "two"]})
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), batch.schema) as file:
        for _ in range(2):
            file.write_batch(batch)
    records = read_records(tmp_path / "a.arrow", columns=["text"])
    assert [row["text"] for _, row in records] == ["one", "two"] * 2


def test_types_of_tables_are_read_as_datasets_reads_them_or_refused(tmp_path):
    """Values of the type Json are decoded wherever they are (trl#5307)."""
    arguments = [{"x": 1}, {"y": [None, "a"], "z": None}]
    rows = [
        {"messages": [{"role": "user", "content": c, "call": c}], "tools": [c]} for c in arguments
    ]
    dataset = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    dataset.to_parquet(tmp_path / "a.parquet")
    assert "Json" in str(dataset.features)
    columns = ("messages", "tools")
    assert [row for _, row in read_records(tmp_path / "a.parquet", columns=columns)] == rows
    pairs = pyarrow.array([[("role", "user")]], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    pyarrow.parquet.write_table(pyarrow.table({"messages": pairs}), tmp_path / "b.parquet")
    with refused("b.parquet", "messages", "map<string"):
        list(read_records(tmp_path / "b.parquet", columns=columns))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_lines_may_end_at_carriage_returns(name, tmp_path):
    rows = ["a,b", "1,2"] if name == "a.csv" else ['{"a": "1"}', '{"a": "2"}']
    (tmp_path / name).write_bytes("\r".join(rows).encode())
    expected = [{"a": "1", "b": "2"}] if name == "a.csv" else [{"a": "1"}, {"a": "2"}]
    assert [row for _, row in read_records(tmp_path / name, columns="ab")] == expected


def test_nulls_that_tables_add_to_nested_records_are_removed(tmp_path):
    rows = [{"call": {"x": 1}, "system": None}, {"call": {"y": [{"z": 2}, {}]}, "system": "s"}]
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    records = read_records(file, columns=("call", "system"))
    assert [row for _, row in records] == rows


def test_arrow_offsets_beyond_the_buffer_are_refused(tmp_path):
    path = tmp_path / "a.arrow"
    batch = pyarrow.record_batch({"text": ["hello " * 20] * 2})
    with pyarrow.ipc.new_stream(str(path), batch.schema) as file:
        file.write_batch(batch)
    offset = struct.pack("<i", 120)
    content = path.read_bytes()
    assert content.count(offset) == 1
    path.write_bytes(content.replace(offset, struct.pack("<i", 2**31 - 1)))
    with refused("a.arrow"):
        list(read_records(path, columns=["text"]))
