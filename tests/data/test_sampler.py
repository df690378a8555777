import math
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.data.samples import IGNORE_INDEX, NO_SAMPLE, Sampler, Samples
from distributed_training.models.attention import drop_empty

counts = dict.fromkeys(("micro_batch_size", "num_microbatches", "num_replicas"), st.integers(1, 4))
shapes = st.fixed_dictionaries(
    {"num_samples": st.integers(1, 60), "seed": st.integers(0, 2**31 - 1), **counts}
)


def samplers(shape):
    """Return one sampler per replica."""
    total = math.prod(shape[name] for name in counts)
    return [
        Sampler(global_batch_size=total, **shape, replica=replica)
        for replica in range(shape["num_replicas"])
    ]


def padded_samples(num_samples, seq_len=6):
    """Return samples of random lengths with random tokens. About 70% of the tokens are in the
    loss."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, seq_len + 1, num_samples)
    starts = np.concatenate([[0], np.cumsum(lengths + 1)])[:-1]
    tokens = random.integers(1, 500, int((lengths + 1).sum()))
    trained = random.random(len(tokens)) < 0.7
    ends = starts + lengths + 1
    counts = [trained[start + 1 : end].sum() for start, end in zip(starts, ends, strict=True)]
    return Samples(
        tokens, starts, lengths, seq_len, 0, np.array(counts), np.zeros_like(starts), trained
    )


def test_sample_order_equals_earlier_releases():
    """The order of samples is the same as in earlier releases. Otherwise, runs of those releases
    could not be repeated or resumed."""
    sampler, _ = samplers({"num_samples": 10, "seed": 42, **dict.fromkeys(counts, 2)})
    expected = [
        [[[5, 6], [0, 7]], [[3, 2], [4, 9]]],
        [[[1, 8], [NO_SAMPLE, NO_SAMPLE]], [[NO_SAMPLE, NO_SAMPLE], [NO_SAMPLE, NO_SAMPLE]]],
        [[[0, 8], [7, 4]], [[3, 1], [2, 9]]],  # next epoch, in another order
    ]
    for step, indices in enumerate(expected):
        np.testing.assert_array_equal(sampler.step_indices(step), indices)


@given(shapes, st.integers(0, 3))
@settings(deadline=None)
def test_an_epoch_holds_every_sample_once(shape, epoch):
    sampler = samplers(shape)[0]
    steps = sampler.steps_per_epoch
    assert steps == -(-shape["num_samples"] // sampler.global_batch_size)
    all_steps = [epoch * steps + step for step in range(steps)]
    used_indices = np.concatenate([sampler.step_indices(step).ravel() for step in all_steps])
    assert sorted(used_indices[used_indices != NO_SAMPLE]) == list(range(shape["num_samples"]))
    # Only the end of an epoch's last step is padded.
    assert (used_indices[: shape["num_samples"]] != NO_SAMPLE).all()


@given(shapes, st.integers(0, 50))
@settings(deadline=None)
def test_replicas_share_a_step_without_overlap(shape, step):
    samples = padded_samples(shape["num_samples"])
    replicas = samplers(shape)
    indices = replicas[0].step_indices(step)
    batches = [sampler.step_batch(samples, step) for sampler in replicas]
    assert all((sampler.step_indices(step) == indices).all() for sampler in replicas)
    num_targets = 0
    num_tokens = 0
    for replica, batch in enumerate(batches):
        assert len(batch.micro_batches) == shape["num_microbatches"]
        for number, (inputs, targets) in enumerate(batch.micro_batches):
            expected = indices[number, replica]
            np.testing.assert_array_equal((inputs, targets), samples.batch(expected))
            assert ((inputs == samples.padding_id) | (expected != NO_SAMPLE)[:, None]).all()
            assert ((targets == IGNORE_INDEX) | (expected != NO_SAMPLE)[:, None]).all()
            num_targets += int((targets != IGNORE_INDEX).sum())
            num_tokens += int((inputs != samples.padding_id).sum())
    assert {batch.num_targets for batch in batches} == {num_targets}
    assert {batch.num_tokens for batch in batches} == {num_tokens}


@given(shapes)
@settings(deadline=None)
def test_evaluation_covers_every_sample_once_in_as_many_calls(shape):
    # The sampler's indices also work for a validation set of another length.
    count = shape["num_samples"]
    other_samplers = samplers({**shape, "num_samples": 50})
    calls = [list(sampler.eval_indices(count)) for sampler in other_samplers]
    assert len({len(replica) for replica in calls}) == 1
    assert {micro.shape for replica in calls for micro in replica} == {(shape["micro_batch_size"],)}
    used_indices = np.concatenate([micro for replica in calls for micro in replica])
    assert sorted(used_indices[used_indices != NO_SAMPLE]) == list(range(count))


@given(shapes, st.integers(1, 3))
@settings(deadline=None)
def test_document_ends_of_every_micro_batch_fit(shape, num_epochs):
    samples = replace(padded_samples(8 * shape["num_samples"]), seq_len=20).packed()
    replicas = samplers({**shape, "num_samples": len(samples)})
    num_steps = num_epochs * replicas[0].steps_per_epoch
    max_documents = replicas[0].count_max_documents(samples, num_steps)
    counts = []
    for step in range(num_steps):
        for sampler in replicas:
            for *_, ends in sampler.step_batch(samples, step).micro_batches:
                flat = (ends + np.arange(len(ends))[:, None] * samples.seq_len).ravel()
                kept_ends = drop_empty(torch.tensor(flat), max_documents).numpy()
                assert len(kept_ends) == max_documents
                np.testing.assert_array_equal(np.unique(kept_ends), np.unique(flat))
                assert (np.diff(kept_ends) >= 0).all()
                counts.append(len(np.unique(flat)))
    # A block that is full has no padding, but `max_documents` counts padding in every block.
    assert max_documents - shape["micro_batch_size"] <= max(counts) <= max_documents
