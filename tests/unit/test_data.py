import itertools
import multiprocessing
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.config import build_config
from distributed_training.corpus import Corpus
from distributed_training.data import EMPTY, IGNORE_INDEX, Sampler, Samples, prepare_data
from distributed_training.tokenizer import EMBEDDED_DIR, Tokenizer
from tests.unit.conftest import refused

WORDS = ["the", "value", "of", "a", "function", "is", "returned", "when", "called", "by", "name"]


def make_corpus(num_texts=12, validation=True, records=False, seed=0):
    """Texts of several lines of random length, one line in five blank."""
    random = np.random.default_rng(seed)

    def text(index):
        lines = [
            " ".join(random.choice(WORDS, random.integers(1, 30))) if random.random() > 0.2 else " "
            for _ in range(6)
        ]
        return "\n".join([f"text {index}", *lines])

    texts = [text(index) for index in range(num_texts)]
    return Corpus(
        name="made",
        train=texts,
        validation=[text("v1"), text("v2")] if validation else None,
        records=records,
    )


def prepare(tmp_path, tokenizer, corpus=None, **config):
    settings = {"max_length": 16, "num_samples": -1, "eval_samples": -1, **config}
    return prepare_data(corpus or make_corpus(), tokenizer, build_config(settings), tmp_path)


def token_stream(tokenizer, texts):
    """The reference: each text's ids and end-of-text, in a row."""
    arrays = [[*tokenizer.encode_batch([text])[0], tokenizer.eos_id] for text in texts]
    return np.concatenate(arrays).astype(np.int64)


def all_rows(samples):
    return samples.batch(np.arange(len(samples)))


