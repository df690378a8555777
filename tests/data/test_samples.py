import itertools
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from distributed_training.data import cache, pieces
from distributed_training.data.corpus import Source
from distributed_training.data.samples import IGNORE_INDEX, cut_samples
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.config import with_values
from distributed_training.settings.request import build_config
from tests.data.test_corpus import corpus_of
from tests.support import refused

WORDS = ["the", "value", "of", "a", "function", "is", "returned", "when", "called", "by", "name"]


def in_memory(train, validation=None):
    """Return a corpus of running text from strings."""
    texts = {"train": train} if validation is None else {"train": train, "validation": validation}
    return {name: [Source(texts=tuple(split))] for name, split in texts.items()}


def make_corpus(num_texts=12, validation=True, seed=0):
    """Return a corpus whose documents have several lines of random length. About one line in five
    is blank."""
    random = np.random.default_rng(seed)
    texts = []
    for index in range(num_texts + 2):
        sizes = np.where(random.random(6) > 0.2, random.integers(1, 30, 6), 0)
        lines = [" ".join(random.choice(WORDS, size)) or " " for size in sizes]
        texts.append("\n".join([f"text {index}", *lines]))
    return in_memory(texts[2:], texts[:2] if validation else None)


def prepare(tmp_path, tokenizer, corpus=None, **config):
    settings = {"dataset": "made", "max_length": 16, "num_samples": -1, "eval_samples": -1}
    built = build_config({**settings, **config})
    folder = cache.tokenize(corpus or make_corpus(), tokenizer, built, tmp_path)
    return cut_samples(folder, tokenizer, built)


def all_rows(samples):
    return samples.batch(np.arange(len(samples)))


def records_in(samples):
    """Return a list of pairs for each record in packed blocks. A pair contains a token ID and its
    target. Also check the positions and the ends of the records."""
    records = []
    for inputs, targets, positions, ends in zip(*all_rows(samples), strict=True):
        assert ends[-1] == samples.seq_len
        assert (np.diff(ends) >= 0).all()
        for start, end in itertools.pairwise([0, *np.unique(ends).tolist()]):
            np.testing.assert_array_equal(positions[start:end], np.arange(end - start))
            row = list(zip(inputs[start:end].tolist(), targets[start:end].tolist(), strict=True))
            if any(target != IGNORE_INDEX for _, target in row):  # skip padding
                records.append(row)
    return records


def without_padding(row):
    """Return a row up to its last target, without the padding that follows."""
    while row[-1][1] == IGNORE_INDEX:
        row = row[:-1]
    return row


