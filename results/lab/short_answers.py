"""Write the dataset short-answers: pairs of a short and a long answer, both in a model's own words.

    python results/lab/short_answers.py MODEL [FOLDER]

MODEL is SmolLM2-135M-Instruct or its folder. It answers each question greedily. The rejected answer
is its answer, up to the last whole sentence in NUM_TOKENS. The chosen answer is its first two
sentences, because many a first sentence says nothing ("The study of living things!"): trained with
one sentence, the model answered general questions without the fact. Answers of fewer than three
sentences are left out. The pairs are shuffled, because num_samples takes the first. FOLDER is by
default configs/chats/short-answers. The questions about every tenth topic are for validation.
"""

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import checkout

from distributed_training.data.corpus import CHATS_DIR
from results.lab.quality import ask

NUM_TOKENS = 80
# A sentence is within a line, and ends neither in "e.g." nor in "U.S.".
SENTENCE = re.compile(r"[A-Z\"'][^\n]{20,}?(?<!\b\w)[.!?](?=\s|$)")
FORMS = {
    "thing": (
        "What is {}?", "Explain {}.", "Tell me about {}.", "What is {} used for?",
        "Why does {} matter?",
    ),
    "event": (
        "What causes {}?", "What happens during {}?", "Why is there {}?", "Describe {}.",
    ),
    "skill": (
        "How do I learn {}?", "Give me advice on {}.", "What helps with {}?",
        "Why do people like {}?",
    ),
}  # fmt: skip
TOPICS = {
    "thing": (
        "photosynthesis", "gravity", "the internet", "a battery", "democracy", "inflation",
        "a vaccine", "the stock market", "steel", "glass", "a telescope", "the heart", "the liver",
        "a compass", "insurance", "a mortgage", "DNA", "an algorithm", "a database", "electricity",
        "paper", "salt", "yeast", "a microscope", "concrete", "a lighthouse", "the ozone layer",
        "recycling", "solar power", "a submarine", "copyright", "a constitution", "the brain",
        "oxygen", "plastic", "rubber", "a bicycle", "the piano", "a calendar", "money", "cotton",
        "a satellite", "radar", "a thermometer", "the nervous system", "an atlas", "irrigation",
        "a dictionary", "machine learning", "the printing press",
    ),
    "event": (
        "an earthquake", "a volcanic eruption", "thunder", "a rainbow", "fog", "a drought",
        "a recession", "a solar eclipse", "the tides", "a hurricane", "an avalanche", "rust",
        "a fever", "hiccups", "a flood", "frost", "an election", "a heat wave", "erosion",
        "a tsunami", "hail", "a wildfire", "jet lag", "a power cut", "a traffic jam",
    ),
    "skill": (
        "swimming", "cooking", "gardening", "public speaking", "drawing", "playing chess",
        "saving money", "learning Spanish", "running", "writing a letter", "photography",
        "sleeping", "studying", "yoga", "baking bread", "hiking", "time management", "knitting",
        "reading",
        "programming", "making friends", "job interviews", "playing the guitar", "cycling",
        "meditation",
    ),
}  # fmt: skip


def list_questions() -> dict[str, list[str]]:
    """Return the questions of both splits."""
    questions: dict[str, list[str]] = {"train": [], "validation": []}
    for kind, topics in TOPICS.items():
        for index, topic in enumerate(topics):
            split = "train" if index % 10 else "validation"
            questions[split] += [form.format(topic) for form in FORMS[kind]]
    return questions


def build_pair(question: str, text: str) -> dict[str, str] | None:
    """Return a pair, or None if the answer has fewer than three sentences."""
    text = text.strip()
    ends = [sentence.end() for sentence in SENTENCE.finditer(text)]
    if len(ends) < 3:
        return None
    return {"prompt": question, "chosen": text[: ends[1]], "rejected": text[: ends[-1]]}


def main(argv: Sequence[str] | None = None) -> int:
    model, *folders = sys.argv[1:] if argv is None else argv
    folder = Path(*folders) if folders else CHATS_DIR / "short-answers"
    folder.mkdir(parents=True, exist_ok=True)
    for split, questions in list_questions().items():
        texts = ask(model, questions, NUM_TOKENS)
        pairs = [build_pair(*each) for each in zip(questions, texts, strict=True)]
        random.Random(0).shuffle(pairs)
        lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs if pair]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{split}: {len(lines)} pairs of {len(questions)} questions")
    return 0


if __name__ == "__main__":
    checkout.run(main)
