"""Test the data and the questions for models that the presets for laptops train."""

import json

from distributed_training.data.corpus import CHATS_DIR
from results.lab.quality import QUESTIONS
from results.lab.short_answers import build_pair, list_questions


def test_no_question_is_trained_on_and_each_fact_is_held_out():
    asked = {}
    for name in ("ellmoor/train", "ellmoor/validation", "general-chats/train"):
        lines = (CHATS_DIR / f"{name}.jsonl").read_text().splitlines()
        asked[name] = {json.loads(line)["messages"][0]["content"] for line in lines}
    assert asked["ellmoor/validation"] == set(QUESTIONS["facts"])
    trained_on = asked["ellmoor/train"] | asked["general-chats/train"]
    assert not trained_on & {*QUESTIONS["facts"], *QUESTIONS["general"]}


def test_pairs_are_two_sentences_and_what_follows_them():
    questions = list_questions()
    first = "Steel, e.g. that of the U.S. Navy, is iron with carbon."
    short = f"{first} It is harder than iron, but it can rust."
    text = f"{short} It is used for bridges and tools."
    pair = build_pair("What is steel?", f"{text} And it")
    assert pair == {"prompt": "What is steel?", "chosen": short, "rejected": text}
    assert build_pair("What is steel?", f"{short} And it") is None
    for split, asked in questions.items():
        lines = (CHATS_DIR / "short-answers" / f"{split}.jsonl").read_text().splitlines()
        pairs = [json.loads(line) for line in lines]
        assert {pair["prompt"] for pair in pairs} <= {*asked} - {*QUESTIONS["general"]}
        assert all(pair == build_pair(pair["prompt"], pair["rejected"]) for pair in pairs)
    assert not {*questions["train"]} & {*questions["validation"]}
