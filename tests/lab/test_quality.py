"""Test the questions for models that the preset laptop trains."""

import json

from distributed_training.data.corpus import CHATS_DIR
from results.lab.quality import QUESTIONS


def test_no_question_is_trained_on_and_each_fact_is_held_out():
    asked = {}
    for name in ("ellmoor/train", "ellmoor/validation", "general-chats/train"):
        lines = (CHATS_DIR / f"{name}.jsonl").read_text().splitlines()
        asked[name] = {json.loads(line)["messages"][0]["content"] for line in lines}
    assert asked["ellmoor/validation"] == set(QUESTIONS["facts"])
    trained_on = asked["ellmoor/train"] | asked["general-chats/train"]
    assert not trained_on & {*QUESTIONS["facts"], *QUESTIONS["general"]}
