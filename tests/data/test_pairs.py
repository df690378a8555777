"""Test the pairs of answers of preference tuning: forms of records, samples and counts."""

import dataclasses
import json

import numpy as np
import pytest

from distributed_training.data import report
from distributed_training.data.cache import tokenize
from distributed_training.data.chats.prepare import IDENTICAL, NO_ANSWER
from distributed_training.data.chats.records import ANSWERS, read_record
from distributed_training.data.corpus import find_corpus
from distributed_training.data.samples import IGNORE_INDEX, cut_samples
from distributed_training.settings.request import build_config
from tests.support import refused

COLUMNS = dict(zip(ANSWERS, ANSWERS, strict=True))
USER = {"role": "user", "content": "2+2="}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "5"))
SYSTEM = {"role": "system", "content": "s"}
ORCA = {"system": "s", "question": "2+2=", "chosen": "4", "rejected": "5"}


def roles(message):
    return {"from": {"user": "human", "assistant": "gpt"}[message["role"]],
            "value": message["content"]}  # fmt: skip


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, [USER]),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        # UltraFeedback
        (
            {"prompt": "2+2=", "prompt_id": "a", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            [USER],
        ),
        ({"prompt": "2+2=", "chosen": [GOOD], "rejected": [BAD]}, [USER]),
        (ORCA, [SYSTEM, USER]),
        ({**ORCA, "question": None, "input": "2+2="}, [SYSTEM, USER]),
        ({"conversations": [roles(USER)], "chosen": roles(GOOD), "rejected": roles(BAD)}, [USER]),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]},
            [USER, GOOD, USER],
        ),
    ],
)
def test_conversations_have_the_same_prompt(record, prompt):
    pair = read_record(record, "here", COLUMNS)
    for half, answer in zip(pair, (GOOD, BAD), strict=True):
        assert half.form == "messages"
        conversation = half.read_conversation({})
        assert conversation.messages == [*prompt, answer]
        answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        assert {*answers} - {*conversation.skip} == {len(prompt)}
        assert set(half.find_unread()) <= {"prompt_id"}


HH = "\n\nHuman: 2+2=\n\nAssistant:"


@pytest.mark.parametrize(
    ("record", "texts"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("a", "b", "c")),
        ({"instruction": "a", "input": "b", "chosen": "c", "rejected": "d"}, ("a\nb", "c", "d")),
        # HH: as TRL's extract_prompt, which keeps a space before the answers
        ({"chosen": f"{HH} It is 4", "rejected": f"{HH} It is 5"}, (f"{HH} It is", " 4", " 5")),
        ({"chosen": "ab", "rejected": "ab"}, ("a", "b", "b")),
    ],
)
def test_texts_have_the_same_prompt(record, texts):
    prompt, *answers = texts
    pair = read_record(record, "here", COLUMNS)
    assert [half.read_pair() for half in pair] == [(prompt, answer) for answer in answers]
    assert [half.is_plain for half in pair] == [len(record) == 2] * 2


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, ["KTO", "chosen"]),
        (
            {"prompt": "a", "completion": "b"},
            ['"rejected"', "['prompt', 'completion']", "--columns"],
        ),
        ({"prompt": 1, "chosen": "b", "rejected": "c"}, ["prompt", "1"]),
        ({"prompt": "a", "chosen": 1, "rejected": "c"}, ["'chosen'", "answers"]),
        ({"prompt": "a", "chosen": [GOOD], "rejected": "c"}, ["'chosen'", "answers"]),
        ("a", ["answers"]),
    ],
)
def test_other_records_are_refused(record, words):
    with refused(*words):
        read_record(record, "here", COLUMNS)[0].read_pair()


def prepare(tmp_path, tokenizer, rows, **values):
    values = {"max_length": 64, "preference": "dpo", **values}
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = build_config({"dataset": str(file), **values})
    folder = tokenize(find_corpus(config), tokenizer, config, tmp_path)
    counts = report.summarize(folder, config, can_pack=True)
    return cut_samples(folder, tokenizer, config), counts


def texts_in(tokenizer, batch):
    """Return (text, text in the loss) of each document in a batch."""
    inputs, targets, positions, ends, *_ = batch
    found = []
    for row, row_targets, row_positions, row_ends in zip(
        inputs, targets, positions, ends, strict=True
    ):
        start = 0
        for end in row_ends[row_ends > 0]:
            labels = row_targets[start:end]
            is_target = labels != IGNORE_INDEX
            if is_target.any():
                assert row_positions[start:end].tolist() == [*range(end - start)]
                assert (row[start + 1 : end] == labels[:-1])[is_target[:-1]].all()
                ids = [*row[start:end].tolist(), labels[-1]]
                found.append(tuple(map(tokenizer.decode, (ids, labels[is_target].tolist()))))
            start = end
    return found


