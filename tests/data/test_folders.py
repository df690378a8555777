"""Test which files in a dataset folder belong to which split."""

import json

import datasets
import pytest

from distributed_training.data.corpus import find_unread
from distributed_training.data.report import describe
from tests.data.test_corpus import corpus_of, texts_of
from tests.support import refused


def write(file, *texts):
    """Write text records in the format that the file's suffix indicates."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text} for text in texts]
    lines = [json.dumps(rows)] if file.suffix == ".json" else map(json.dumps, rows)
    file.write_text("\n".join(lines), encoding="utf-8")


def splits_of(folder):
    return {split: texts_of(source) for split, (source,) in corpus_of(folder).items()}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "lines/b.json"])
def test_records_are_read_from_every_file_format(name, tmp_path):
    write(tmp_path / name, "one", "two ä")
    assert splits_of(tmp_path / name) == {"train": ["one", "two ä"]}
    assert splits_of(tmp_path) == {"train": ["one", "two ä"]}


def test_only_the_most_common_format_of_a_split_is_read(tmp_path):
    """As in `load_dataset`, which prefers Parquet if two formats are equally common."""
    write(tmp_path / "train.jsonl", "one")
    datasets.Dataset.from_dict({"text": ["one"]}).to_parquet(tmp_path / "train.parquet")
    write(tmp_path / "validation.jsonl", "two")
    assert splits_of(tmp_path) == {"train": ["one"], "validation": ["two"]}
    assert find_unread(str(tmp_path), corpus_of(tmp_path)) == ["train.jsonl"]
    write(tmp_path / "train-2.json", "three")
    assert splits_of(tmp_path)["train"] == ["three", "one"]
    assert find_unread(str(tmp_path), corpus_of(tmp_path)) == ["train.parquet"]


def test_splits_are_recognized_by_file_names(tmp_path):
    for split in ("train", "validation", "test"):
        write(tmp_path / f"{split}.jsonl", split)
    assert splits_of(tmp_path) == {"train": ["train"], "validation": ["validation"]}
    (tmp_path / "train.jsonl").unlink()
    with refused("train", "validation, test"):
        corpus_of(tmp_path)


def test_a_dataset_card_defines_the_splits_of_a_cloned_dataset(tmp_path):
    write(tmp_path / "a" / "one.jsonl", "one")
    write(tmp_path / "a" / "two.jsonl", "two")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nNot a text.\n")
    assert splits_of(tmp_path) == {"train": ["one", "two"]}
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    card += "  - split: train\n    path: {}\n---\n"
    (tmp_path / "README.md").write_text(card.format("a/two.jsonl"))
    assert splits_of(tmp_path) == {"train": ["two"]}
    write(tmp_path / "three.jsonl", "three")
    card = "---\nconfigs:\n- config_name: default\n  data_dir: a\n---\n"
    (tmp_path / "README.md").write_text(card)
    assert splits_of(tmp_path) == {"train": ["one", "two"]}


BOMB = "a: &a0 [x]\n" + "".join(f"b{i}: &a{i + 1} [{f'*a{i}, ' * 9}]\n" for i in range(12))


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("data_files: ../*.jsonl", "'../*.jsonl'"), ("data_dir: ..", "'..'"),
        ('data_files: "/**"', "'/**'"), ("data_files: [a.jsonl, /etc/passwd]", "'/etc/passwd'"),
        ("data_files: ftp://127.0.0.1:1/x", "'ftp://127.0.0.1:1/x'"),
        ("data_files: [{split: train, path: 'zip://*::a.zip'}]", "zip://"),
        (f"data_files: *a12\n{BOMB}", "aliases"),
    ],
)  # fmt: skip
def test_a_card_that_refers_to_files_outside_the_folder_is_refused(
    value, word, tmp_path, monkeypatch
):
    """Nothing is searched, and no server is asked."""
    monkeypatch.setattr(datasets.data_files, "resolve_pattern", lambda *args, **kwargs: 1 / 0)
    folder = tmp_path / "dataset"
    write(folder / "a.jsonl", "one")
    head, _, tail = value.partition("\n")
    card = f"---\n{tail}configs:\n- config_name: default\n  {head}\n---\n"
    (folder / "README.md").write_text(card)
    with refused(str(folder), word):
        corpus_of(folder)


def test_files_beside_the_data_are_named_and_not_read(tmp_path):
    beside = ["LICENSE.txt", "docs/guide.md", "docs/test.md", "metadata.json"]
    for name in (*beside, "README.md", ".gitattributes", "dataset_infos.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"a": 1}')
    (tmp_path / "stats.json").write_text("[1, 2, 3]")
    write(tmp_path / "data.jsonl", "one")
    write(tmp_path / "more.json", "two")
    assert splits_of(tmp_path) == {"train": ["one", "two"]}
    assert find_unread(str(tmp_path), corpus_of(tmp_path)) == [*beside, "stats.json"]
    (tmp_path / "data.jsonl").rename(tmp_path / "train.jsonl")
    assert splits_of(tmp_path) == {"train": ["one"]}
    for name in ("train.jsonl", "more.json", "docs/test.md", "stats.json"):
        (tmp_path / name).unlink()
    assert splits_of(tmp_path) == {"train": ['{"a": 1}'] * 2}


def test_links_that_leave_the_folder_are_not_read(tmp_path):
    write(tmp_path / "secret.jsonl", "secret")
    repository = tmp_path / "hub" / "datasets--a--b"
    snapshot = repository / "snapshots" / "0"
    write(repository / "blobs" / "1", "one")
    snapshot.mkdir(parents=True)
    (snapshot / "a.jsonl").symlink_to("../../blobs/1")
    (snapshot / "train.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (snapshot / "more").symlink_to(tmp_path)
    assert splits_of(snapshot) == {"train": ["one"]}
    assert find_unread(str(snapshot), corpus_of(snapshot)) == ["train.jsonl"]
    (snapshot / "a.jsonl").unlink()
    with refused(str(snapshot), "links"):
        corpus_of(snapshot)


def test_a_card_with_several_configurations_must_name_the_default(tmp_path):
    card = "---\nconfigs:\n"
    for name in ("one", "two"):
        write(tmp_path / f"{name}.jsonl", name)
        card += f"- config_name: {name}\n  data_files: {name}.jsonl\n"
    (tmp_path / "README.md").write_text(f"{card}---\n")
    with refused(str(tmp_path), "'one', 'two'"):
        corpus_of(tmp_path)
    (tmp_path / "README.md").write_text(f"{card}  default: true\n---\n")
    assert splits_of(tmp_path) == {"train": ["two"]}


def test_a_dataset_written_by_save_to_disk_is_read(tmp_path):
    splits = {split: datasets.Dataset.from_dict({"text": [split]}) for split in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "all")
    splits["test"].save_to_disk(tmp_path / "one")
    # `map` writes its cache beside the data.
    datasets.load_from_disk(tmp_path / "one").map(lambda row: {"text": f"{row['text']}!"})
    assert [*(tmp_path / "one").glob("cache-*.arrow")]
    assert splits_of(tmp_path / "all") == {"train": ["train"]}
    assert splits_of(tmp_path / "one") == {"train": ["test"]}


def test_files_of_an_earlier_save_to_disk_are_not_read(tmp_path):
    """A second call leaves the shards and splits of the first (datasets#7372)."""
    old, new = (datasets.Dataset.from_dict({"text": [word] * 3}) for word in ("old", "new"))
    datasets.DatasetDict(train=old, validation=old).save_to_disk(
        tmp_path / "all", num_shards={"train": 3, "validation": 1}
    )
    datasets.DatasetDict(train=new).save_to_disk(tmp_path / "all")
    old.save_to_disk(tmp_path / "one", num_shards=3)
    new.save_to_disk(tmp_path / "one")
    assert splits_of(tmp_path / "all") == splits_of(tmp_path / "one") == {"train": ["new"] * 3}
    unread = [f"train/data-0000{i}-of-00003.arrow" for i in range(3)]
    unread.append("validation/data-00000-of-00001.arrow")
    assert find_unread(str(tmp_path / "all"), corpus_of(tmp_path / "all")) == unread
    new.save_to_disk(tmp_path / "all")
    assert splits_of(tmp_path / "all") == {"train": ["new"] * 3}
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    with refused("data-00000-of-00001.arrow is missing"):
        corpus_of(tmp_path / "one")


def test_files_that_are_not_read_are_named(tmp_path):
    records = tmp_path / "records"
    for split in ("train", "validation", "test"):
        write(records / f"{split}.jsonl", split)
    for name in ("README.md", "notes.pdf", ".hidden", "state.json.bak"):
        (records / name).write_text("---\nlicense: mit\n---\n")
    unread = ["notes.pdf", "state.json.bak", "test.jsonl"]
    assert find_unread(str(records), corpus_of(records)) == unread
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("README.md", "a.md", "b.txt"):
        (texts / name).write_text("A text.")
    assert find_unread(str(texts), corpus_of(texts)) == ["README.md"]
    assert find_unread(str(texts / "a.md"), corpus_of(texts / "a.md")) == []
    counts = {"left_out": {}, "cut": 0, "notes": {}, "unread": ["a\x1b.pdf", "b", "c", "d"]}
    (line,) = describe(counts, 8)
    assert "4 (a\\x1b.pdf, b, c, ...)" in line
