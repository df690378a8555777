"""Test runs that train on several datasets with weights."""

import json
from collections import Counter

import numpy as np
import pytest

from distributed_training.data.corpus import find_corpus, split_weights
from distributed_training.data.estimate import sample_corpus
from distributed_training.data.report import summarize
from distributed_training.settings.request import build_config
from tests.data.test_corpus import corpus_of
from tests.data.test_folders import write
from tests.data.test_samples import prepare
from tests.support import refused


def write_records(path, count):
    write(path, *(f"{path.name[0]} {number}" for number in range(count)))
    return str(path)


def texts_in(samples, tokenizer):
    """Return the texts of unpacked samples."""
    return [tokenizer.decode(row.tolist()) for row in samples.batch(np.arange(len(samples)))[0]]


@pytest.mark.parametrize(
    ("weights", "limit", "expected"),
    [
        ((1, 1), -1, (95, 38)),
        ((2, 0.5), -1, (190, 19)),
        ((0.25, 1.5), -1, (23, 57)),
        ((1, 1), 14, (10, 4)),
        ((2, 1), 24, (20, 4)),
    ],
)
def test_each_dataset_has_its_share_of_an_epoch(weights, limit, expected, tokenizer, tmp_path):
    """The counts are exact, samples in validation are never trained on, and the last samples of
    each dataset are validated on."""
    files = [write_records(tmp_path / f"{name}.jsonl", n) for name, n in (("a", 100), ("b", 40))]
    dataset = [f"{file}:{weight}" for file, weight in zip(files, weights, strict=True)]
    config = {"dataset": dataset, "pack": False, "num_samples": limit}
    corpus = find_corpus(build_config(config))
    data = prepare(tmp_path / "cache", tokenizer, corpus, **config)
    trained = texts_in(data.train, tokenizer)
    assert Counter(text[0] for text in trained) == dict(zip("ab", expected, strict=True))
    for name, weight in zip("ab", weights, strict=True):
        repeats = {*Counter(text for text in trained if text[0] == name).values()}
        assert repeats <= {int(weight), int(np.ceil(weight))}
    validated = texts_in(data.validation, tokenizer)
    assert Counter(text[0] for text in validated) == {"a": 5, "b": 2}
    assert not {*validated} & {*trained}
    folder = tmp_path / "cache" / data.cache
    counts = summarize(folder, build_config(config), can_pack=True)
    assert (counts["trained"], counts["held_out"]) == (sum(expected), 7)
    own = find_corpus(build_config({**config, "validation_dataset": files[1]}))
    folder = tmp_path / "cache" / prepare(tmp_path / "cache", tokenizer, own, **config).cache
    assert summarize(folder, build_config(config), can_pack=True)["held_out"] == 40
    again = prepare(tmp_path / "cache", tokenizer, corpus, **config)
    assert again.fingerprint == data.fingerprint
    other = prepare(tmp_path / "cache", tokenizer, corpus, **config | {"dataset": files})
    assert other.cache == data.cache  # Weights do not change the tokens.
    assert (other.fingerprint == data.fingerprint) == (weights == (1, 1))


def test_a_dataset_may_have_a_colon_a_space_or_a_number_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a:2", "a", "my file", "it's"):
        write_records(tmp_path / name, 1)
    cases = {
        "a:2": {"a:2": 1}, "a:2:3": {"a:2": 3}, "a:0.5": {"a": 0.5}, "my file": {"my file": 1},
        "'my file:2' a": {"my file": 2, "a": 1}, "it's": {"it's": 1}, "a a": {"a": 2},
        "user/name:config": {"user/name:config": 1}, "user/name:config:2": {"user/name:config": 2},
        "/home/o'brien/a.jsonl:2": {"/home/o'brien/a.jsonl": 2}, "C:\\b.jsonl": {"C:\\b.jsonl": 1},
    }  # fmt: skip
    assert {text: split_weights(text) for text in cases} == cases
    with refused("dataset", "No closing quotation"):
        split_weights("'a b.jsonl")
    config = build_config({"dataset": ["my file:2", "a"]})
    assert split_weights(config.dataset) == cases["'my file:2' a"]


def test_running_text_and_records_are_not_mixed(tmp_path):
    records = write_records(tmp_path / "a.jsonl", 5)
    (tmp_path / "b.txt").write_text("a text")
    with refused("a.jsonl", "b.txt"):
        corpus_of(f"{records} {tmp_path / 'b.txt'}")


def test_the_size_of_a_mix_is_estimated_from_chunks(tokenizer, tmp_path):
    (tmp_path / "chunks").mkdir()
    files = [
        write_records(tmp_path / f"{name}.jsonl", n) for name, n in (("a", 300_000), ("b", 100_000))
    ]
    config = {"dataset": [f"{files[0]}:2", files[1]], "pack": False}
    corpus = find_corpus(build_config(config))
    chunks, scale, error = sample_corpus(corpus, tmp_path / "chunks")
    data = prepare(tmp_path / "cache", tokenizer, chunks, **config)
    assert scale * len(data.train) == pytest.approx(700_000 * 0.95, rel=error)


def test_lines_of_alternating_lengths_are_estimated(tokenizer, tmp_path):
    (tmp_path / "chunks").mkdir()
    file = tmp_path / "a.jsonl"
    lines = (json.dumps({"text": "one two " * (1 + 60 * (n % 2))}) for n in range(20_000))
    file.write_text("\n".join(lines))
    config = {"dataset": str(file), "pack": False}
    chunks, scale, error = sample_corpus(corpus_of(file), tmp_path / "chunks")
    data = prepare(tmp_path / "cache", tokenizer, chunks, **config)
    assert scale * len(data.train) == pytest.approx(20_000 * 0.95, rel=error)