@pytest.mark.parametrize("seq_len", [2, 7, 16, 100])
def test_packing_makes_every_token_but_the_first_a_target_once(seq_len, tokenizer, tmp_path):
    corpus = make_corpus()
    data = prepare(tmp_path, tokenizer, corpus, max_length=seq_len)
    for samples, texts in ((data.train, corpus.train), (data.validation, corpus.validation)):
        stream = token_stream(tokenizer, texts)
        used = (len(stream) - 1) // seq_len * seq_len  # what does not fill a block is left out
        inputs, targets = all_rows(samples)
        assert inputs.shape == targets.shape == (used // seq_len, seq_len)
        np.testing.assert_array_equal(inputs.ravel(), stream[:used])
        np.testing.assert_array_equal(targets.ravel(), stream[1 : used + 1])
        assert samples.real_share == 1.0


@pytest.mark.parametrize(("records", "seq_len"), [(False, 16), (True, 80)])
def test_padded_samples_are_lines_or_records(records, seq_len, tokenizer, tmp_path):
    corpus = make_corpus(records=records)
    data = prepare(tmp_path, tokenizer, corpus, pack=False, max_length=seq_len)
    texts = corpus.train
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
    total = (len(token_stream(tokenizer, corpus.train)) - 1) // 16
    assert len(data.train) + len(data.validation) == total
    assert len(data.validation) == round(0.05 * total) > 1
    joined = np.concatenate([all_rows(data.train)[0], all_rows(data.validation)[0]]).ravel()
    np.testing.assert_array_equal(joined, token_stream(tokenizer, corpus.train)[: total * 16])


def test_num_samples_takes_the_first(tokenizer, tmp_path):
    whole = prepare(tmp_path, tokenizer)
    part = prepare(tmp_path, tokenizer, num_samples=5, eval_samples=2)
    assert (len(part.train), len(part.validation)) == (5, 2)
    np.testing.assert_array_equal(all_rows(part.train)[0], all_rows(whole.train)[0][:5])
    np.testing.assert_array_equal(all_rows(part.validation)[0], all_rows(whole.validation)[0][:2])


def test_num_samples_beyond_the_data(tokenizer, tmp_path):
    count = len(prepare(tmp_path, tokenizer).train)
    assert len(prepare(tmp_path, tokenizer, num_samples=count).train) == count
    with refused(f"num_samples={count + 1}", f"has {count} training", f"at most {count}", "-1"):
        prepare(tmp_path, tokenizer, num_samples=count + 1)


def test_num_samples_zero_never_gets_here():
    with refused("num_samples=0"):
        build_config({"num_samples": 0})


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("pack", [True, False])
def test_a_text_too_short_for_one_sample(validation, pack, tokenizer, tmp_path):
    texts = ["a"] if pack or not validation else []
    corpus = Corpus(
        name="short", train=texts, validation=["b" * 99] if validation else None, records=False
    )
    with refused("dataset='short' is too short", "16 tokens", "smaller max_length"):
        prepare(tmp_path, tokenizer, corpus, pack=pack)


def test_no_validation_text_is_too_short(tokenizer, tmp_path):
    corpus = Corpus(name="short", train=["word " * 99], validation=["b"], records=False)
    with refused("leave", "0 to validate on"):
        prepare(tmp_path, tokenizer, corpus)


def test_ids_beyond_16_bits_survive(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "num_tokens", 70_000)
    monkeypatch.setattr(
        tokenizer, "encode_batch", lambda texts: [np.full(40, 69_999, np.int32) for _ in texts]
    )
    assert (all_rows(prepare(tmp_path, tokenizer).train)[0] == 69_999).any()


def cache_folders(tmp_path):
    return sorted(path for path in tmp_path.iterdir() if path.is_dir())


def test_cache_is_reused(tokenizer, tmp_path, monkeypatch):
    first = prepare(tmp_path, tokenizer)

    def encode_batch(_):
        raise AssertionError("tokenised twice")

    monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
    second = prepare(tmp_path, tokenizer)
    np.testing.assert_array_equal(all_rows(first.train)[0], all_rows(second.train)[0])
    assert first.fingerprint == second.fingerprint
    prepare(tmp_path, tokenizer, max_length=32, num_samples=3)  # cut anew, not tokenised anew
    assert len(cache_folders(tmp_path)) == 1
    with pytest.raises(AssertionError, match="tokenised twice"):
        prepare(tmp_path, tokenizer, pack=False)


def test_cache_is_keyed_by_content_and_settings(tokenizer, tmp_path):
    corpus = make_corpus()
    variants = [
        (corpus, {}),
        (make_corpus(seed=1), {}),
        (make_corpus(validation=False), {}),
        (corpus, {"pack": False}),
        (make_corpus(records=True), {"pack": False}),
    ]
    for count, (text, config) in enumerate(variants, 1):
        prepare(tmp_path, tokenizer, text, **config)
        assert len(cache_folders(tmp_path)) == count


def test_cache_is_keyed_by_tokenizer(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "other")
    vocabulary = (tmp_path / "other" / "vocab.json").read_text()
    (tmp_path / "other" / "vocab.json").write_text(vocabulary + "\n")
    prepare(tmp_path / "cache", tokenizer)
    prepare(tmp_path / "cache", Tokenizer(tmp_path / "other"))
    assert len(cache_folders(tmp_path / "cache")) == 2


@pytest.mark.parametrize("keep", [0, 5, 60, 0.5, 0.99, None])
@pytest.mark.parametrize("name", ["train-tokens.npy", "validation-starts.npy"])
def test_a_cache_that_was_cut_off_is_made_anew(name, keep, tokenizer, tmp_path, caplog):
    first = prepare(tmp_path, tokenizer, pack=False)
    expected = all_rows(first.train)[0]
    (folder,) = cache_folders(tmp_path)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if keep is not None:
        length = keep if isinstance(keep, int) else int(keep * len(content))
        (folder / name).write_bytes(content[:length])
    again = prepare(tmp_path, tokenizer, pack=False)
    np.testing.assert_array_equal(all_rows(again.train)[0], expected)
    assert (folder / name).read_bytes() == content
    assert cache_folders(tmp_path) == [folder]
    assert str(folder / name) in caplog.text


def test_a_failed_tokenisation_leaves_no_cache(tokenizer, tmp_path, monkeypatch):
    def encode_batch(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode_batch", encode_batch)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, tokenizer)
    assert cache_folders(tmp_path) == []
    assert len(prepare(tmp_path, tokenizer).train) > 0


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

        def encode_batch(self, texts):
            SlowTokenizer.calls += 1
            time.sleep(0.3)
            return super().encode_batch(texts)

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


shapes = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 60),
        "micro_batch_size": st.integers(1, 4),
        "grad_accum_steps": st.integers(1, 4),
        "dp_size": st.integers(1, 4),
        "seed": st.integers(0, 2**31 - 1),
    }
)


def samplers(shape):
    return [Sampler(**shape, dp_rank=rank) for rank in range(shape["dp_size"])]


