import json
import multiprocessing
import time

import numpy as np
import pytest

from distributed_training.data.corpus import Corpus, Source, read_corpus
from distributed_training.data.pieces import RUNNING
from distributed_training.data.samples import EMPTY, IGNORE_INDEX, prepare_data
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
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

    def text(index):
        lines = [
            " ".join(random.choice(WORDS, random.integers(1, 30))) if random.random() > 0.2 else " "
            for _ in range(6)
        ]
        return "\n".join([f"text {index}", *lines])

    texts = [text(index) for index in range(num_texts)]
    held_out = [text("v1"), text("v2")] if validation else None
    return in_memory(texts, held_out)


def prepare(tmp_path, tokenizer, corpus=None, **config):
    settings = {"max_length": 16, "num_samples": -1, "eval_samples": -1, **config}
    return prepare_data(corpus or make_corpus(), tokenizer, build_config(settings), tmp_path)


def token_stream(tokenizer, texts):
    """The reference: each text's ids and end-of-text, in a row."""
    arrays = [[*tokenizer.encode_batch([text])[0], tokenizer.eos_id] for text in texts]
    return np.concatenate(arrays).astype(np.int64)


def all_rows(samples):
    return samples.batch(np.arange(len(samples)))


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
        file = tmp_path / "a.jsonl"
        file.write_text("\n".join(json.dumps({"text": text}) for text in [*texts, "the end"]))
        corpus = read_corpus(str(file))
    data = prepare(tmp_path / "cache", tokenizer, corpus, pack=False, max_length=seq_len)
    if not records:
        texts = [line for text in texts for line in text.splitlines() if line.strip()]
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
    monkeypatch.setattr(tokenizer, "num_tokens", 70_000)
    monkeypatch.setattr(
        tokenizer,
        "encode_batch",
        lambda texts, marks: [np.full(40, 69_999, np.int32) for _ in texts],
    )
    assert (all_rows(prepare(tmp_path, tokenizer).train)[0] == 69_999).any()


def test_empty_places_hold_padding_and_no_target():
    samples = padded_samples(3)
    inputs, targets = samples.batch(np.array([EMPTY, 1]))
    assert (inputs[0] == samples.padding_id).all()
    assert (targets[0] == IGNORE_INDEX).all()
    assert (targets[1] != IGNORE_INDEX).sum() == samples.lengths[1]


def cache_folders(tmp_path):
    return sorted(path for path in tmp_path.iterdir() if path.is_dir())


