"""Test that every template failure gives a one-line error that names the record."""

import datetime
import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from distributed_training.data.chats.align import loses_thoughts
from distributed_training.data.chats.render import Conversation, Renderer
from tests.support import refused

NO_TOKENS = re.compile("(?!)")
SAID = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
TEMPLATE = """{% set said = messages[0].content %}
{% if said == 'raises' %}{{ raise_exception('no such word') }}
{% elif said == 'unsafe' %}{{ messages.__class__.__mro__ }}
{% elif said == 'constant' %}hello{% else %}
{{ said ~ '<|a|>' ~ (messages[1].content ~ '<|e|>' if messages[1] else '') }}{% endif %}"""


@pytest.mark.parametrize(
    ("content", "words"),
    [("raises", "TemplateError"), ("unsafe", "SecurityError"), ("constant", "omits message 2")],
)
def test_template_errors_are_one_line_that_names_the_row(content, words):
    renderer = Renderer([TEMPLATE] * 2, {}, re.compile(r"<\|[ae]\|>"))
    bad = Conversation([{**SAID[0], "content": content}, SAID[1]])
    with refused("a.jsonl line 2", words):
        renderer.render_samples(bad, "a.jsonl line 2")
    ((text, spans, *_),) = renderer.render_samples(Conversation(SAID), "a.jsonl line 1")
    assert text[slice(*spans[0])] == "4<|e|>"
    assert renderer.render_prompt(SAID[:1]).endswith("2+2=<|a|>")


@pytest.mark.parametrize(
    "name", ["continue_final_message", "add_generation_prompt", "tools", "messages", "tokenize"]
)
def test_parameters_of_transformers_are_not_variables_of_a_template(name):
    renderer = Renderer([TEMPLATE] * 2, {}, NO_TOKENS)
    with refused("a.jsonl line 2", f"chat_template_kwargs sets {name!r}"):
        renderer.render_samples(Conversation(SAID, template_kwargs={name: True}), "a.jsonl line 2")


def test_arguments_that_a_template_reads_as_an_object_may_not_be_a_string():
    """Templates such as Qwen3.5's read each argument (Qwen3-Coder#444)."""
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    template += "{{ c.function.arguments | items | list }}{% endfor %}{% endfor %}"
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    called = Conversation([SAID[0], {**SAID[1], "tool_calls": [call]}])
    with refused("line 1", "the arguments as an object"):
        Renderer([template] * 2, {}, NO_TOKENS).render_samples(called, "line 1")


THINKS = """{% for m in messages %}{{ '<|a|>' ~ m.role ~ '\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' ~ m.content ~ '<|e|>' }}
{%- endgeneration %}{% else %}{{ m.content ~ '<|e|>' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("empty", ["<think>\n\n</think>\n\n", "<think>\n\n", "<think></think>"])
def test_reasoning_is_trained_if_the_prompt_ends_with_an_empty_block(empty):
    """The spans are those that TRL marks in its templates for training (trl#5213)."""
    plain = THINKS.replace("endgeneration", "endif").replace("generation", "if true")
    plain += (
        f"{{% if add_generation_prompt %}}<|a|>assistant{{{{ '\n' ~ {empty!r} }}}}{{% endif %}}"
    )
    thought = Conversation([SAID[0], {**SAID[1], "reasoning_content": "Hm, <think>"}])
    (marked,), (found,) = (
        Renderer([template] * 2, {}, re.compile(r"<\|[ae]\|>")).render_samples(thought, "here")
        for template in (THINKS, plain)
    )
    assert found._replace(unasked=None) == marked
    assert found.unasked[1] == f"<|e|><|a|>assistant\n{empty}"


def test_dates_and_bytes_in_tables_are_rendered_as_in_transformers():
    """Values that JSON cannot represent, such as the timestamps of WildChat's messages, are
    rendered as in transformers."""
    template = "{% for m in messages %}{{ m.role ~ m.time ~ m.content }}{% endfor %}"
    messages = [
        {**SAID[0], "time": datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.timezone.utc)},
        {**SAID[1], "time": b"\xff"},
    ]
    renderer = Renderer([template] * 2, {}, NO_TOKENS)
    (sample,) = renderer.render_samples(Conversation(messages), "here")
    (texts, _) = render_jinja_template(conversations=[messages], chat_template=template)
    assert [sample.text] == texts


def test_our_template_counts_removed_reasoning_and_refuses_tools(tokenizer):
    renderer = tokenizer.renderer
    answer = {**SAID[1], "reasoning_content": "hm"}
    (sample,) = renderer.render_samples(Conversation([SAID[0], answer]), "here")
    assert sample.text == "user: 2+2=\nassistant: 4<|endoftext|>"
    assert loses_thoughts(answer, sample.text)
    assert not loses_thoughts(answer, "hm")
    assert [sample.text[slice(*span)] for span in sample.spans] == [" 4<|endoftext|>"]
    with refused("here", "supports no tools"):
        renderer.render_samples(Conversation(SAID, tools=[{"name": "f"}]), "here")
    with refused("here", "tool calls"):
        called = {**SAID[1], "tool_calls": [{"function": {"name": "f"}}]}
        renderer.render_samples(Conversation([SAID[0], called]), "here")


def test_content_parts_are_joined_if_the_template_fails_on_them():
    template = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    contents = [{"type": "text", "text": word} for word in ("a", "b")]
    messages = [{"role": "user", "content": contents}, {"role": "assistant", "content": contents}]
    renderer = Renderer([template] * 2, {}, NO_TOKENS)
    ((text, spans, *_),) = renderer.render_samples(Conversation(messages), "here")
    assert text == "user:ab;assistant:ab;"
    assert [text[first:][:2] for first, _ in spans] == ["ab"]


@pytest.mark.parametrize(("end", "count"), [("", 2), ("<|e|>", 0)])
def test_marked_answers_without_an_end_token_are_counted(end, count):
    """A template may put the end token outside the text that it marks (trl#5988)."""
    template = "{% for m in messages %}{{ m.role }}<|a|>{% if m.role == 'user' %}{{ m.content }}"
    template += "{% else %}{% generation %}<think>{% endgeneration %}\n{% generation %}"
    template += f"{{{{ m.content }}}}{end}{{% endgeneration %}}{{% endif %}}<|e|>{{% endfor %}}"
    renderer = Renderer([template] * 2, {}, re.compile(r"<\|[ae]\|>"))
    (sample,) = renderer.render_samples(Conversation(SAID * 2), "here")
    assert sample.num_without_end_token == count


def test_empty_generation_marks_contain_no_answer():
    template = "{% generation %}{% endgeneration %}{{ messages[1].content }}"
    renderer = Renderer([template] * 2, {}, NO_TOKENS)
    assert renderer.render_samples(Conversation(SAID), "here") == []