def padded_samples(num_samples, seed=0, seq_len=6):
    """Samples of random lengths over random tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, seq_len + 1, num_samples)
    starts = np.concatenate([[0], np.cumsum(lengths + 1)])[:-1]
    tokens = random.integers(1, 500, int((lengths + 1).sum()))
    return Samples(tokens, starts, lengths, seq_len, 0)


@given(shapes, st.integers(0, 3))
@settings(deadline=None)
def test_an_epoch_holds_every_sample_once(shape, epoch):
    sampler = samplers(shape)[0]
    steps = sampler.steps_per_epoch
    seen = np.concatenate(
        [sampler.step_indices(epoch * steps + step).ravel() for step in range(steps)]
    )
    assert sorted(seen[seen != EMPTY]) == list(range(shape["num_samples"]))
    # only the last step has empty places, and they are at its end
    full = shape["num_samples"] // sampler.global_batch_size * sampler.global_batch_size
    assert (seen[:full] != EMPTY).all()
    assert steps == -(-shape["num_samples"] // sampler.global_batch_size)


@given(shapes, st.integers(0, 50))
@settings(deadline=None)
def test_ranks_share_a_step_without_overlap(shape, step):
    samples = padded_samples(shape["num_samples"])
    ranks = samplers(shape)
    indices = ranks[0].step_indices(step)
    batches = [sampler.step_batch(samples, step) for sampler in ranks]
    assert all((sampler.step_indices(step) == indices).all() for sampler in ranks)
    for rank, batch in enumerate(batches):
        assert len(batch.micro_batches) == shape["grad_accum_steps"]
        for number, (inputs, targets) in enumerate(batch.micro_batches):
            expected = samples.batch(indices[number, rank])
            np.testing.assert_array_equal(inputs, expected[0])
            np.testing.assert_array_equal(targets, expected[1])
            assert inputs.shape == (shape["micro_batch_size"], samples.seq_len)
    brute_force = sum(
        int((targets != IGNORE_INDEX).sum())
        for batch in batches
        for _, targets in batch.micro_batches
    )
    assert {batch.num_targets for batch in batches} == {brute_force}


@given(st.integers(1, 60), st.sampled_from([1, 2, 4, 6, 8, 12]), st.integers(0, 50))
@settings(deadline=None)
def test_a_step_depends_on_the_global_batch_and_not_on_its_split(num_samples, total, step):
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    splits = [s for s in itertools.product(divisors, repeat=3) if np.prod(s) == total]
    contents = {
        tuple(
            sorted(
                Sampler(
                    num_samples=num_samples,
                    micro_batch_size=micro,
                    grad_accum_steps=accum,
                    dp_size=dp,
                    dp_rank=0,
                    seed=3,
                )
                .step_indices(step)
                .ravel()
            )
        )
        for micro, accum, dp in splits
    }
    assert len(contents) == 1


def make_sampler(seed=1, **changes):
    values = dict(num_samples=50, micro_batch_size=2, grad_accum_steps=2, dp_size=2, dp_rank=0)
    return Sampler(**{**values, **changes}, seed=seed)


def test_the_order_differs_by_epoch_and_by_seed():
    sampler = make_sampler()
    first, second = sampler.step_indices(0), sampler.step_indices(sampler.steps_per_epoch)
    assert not (first == second).all()
    assert not (first == make_sampler(seed=2).step_indices(0)).all()
    assert not (np.sort(first.ravel()) == np.arange(8)).all()


def test_the_position_is_the_step():
    """A sampler made anew at step k goes on as the one that did k steps."""
    old = make_sampler()
    history = [old.step_indices(step) for step in range(20)]
    new = make_sampler()
    for step in range(13, 20):
        np.testing.assert_array_equal(new.step_indices(step), history[step])


@given(shapes)
@settings(deadline=None)
def test_evaluation_covers_every_sample_once_in_as_many_calls(shape):
    calls = [list(sampler.eval_indices()) for sampler in samplers(shape)]
    assert len({len(rank) for rank in calls}) == 1
    assert {micro.shape for rank in calls for micro in rank} == {(shape["micro_batch_size"],)}
    seen = np.concatenate([micro for rank in calls for micro in rank])
    assert sorted(seen[seen != EMPTY]) == list(range(shape["num_samples"]))


def test_empty_places_hold_padding_and_no_target():
    samples = padded_samples(3)
    inputs, targets = samples.batch(np.array([EMPTY, 1]))
    assert (inputs[0] == samples.padding_id).all()
    assert (targets[0] == IGNORE_INDEX).all()
    assert samples.count_targets(np.array([EMPTY, 1])) == samples.lengths[1]
    assert samples.count_targets(np.array([EMPTY])) == 0


def test_taking_copies_no_tokens():
    samples = padded_samples(10)
    part = samples.take(3, 6)
    assert part.tokens is samples.tokens
    np.testing.assert_array_equal(all_rows(part)[0], all_rows(samples)[0][3:6])


def test_full_steps_are_those_without_an_empty_place():
    sampler = Sampler(
        num_samples=10, micro_batch_size=2, grad_accum_steps=2, dp_size=1, dp_rank=0, seed=0
    )
    for step in range(9):
        assert sampler.is_full(step) == bool((sampler.step_indices(step) != -1).all())