def test_cache_is_reused_until_content_or_settings_change(tokenizer, tmp_path, monkeypatch):
    first = prepare(tmp_path, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode_batch", None)
        second = prepare(tmp_path, tokenizer)
        prepare(tmp_path, tokenizer, max_length=32, num_samples=3)  # cut anew, not tokenised anew
    np.testing.assert_array_equal(all_rows(first.train)[0], all_rows(second.train)[0])
    assert first.fingerprint == second.fingerprint
    tokenizer.save(tmp_path / "other")
    vocabulary = (tmp_path / "other" / "vocab.json").read_text()
    (tmp_path / "other" / "vocab.json").write_text(vocabulary + "\n")
    for count, (other_tokenizer, corpus, config) in enumerate(
        [
            (tokenizer, make_corpus(seed=1), {}),
            (tokenizer, make_corpus(validation=False), {}),
            (tokenizer, None, {"pack": False}),
            (Tokenizer(tmp_path / "other"), None, {}),
        ],
        start=3,  # the first, and the tokenizer's
    ):
        prepare(tmp_path, other_tokenizer, corpus, **config)
        assert len(cache_folders(tmp_path)) == count


@pytest.mark.parametrize("keep", [0, 0.99, None, "but a bit"])
@pytest.mark.parametrize("name", ["train-ids.bin", "validation-starts.bin", "meta.json"])
def test_a_damaged_cache_is_rebuilt(name, keep, tokenizer, tmp_path, caplog):
    first = prepare(tmp_path, tokenizer, pack=False)
    expected = all_rows(first.train)[0]
    (folder,) = cache_folders(tmp_path)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if keep == "but a bit":
        (folder / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif keep is not None:
        length = keep if isinstance(keep, int) else int(keep * len(content))
        (folder / name).write_bytes(content[:length])
    again = prepare(tmp_path, tokenizer, pack=False)
    np.testing.assert_array_equal(all_rows(again.train)[0], expected)
    assert (folder / name).read_bytes() == content
    assert cache_folders(tmp_path) == [folder]
    assert str(folder) in caplog.text


def test_fingerprint_changes_with_what_is_trained_on(tokenizer, tmp_path):
    corpus = make_corpus()
    fingerprints = [
        prepare(tmp_path, tokenizer, corpus, **config).fingerprint
        for config in ({}, {"max_length": 8}, {"num_samples": 5}, {"pack": False})
    ]
    fingerprints.append(prepare(tmp_path, tokenizer, make_corpus(seed=1)).fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)
    assert prepare(tmp_path, tokenizer, corpus, eval_samples=1).fingerprint == fingerprints[0]


def race(folder, barrier, answers):
    """One of two processes that want the same corpus at the same moment."""

    class SlowTokenizer(Tokenizer):
        calls = 0

        def encode_batch(self, texts, *, marks):
            SlowTokenizer.calls += 1
            time.sleep(0.3)
            return super().encode_batch(texts, marks=marks)

    tokenizer = SlowTokenizer(EMBEDDED_DIR)
    barrier.wait(60)
    inputs, _ = all_rows(prepare(folder, tokenizer).train)
    answers.put((SlowTokenizer.calls, inputs))


def test_two_processes_make_one_cache(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    barrier, answers = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=race, args=(tmp_path, barrier, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    (calls_1, inputs_1), (calls_2, inputs_2) = (answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted([calls_1, calls_2]) == [0, 2]  # one process tokenised the two splits
    np.testing.assert_array_equal(inputs_1, inputs_2)
    assert len(cache_folders(tmp_path)) == 1


QUESTIONS = [
    {"prompt": f"what is {n} and {n}?" + " please" * (40 * (n % 4 == 3)), "completion": f" {n + n}"}
    for n in range(30)
]


def answers(tmp_path, rows=QUESTIONS):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return read_corpus(str(file))


def answer_stream(tokenizer):
    """The reference: (ids, whether each is learnt) of every record, with its end-of-text."""
    rows = []
    for row in QUESTIONS:
        prompt, completion = tokenizer.encode_batch([row["prompt"], row["completion"]])
        learnt = [False] * len(prompt) + [True] * (len(completion) + 1)
        rows.append(([*prompt, *completion, tokenizer.eos_id], learnt))
    return rows


@pytest.mark.parametrize("seq_len", [8, 64])
def test_packed_answers_are_the_only_targets(seq_len, tokenizer, tmp_path):
    data = prepare(tmp_path / "cache", tokenizer, answers(tmp_path), max_length=seq_len)
    pairs = [pair for row in answer_stream(tokenizer) for pair in zip(*row, strict=True)]
    ids, learnt = (np.array(part) for part in zip(*pairs, strict=True))
    blocks = []
    for first in range(0, len(ids) - seq_len, seq_len):
        wanted = np.where(learnt, ids, IGNORE_INDEX)[first + 1 : first + seq_len + 1]
        if (wanted != IGNORE_INDEX).any():  # a block of a prompt alone teaches nothing
            blocks.append((ids[first : first + seq_len], wanted))
    inputs, targets = (
        np.concatenate([all_rows(data.train)[place], all_rows(data.validation)[place]])
        for place in (0, 1)
    )
    np.testing.assert_array_equal(inputs, [block for block, _ in blocks])
    np.testing.assert_array_equal(targets, [wanted for _, wanted in blocks])
    if seq_len == 8:
        assert len(blocks) < (len(ids) - 1) // seq_len  # some were left out


@pytest.mark.parametrize("seq_len", [8, 64])
def test_padded_answers_are_the_only_targets(seq_len, tokenizer, tmp_path):
    corpus = answers(tmp_path)
    data = prepare(tmp_path / "cache", tokenizer, corpus, pack=False, max_length=seq_len)
    expected = []
    for ids, learnt in answer_stream(tokenizer):
        wanted = np.where(learnt, ids, IGNORE_INDEX)[1 : seq_len + 1]
        if (wanted != IGNORE_INDEX).any():
            expected.append(
                np.pad(wanted, (0, seq_len - len(wanted)), constant_values=IGNORE_INDEX)
            )
    found = np.concatenate([all_rows(data.train)[1], all_rows(data.validation)[1]])
    np.testing.assert_array_equal(found, expected)
    assert len(expected) < len(QUESTIONS) or seq_len == 64


@pytest.mark.parametrize("pack", [True, False])
def test_every_step_counts_exactly_the_targets_that_it_has(pack, tokenizer, tmp_path):
    """Under every cut of the global batch, and none has no target: the loss is divided by it."""
    config = {"max_length": 24, "pack": pack}
    samples = prepare(tmp_path / "cache", tokenizer, answers(tmp_path), **config).train
    assert (samples.num_targets > 0).all()
    for step in range(40):
        counts = set()
        for micro, number, replicas in [(1, 2, 2), (2, 2, 1), (4, 1, 1), (2, 1, 2)]:
            ranks = [
                make_sampler(
                    num_samples=len(samples), micro_batch_size=micro, num_microbatches=number,
                    num_replicas=replicas, replica=replica,
                ).step_batch(samples, step)
                for replica in range(replicas)
            ]  # fmt: skip
            real = [targets for rank in ranks for _, targets in rank.micro_batches]
            counts |= {rank.num_targets for rank in ranks}
            counts.add(sum(int((targets != IGNORE_INDEX).sum()) for targets in real))
            assert {rank.num_tokens for rank in ranks} == {ranks[0].num_tokens}
            assert ranks[0].num_tokens > ranks[0].num_targets
        assert len(counts) == 1
        assert counts != {0}
    assert samples.learnt_share == pytest.approx(
        (all_rows(samples)[1] != IGNORE_INDEX).sum() / samples.lengths.sum()
    )


def test_answers_that_nobody_sees_are_no_data(tokenizer, tmp_path):
    corpus = answers(tmp_path, [{"prompt": "so long " * 50, "completion": " yes"}] * 9)
    with refused("too short", "gives 0 for training"):
        prepare(tmp_path / "cache", tokenizer, corpus, pack=False)
