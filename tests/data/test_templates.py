"""Test chat templates of different structure with random conversations.

Rendered text and IDs must equal the output of transformers. Each answer must be in the loss exactly
once, after the text that precedes it during generation."""

import random
import re

import pytest

from distributed_training.data.chats.render import Conversation, Renderer
from tests.data.templates import SPECIAL_TOKENS, TEMPLATES
from tests.data.test_tokenizer import save_tokenizer, train_bpe
from tests.data.theirs import TheirTokenizer

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CONTENTS = [
    "", "4", "It is 4.", "  padded\n", "\n\nTwo lines\n\nlater", "日本語 🙂 العربية",
    "word " * 300, "<|im_start|>assistant\nHi", "[INST] no [/INST]", "Assistant: 4", "User: 5",
    "<think>\nhm\n</think>\n\nSo", "<|assistant|>\n", "<|start_header_id|>a", "\n", "a</s>b",
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Return a transformers tokenizer: a byte-level BPE without merges. Each token is a byte or a
    special token."""
    built = train_bpe(["a"], SPECIAL_TOKENS, 300)
    folder = tmp_path_factory.mktemp("tokenizer")
    names = {**NAMES}
    return TheirTokenizer(save_tokenizer(folder, built, names.pop("eos_token"), **names))


def conversations(name):
    """Yield conversations of one to four turns, with or without a system message. Some
    conversations end with a question."""
    draw = random.Random(name)
    answers = iter(draw.sample(CONTENTS, len(CONTENTS)))
    for count in (1, 2, 2, 3, 4, 4):
        messages = []
        if draw.random() < 0.5:
            messages.append({"role": "system", "content": draw.choice(CONTENTS[1:])})
        for _ in range(count):
            messages.append({"role": "user", "content": draw.choice(CONTENTS[1:])})
            messages.append({"role": "assistant", "content": next(answers)})
        if draw.random() < 0.3:
            messages.append({"role": "user", "content": "And then?"})
        yield messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_found_under_published_templates(name, theirs):
    shape = TEMPLATES[name]
    pattern = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    renderer = Renderer([shape.template] * 2, NAMES, pattern)
    plain = {"chat_template": shape.template, "tokenize": False}
    for messages in conversations(name):
        samples = renderer.render_samples(Conversation(messages), "here")
        answer_indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        expected = {}  # text before an answer -> text in the loss
        for index in answer_indices:
            content = messages[index]["content"]
            content = content.strip() if shape.strips else content
            ask = {**plain, "add_generation_prompt": True}
            question = theirs.apply_chat_template(messages[:index], **ask)
            question = question.removesuffix("<think>\n")  # begun by the template
            if name == "deepseek-r1":
                content = content.split("</think>")[-1]
            last = shape.last if index == len(messages) - 1 else ""
            expected[question] = f"{shape.before}{content}{shape.after}{last}{shape.next_turn}"
        learned = {}
        for sample in samples:
            for first, end in sample.spans:
                assert sample.text[:first] not in learned, "an answer twice"
                learned[sample.text[:first]] = sample.text[first:end]
        assert learned == expected
        full_text = theirs.apply_chat_template(messages, **plain)
        if messages[-1]["role"] == "assistant":
            full_text += shape.next_turn
        if not shape.differs_in_history:
            assert [sample.text for sample in samples] == [full_text]


# As under gpt-oss and GLM-4.5, earlier answers lose their reasoning: that of a call as soon as an
# answer follows, and that of answers before the last question.
SHORTENED = {
    "gpt-oss": (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
        "{% if loop.last or messages[-1].role == 'tool' %}<|channel|>{{ m.thinking }}<|end|>"
        "<|start|>assistant{% endif %}<|message|>{{ m.content }}"
        "{{ m.tool_calls[0].function.name ~ '<|call|>' if m.tool_calls else '<|return|>' }}"
        "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ["<|channel|>Hm.<|end|><|start|>assistant<|message|>f<|call|>",
         "<|channel|>So.<|end|><|start|>assistant<|message|>4<|return|>"],
    ),
    "glm-4.5": (
        "{% set questions = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>"
        "{{ m.thinking if questions[-1].content == '2+2?' }}</think>{% endif %}"
        "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
        ["Hm.</think>f<|tool|>", "So.</think>4<|user|>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORTENED)
def test_reasoning_before_a_call_and_after_it_is_trained_up_to_the_end(name, theirs):
    template, expected = SHORTENED[name]
    pattern = re.compile(r"<\|\w+\|>")
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4", "thinking": "So."},
    ]
    renderer = Renderer([template] * 2, NAMES, pattern)
    samples = renderer.render_samples(Conversation(messages), "here")
    learned = {s.text[:first]: s.text[first:end] for s in samples for first, end in s.spans}
    ask = {"chat_template": template, "add_generation_prompt": True, "tokenize": False}
    prompts = [theirs.apply_chat_template(messages[:index], **ask) for index in (1, 3)]
    assert learned == dict(zip(prompts, expected, strict=True))
    assert renderer.find_omitted(Conversation(messages)) == []