ROWS = [
    {"prompt": f"What is {n}?", "chosen": f" It is {n}.", "rejected": " " + "No " * (n % 5 + 1)}
    for n in range(30)
]
LONG = {"prompt": "What?", "chosen": " It" * 40, "rejected": " No" * 40}
SAME = {"prompt": "What?", "chosen": " It", "rejected": " It"}
EMPTY = {"prompt": "What?", "chosen": " It", "rejected": ""}


@pytest.mark.parametrize("pack", [True, "auto"])
def test_a_sample_has_both_answers_of_each_pair(pack, tokenizer, tmp_path):
    data, counts = prepare(tmp_path, tokenizer, [*ROWS, LONG, SAME, EMPTY], pack=pack)
    pairs, in_loss, num_tokens = [], 0, 0
    for samples in (data.train, data.validation):
        indices = np.arange(len(samples))
        arrays = samples.batch(indices)
        in_loss += (arrays[1] != IGNORE_INDEX).sum()
        num_tokens += samples.count(indices)[1]
        found = texts_in(tokenizer, arrays)
        pairs += zip(found[::2], found[1::2], strict=True)
        assert samples.count(indices)[0] == len(found) / 2
    end = tokenizer.decode([tokenizer.eos_id])
    assert sorted(pairs) == sorted(
        tuple((row["prompt"] + row[name] + end, row[name] + end) for name in ("chosen", "rejected"))
        for row in [*ROWS, SAME]
    )
    assert (len(data.train) < 15) == (pack is True)
    assert counts["left_out"] == {NO_ANSWER: 1, report.TOO_LONG: 1}
    assert counts["notes"] == {IDENTICAL: 1}
    assert (counts["unit"], counts["trained"], counts["held_out"]) == ("pairs", 29, 2)
    assert counts["loss_share"] == in_loss / (num_tokens + 2 * len(pairs))


def test_the_reference_belongs_to_its_documents(tokenizer, tmp_path):
    data, _ = prepare(tmp_path, tokenizer, ROWS, pack=True)
    train = data.train
    reference = np.arange(2.0 * len(train.starts)).reshape(-1, 2)
    samples = dataclasses.replace(train, reference=reference)
    assert train.batch(np.arange(1))[4][..., 0].tolist() == [[0.0] * train.max_documents]
    order = np.array([1, 0, -1])
    *_, ends, values = samples.batch(order, 3.0)
    assert values.shape == (*ends.shape, 2)
    for row, block in enumerate(order[:2]):
        parts = slice(*train.firsts[block : block + 2])
        expected = reference[parts].ravel()
        assert values[row, : len(expected), 0].tolist() == expected.tolist()
        assert values[row, :, 1].tolist()[: len(expected)] == [3.0, 0.0] * (len(expected) // 2)
    assert not values[2].any()
    targets = samples.batch(order)[1]
    num_chosen = sum(
        mask.sum() for mask in [m for _, m in samples.documents(samples.parts_of(order)[0])][::2]
    )
    pairs = samples.count(order)[0]
    assert samples.scale_likelihood(order) == pytest.approx(pairs / num_chosen)
    assert num_chosen < (targets != IGNORE_INDEX).sum()


def test_a_chat_template_is_used_for_prompts(tokenizer, tmp_path):
    """A pair without a prompt is text, because nobody knows where its turns begin."""
    rows = [{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}] * 8
    data, _ = prepare(tmp_path, tokenizer, rows)
    (text, loss), (other_text, other_loss) = texts_in(tokenizer, data.train.batch(np.arange(1)))
    assert "user" in text
    assert text.replace("4", "5") == other_text
    assert (loss.strip()[0], other_loss.strip()[0]) == ("4", "5")


@pytest.mark.parametrize("name", ["text.txt", "pairs.jsonl"])
def test_data_of_another_kind_is_refused(name, tmp_path):
    file = tmp_path / name
    file.write_text("Once upon a time" if name == "text.txt" else json.dumps(ROWS[0]) + "\n")
    config = build_config({"dataset": str(file), "preference": "dpo" if ".txt" in name else "none"})
    with refused("running text" if name == "text.txt" else "preference"):
        find_corpus(config)
