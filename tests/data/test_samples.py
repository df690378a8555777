import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from distributed_training.data.corpus import Corpus, Source, read_corpus
from distributed_training.data.pieces import RUNNING
from distributed_training.data.samples import EMPTY, IGNORE_INDEX, prepare_data
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.config import build_config
from tests.data.test_sampler import make_sampler, padded_samples
from tests.support import refused

WORDS = ["the", "value", "of", "a", "function", "is", "returned", "when", "called", "by", "name"]


def in_memory(train, validation=None, name="made"):
    """A corpus of running text."""
    train, held_out = (
        None if texts is None else Source(form=RUNNING, texts=tuple(texts))
        for texts in (train, validation)
    )
    return Corpus(name=name, train=train, validation=held_out)


def make_corpus(num_texts=12, validation=True, seed=0):
    """Texts of several lines of random length, one line in five blank."""
    random = np.random.default_rng(seed)
    texts = []
    for index in range(num_texts + 2):
        sizes = np.where(random.random(6) > 0.2, random.integers(1, 30, 6), 0)
        lines = [" ".join(random.choice(WORDS, size)) or " " for size in sizes]
        texts.append("\n".join([f"text {index}", *lines]))
    return in_memory(texts[2:], texts[:2] if validation else None)


def prepare(tmp_path, tokenizer, corpus=None, **config):
    settings = {"max_length": 16, "num_samples": -1, "eval_samples": -1, **config}
    return prepare_data(corpus or make_corpus(), tokenizer, build_config(settings), tmp_path)


def token_stream(tokenizer, texts):
    """The reference: each text's ids and end-of-text, in a row."""
    arrays = [[*tokenizer.encode_batch([text])[0], tokenizer.eos_id] for text in texts]
    return np.concatenate(arrays).astype(np.int64)


def all_rows(samples):
    return samples.batch(np.arange(len(samples)))


def jsonl(folder, rows):
    file = folder / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return read_corpus(str(file))