def jsonl(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return corpus_of(folder)


QUESTIONS = [
    {"prompt": f"what is {n} and {n}?" + " please" * (40 * (n % 4 == 3)), "completion": f" {n + n}"}
    for n in range(30)
]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("seq_len", [8, 64])
@pytest.mark.parametrize("form", ["running", "text", "prompt"])
def test_samples_equal_a_simple_implementation(
    form, seq_len, pack, tokenizer, tmp_path, monkeypatch
):
    """Compare the samples with the samples of a simple implementation. IDs outside the loss are not
    targets, and the last samples of a text are used for validation. The implementation under test
    splits documents into several pieces and tokenizes them in several batches."""
    monkeypatch.setattr(pieces, "_MIN_CHARACTERS", 3)
    monkeypatch.setattr(cache, "_BATCH_CHARACTERS", 500)
    corpus = make_corpus(validation=False)
    texts = corpus["train"][0].texts
    if form == "prompt":
        corpus = jsonl(tmp_path, QUESTIONS)
        records = [[(row["prompt"], False), (row["completion"], True)] for row in QUESTIONS]
    else:
        if form == "text":
            corpus = jsonl(tmp_path, [{"text": text} for text in texts])
        elif not pack:
            texts = [line for text in texts for line in text.splitlines() if line.strip()]
        records = [[(text, True)] for text in texts]
    blocks = []  # for each record, a list of (id, whether the id is in the loss)
    for record in records:
        block = []
        for text, trained in record:
            block += [(i, trained) for i in tokenizer.encode_texts([text])[0].tolist()]
        blocks.append([*block, (tokenizer.eos_id, True)])
    if pack and form == "running":  # tokens that do not fill the last block are dropped
        stream = [pair for block in blocks for pair in block]
        starts = range(0, len(stream) - seq_len, seq_len)
        blocks = [stream[start : start + seq_len + 1] for start in starts]
    elif pack and form == "text":  # a document that is longer than a block gives several records
        blocks = [b[at : at + seq_len + 1] for b in blocks for at in range(0, len(b) - 1, seq_len)]
    expected = []
    lengths = []
    for block in blocks:
        targets = [i if trained else IGNORE_INDEX for i, trained in block[1:]]
        row = [(i, target) for (i, _), target in zip(block, targets, strict=False)][:seq_len]
        if any(target != IGNORE_INDEX for _, target in row):  # otherwise the answer is truncated
            expected.append(row + [(tokenizer.eos_id, IGNORE_INDEX)] * (seq_len - len(row)))
            lengths.append(len(row))

    data = prepare(tmp_path / "cache", tokenizer, corpus, max_length=seq_len, pack=pack)
    num_left = len(expected) - max(1, round(0.05 * len(expected)))
    if form == "prompt":  # answers are held out at random
        order = np.random.default_rng(0).permutation(len(expected))
        order = [*sorted(order[:num_left]), *sorted(order[num_left:])]
        expected, lengths = ([values[i] for i in order] for values in (expected, lengths))
    num_tokens = sum(lengths[:num_left])
    if pack and form != "running":
        for samples, wanted in (
            (data.train, expected[:num_left]), (data.validation, expected[num_left:]),
        ):  # fmt: skip
            assert sorted(records_in(samples)) == sorted(map(without_padding, wanted))
    else:
        arrays = zip(all_rows(data.train), all_rows(data.validation), strict=True)
        rows = np.stack([np.concatenate(part) for part in arrays], axis=-1)
        np.testing.assert_array_equal(rows, expected)
        assert len(data.train) == num_left
    assert data.train.real_share == pytest.approx(num_tokens / (len(data.train) * seq_len))
    num_targets = (all_rows(data.train)[1] != IGNORE_INDEX).sum()
    assert data.train.num_targets.sum() == num_targets


def test_held_out_answers_are_not_those_of_one_topic(tokenizer, tmp_path):
    """The four records of a topic are neighbors. The choice depends on nothing but their number."""
    rows = [
        {"prompt": f"question {n % 4} on {n // 4}?", "completion": f" {n // 4}"} for n in range(120)
    ]
    corpus = jsonl(tmp_path / "rows", rows)
    runs = [prepare(tmp_path, tokenizer, corpus, seed=seed, max_length=32) for seed in (1, 2)]
    texts, again = (
        [tokenizer.decode([i for i, _ in record]) for record in records_in(run.validation)]
        for run in runs
    )
    assert texts == again
    assert len(texts) == 6
    assert len({text.rpartition(" on ")[2] for text in texts}) >= 5


def test_num_samples_takes_the_first_samples(tokenizer, tmp_path):
    whole = prepare(tmp_path, tokenizer)
    part = prepare(tmp_path, tokenizer, num_samples=5, eval_samples=2)
    for split, count in (("train", 5), ("validation", 2)):
        first = all_rows(getattr(whole, split))[0][:count]
        np.testing.assert_array_equal(all_rows(getattr(part, split))[0], first)


@pytest.mark.parametrize(
    ("train", "validation", "pack"),
    [(["a"], None, True), (["b"], [], False), (["word " * 99], ["b"], True)],
)
def test_too_little_text_is_refused(train, validation, pack, tokenizer, tmp_path):
    with refused("'made'", "16 tokens", " 0 validation ", "max_length"):
        prepare(tmp_path / "cache", tokenizer, in_memory(train, validation), pack=pack)
    unseen = [{"prompt": "so long " * 50, "completion": " yes"}] * 9
    with refused("'made'", " 0 training ", "max_length"):
        prepare(tmp_path / "cache", tokenizer, jsonl(tmp_path / "rows", unseen), pack=False)


def test_ids_above_16_bits_are_stored_correctly(tokenizer, tmp_path, monkeypatch):
    ids = [np.full(40, 69_999, np.int32)]
    facts = replace(tokenizer.facts, num_tokens=70_000)
    monkeypatch.setattr(tokenizer, "facts", facts)
    monkeypatch.setattr(Tokenizer, "encode_texts", lambda self, texts, **options: ids * len(texts))
    assert (all_rows(prepare(tmp_path, tokenizer).train)[0] == 69_999).any()


def cache_folders(tmp_path):
    return sorted(path for path in tmp_path.iterdir() if path.is_dir())


def test_cache_and_fingerprint_depend_on_content_and_settings(tokenizer, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = prepare(cache, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode_texts", None)
        cut_anew = [prepare(cache, tokenizer, **{key: 5}) for key in ("max_length", "num_samples")]
        assert prepare(cache, tokenizer, eval_samples=1).fingerprint == first.fingerprint
    shutil.copytree(tokenizer.folder, tmp_path / "fewer merges")
    file = tmp_path / "fewer merges" / "merges.txt"
    file.write_text(file.read_text().rstrip().rpartition("\n")[0] + "\n")
    others = [
        prepare(cache, tokenizer, make_corpus(validation=False)),
        prepare(cache, tokenizer, pack=False),
        prepare(cache, Tokenizer(file.parent)),
    ]
    assert len(cache_folders(cache)) == 1 + len(others)
    assert others[-1].fingerprint == first.fingerprint, "a merge that the text does not need"
    assert len({data.fingerprint for data in (first, *cut_anew, *others)}) == 5


@pytest.mark.parametrize("name", ["train-ids.bin", "meta.json"])
def test_a_damaged_cache_is_rebuilt(name, tokenizer, tmp_path):
    expected = all_rows(prepare(tmp_path, tokenizer, pack=False).train)[0]
    (folder,) = cache_folders(tmp_path)
    content = (folder / name).read_bytes()
    for damaged in (content[:-9], bytes([content[0] ^ 1]) + content[1:], None):
        (folder / name).unlink()
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        rebuilt = prepare(tmp_path, tokenizer, pack=False)
        np.testing.assert_array_equal(all_rows(rebuilt.train)[0], expected)
        assert (folder / name).read_bytes() == content
        assert cache_folders(tmp_path) == [folder]


def test_concurrent_runs_build_one_cache(tokenizer, tmp_path, monkeypatch):
    calls = []
    encode = tokenizer.encode_pieces

    def slowly(batch):
        calls.append(batch)
        time.sleep(0.2)
        return encode(batch)

    monkeypatch.setattr(tokenizer, "encode_pieces", slowly)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: all_rows(prepare(tmp_path, tokenizer).train), range(2))
    np.testing.assert_array_equal(first, second)
    assert len(calls) == 2, "one run tokenized the two splits"
    assert len(cache_folders(tmp_path)) == 1


def test_records_are_packed_unless_the_model_cannot_separate_them(tokenizer, tmp_path):
    corpus = jsonl(tmp_path, QUESTIONS)
    settings = build_config({"dataset": "made", "max_length": 64, "eval_samples": -1})
    folder = cache.tokenize(corpus, tokenizer, settings, tmp_path / "cache")
    packed = cut_samples(folder, tokenizer, settings)
    padded = cut_samples(folder, tokenizer, settings, can_pack=False)
    assert (packed.packs, padded.packs) == (True, False)
    assert packed.fingerprint != padded.fingerprint
    # The counts of a step equal the sums over the step's records.
    every = np.arange(len(packed.train))
    assert packed.train.count(every) == (padded.train.num_targets.sum(), padded.train.lengths.sum())
    forced = with_values(settings, pack=True)
    with refused("pack=True", "model="):
        cut_samples(folder, tokenizer, forced, can_pack=False)