@pytest.mark.parametrize("seq_len", [7, 100])
def test_packing_makes_every_token_but_the_first_a_target_once(seq_len, tokenizer, tmp_path):
    corpus = make_corpus()
    data = prepare(tmp_path, tokenizer, corpus, max_length=seq_len)
    for samples, source in ((data.train, corpus.train), (data.validation, corpus.validation)):
        stream = token_stream(tokenizer, source.texts)
        used = (len(stream) - 1) // seq_len * seq_len  # what does not fill a block is left out
        inputs, targets = all_rows(samples)
        assert inputs.shape == targets.shape == (used // seq_len, seq_len)
        np.testing.assert_array_equal(inputs.ravel(), stream[:used])
        np.testing.assert_array_equal(targets.ravel(), stream[1 : used + 1])
        assert samples.real_share == 1.0


@pytest.mark.parametrize(("records", "seq_len"), [(False, 16), (True, 80)])
def test_padded_samples_are_lines_or_records(records, seq_len, tokenizer, tmp_path):
    corpus = make_corpus()
    texts = corpus.train.texts
    if records:
        corpus = jsonl(tmp_path, [{"text": text} for text in [*texts, "the end"]])
    else:
        texts = [line for text in texts for line in text.splitlines() if line.strip()]
    data = prepare(tmp_path / "cache", tokenizer, corpus, pack=False, max_length=seq_len)
    inputs, targets = all_rows(data.train)
    assert len(inputs) == len(texts)
    real = 0
    for row, text in enumerate(texts):
        ids = token_stream(tokenizer, [text])  # with its end-of-text
        length = min(len(ids) - 1, seq_len)
        np.testing.assert_array_equal(inputs[row, :length], ids[:length])
        np.testing.assert_array_equal(targets[row, :length], ids[1 : length + 1])
        assert (inputs[row, length:] == tokenizer.eos_id).all()
        assert (targets[row, length:] == IGNORE_INDEX).all()
        real += length
    assert data.train.real_share == pytest.approx(real / inputs.size)
    assert 0 < data.train.real_share < 1


def test_a_source_without_a_split_gives_its_end(tokenizer, tmp_path):
    corpus = make_corpus(num_texts=60, validation=False)
    data = prepare(tmp_path, tokenizer, corpus)
    total = (len(token_stream(tokenizer, corpus.train.texts)) - 1) // 16
    assert len(data.train) + len(data.validation) == total
    assert len(data.validation) == round(0.05 * total) > 1
    joined = np.concatenate([all_rows(data.train)[0], all_rows(data.validation)[0]]).ravel()
    np.testing.assert_array_equal(joined, token_stream(tokenizer, corpus.train.texts)[: total * 16])


def test_num_samples_takes_the_first_and_no_more_than_there_are(tokenizer, tmp_path):
    whole = prepare(tmp_path, tokenizer)
    part = prepare(tmp_path, tokenizer, num_samples=5, eval_samples=2)
    assert (len(part.train), len(part.validation)) == (5, 2)
    np.testing.assert_array_equal(all_rows(part.train)[0], all_rows(whole.train)[0][:5])
    np.testing.assert_array_equal(all_rows(part.validation)[0], all_rows(whole.validation)[0][:2])
    count = len(whole.train)
    assert len(prepare(tmp_path, tokenizer, num_samples=count).train) == count
    with refused(
        f"num_samples={count + 1}", f"gives {count} for training", f"at most {count}", "-1"
    ):
        prepare(tmp_path, tokenizer, num_samples=count + 1)


@pytest.mark.parametrize(
    ("train", "validation", "pack"),
    [(["a"], None, True), (["b"], [], False), (["word " * 99], ["b"], True)],
)
def test_too_little_text_is_refused(train, validation, pack, tokenizer, tmp_path):
    corpus = in_memory(train, validation, name="short")
    with refused("dataset='short' is too short", "16 tokens", " 0 for ", "smaller max_length"):
        prepare(tmp_path, tokenizer, corpus, pack=pack)


def test_ids_beyond_16_bits_survive(tokenizer, tmp_path, monkeypatch):
    def encode(texts, marks):
        return [np.full(40, 69_999, np.int32) for _ in texts]

    monkeypatch.setattr(tokenizer, "num_tokens", 70_000)
    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    assert (all_rows(prepare(tmp_path, tokenizer).train)[0] == 69_999).any()


def test_empty_places_hold_padding_and_no_target():
    samples = padded_samples(3)
    inputs, targets = samples.batch(np.array([EMPTY, 1]))
    assert (inputs[0] == samples.padding_id).all()
    assert (targets[0] == IGNORE_INDEX).all()
    assert (targets[1] != IGNORE_INDEX).sum() == samples.lengths[1]


def cache_folders(tmp_path):
    return sorted(path for path in tmp_path.iterdir() if path.is_dir())


def test_cache_and_fingerprint_are_of_content_and_settings(tokenizer, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = prepare(cache, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode_batch", None)
        second = prepare(cache, tokenizer, eval_samples=1)
        cut_anew = [prepare(cache, tokenizer, **{key: 5}) for key in ("max_length", "num_samples")]
    np.testing.assert_array_equal(all_rows(first.train)[0], all_rows(second.train)[0])
    assert first.fingerprint == second.fingerprint
    for name in ("vocab.json", "merges.txt"):
        tokenizer.save(tmp_path / name)
        file = tmp_path / name / name
        content = file.read_text().rstrip()
        if name == "merges.txt":
            content = content.rpartition("\n")[0]  # without the last merge
        file.write_text(f"{content}\n")
    others = [
        prepare(cache, tokenizer, make_corpus(seed=1)),
        prepare(cache, tokenizer, make_corpus(validation=False)),
        prepare(cache, tokenizer, pack=False),
        prepare(cache, Tokenizer(tmp_path / "vocab.json")),
        prepare(cache, Tokenizer(tmp_path / "merges.txt")),
    ]
    assert len(cache_folders(cache)) == 1 + len(others)
    assert len({data.fingerprint for data in (first, *cut_anew, *others)}) == 8


@pytest.mark.parametrize("damage", ["missing", "cut", "but a bit"])
@pytest.mark.parametrize("name", ["train-ids.bin", "validation-starts.bin", "meta.json"])
def test_a_damaged_cache_is_rebuilt(name, damage, tokenizer, tmp_path, caplog):
    expected = all_rows(prepare(tmp_path, tokenizer, pack=False).train)[0]
    (folder,) = cache_folders(tmp_path)
    content = (folder / name).read_bytes()
    if damage == "missing":
        (folder / name).unlink()
    else:
        parts = {"cut": content[:-9], "but a bit": bytes([content[0] ^ 1]) + content[1:]}
        (folder / name).write_bytes(parts[damage])
    again = prepare(tmp_path, tokenizer, pack=False)
    np.testing.assert_array_equal(all_rows(again.train)[0], expected)
    assert (folder / name).read_bytes() == content
    assert cache_folders(tmp_path) == [folder]
    assert str(folder) in caplog.text


def test_two_runs_make_one_cache(tokenizer, tmp_path, monkeypatch):
    calls = []
    encode = tokenizer.encode_batch

    def slowly(texts, *, marks):
        calls.append(texts)
        time.sleep(0.2)
        return encode(texts, marks=marks)

    monkeypatch.setattr(tokenizer, "encode_batch", slowly)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(prepare, tmp_path, tokenizer) for _ in range(2)]
    first, second = (all_rows(run.result().train) for run in runs)
    np.testing.assert_array_equal(first, second)
    assert len(calls) == 2, "one run tokenised the two splits"
    assert len(cache_folders(tmp_path)) == 1


QUESTIONS = [
    {"prompt": f"what is {n} and {n}?" + " please" * (40 * (n % 4 == 3)), "completion": f" {n + n}"}
    for n in range(30)
]


def answer_stream(tokenizer):
    """The reference: (ids, targets or IGNORE_INDEX) of every record, with its end-of-text."""
    rows = []
    for row in QUESTIONS:
        prompt, completion = tokenizer.encode_batch([row["prompt"], row["completion"]])
        answer = [*completion, tokenizer.eos_id]
        rows.append(([*prompt, *answer], [IGNORE_INDEX] * len(prompt) + answer))
    return rows


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("seq_len", [8, 64])
def test_answers_are_the_only_targets(seq_len, pack, tokenizer, tmp_path):
    corpus = jsonl(tmp_path, QUESTIONS)
    data = prepare(tmp_path / "cache", tokenizer, corpus, max_length=seq_len, pack=pack)
    blocks = answer_stream(tokenizer)
    if pack:
        ids, wanted = (np.concatenate(part) for part in zip(*blocks, strict=True))
        starts = range(0, len(ids) - seq_len, seq_len)
        blocks = [(ids[i : i + seq_len + 1], wanted[i : i + seq_len + 1]) for i in starts]
    expected = []
    for ids, wanted in blocks:
        row = [*zip(ids[:-1], wanted[1:], strict=True)][:seq_len]
        if any(target != IGNORE_INDEX for _, target in row):  # a prompt alone teaches nothing
            expected.append(row + [(tokenizer.eos_id, IGNORE_INDEX)] * (seq_len - len(row)))
    parts = zip(all_rows(data.train), all_rows(data.validation), strict=True)
    found = np.stack([np.concatenate(part) for part in parts], axis=-1)
    np.testing.assert_array_equal(found, expected)
    assert len(expected) < len(blocks) or seq_len == 64  # some were left out


@pytest.mark.parametrize("pack", [True, False])
def test_every_step_counts_exactly_the_targets_that_it_has(pack, tokenizer, tmp_path):
    """And none has no target: the loss is divided by it."""
    config = {"max_length": 24, "pack": pack}
    samples = prepare(tmp_path / "cache", tokenizer, jsonl(tmp_path, QUESTIONS), **config).train
    for step in range(20):
        samplers = [make_sampler(num_samples=len(samples), replica=replica) for replica in (0, 1)]
        ranks = [sampler.step_batch(samples, step) for sampler in samplers]
        real = [targets for rank in ranks for _, targets in rank.micro_batches]
        count = sum(int((targets != IGNORE_INDEX).sum()) for targets in real)
        assert {rank.num_targets for rank in ranks} == {count}
        assert count > 0
        assert {rank.num_tokens for rank in ranks} == {ranks[0].num_tokens}
        assert ranks[0].num_tokens > count
    assert samples.learnt_share == pytest.approx(
        (all_rows(samples)[1] != IGNORE_INDEX).sum() / samples.lengths.sum()
    )


def test_answers_that_nobody_sees_are_no_data(tokenizer, tmp_path):
    corpus = jsonl(tmp_path, [{"prompt": "so long " * 50, "completion": " yes"}] * 9)
    with refused("too short", "gives 0 for training"):
        prepare(tmp_path / "cache", tokenizer, corpus, pack=False)
