"""Test that every template failure gives a one-line error, and that the rendering process is
reused."""

import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from distributed_training.data.chats import render
from distributed_training.data.chats.align import render_builtin
from distributed_training.data.chats.render import Conversation, Renderer
from tests.support import refused

SAID = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
TWICE = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = f"""{{% set said = messages[0].content %}}
{{% if said == 'endless' %}}{TWICE}{{% elif said == 'large' %}}{{{{ 'a' * 2 ** 31 }}}}
{{% elif said == 'raises' %}}{{{{ raise_exception('no such word') }}}}
{{% elif said == 'unsafe' %}}{{{{ messages.__class__.__mro__ }}}}
{{% elif said == 'constant' %}}hello{{% else %}}
{{{{ said ~ '<|a|>' ~ (messages[1].content ~ '<|e|>' if messages[1] else '') }}}}{{% endif %}}"""


@pytest.fixture(scope="module")
def renderer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "CPU_S", 0.5)
        renderer = Renderer([TEMPLATE] * 2, {}, ["<|a|>", "<|e|>"])
        yield renderer
        renderer.close()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("endless", "takes more than"),
        ("large", "MiB"),
        ("raises", "TemplateError: no such word"),
        ("unsafe", "SecurityError"),
        ("constant", "omits message 2"),
    ],
)
def test_template_errors_are_one_line_that_names_the_row(content, words, renderer):
    good = ("a.jsonl line 1", Conversation(SAID))
    bad = Conversation([{**SAID[0], "content": content}, SAID[1]])
    with refused("a.jsonl line 2 cannot be rendered by the chat template", words):
        renderer.render_samples([good, ("a.jsonl line 2", bad)])
    (((text, spans, *_),),) = renderer.render_samples([good])
    assert text[slice(*spans[0])] == "4<|e|>"
    assert renderer.render_prompt(SAID[:1]).endswith("2+2=<|a|>")


def test_dates_and_bytes_in_tables_are_rendered_as_in_transformers():
    """Values that JSON cannot represent, such as the timestamps of WildChat's messages, are
    rendered as in transformers."""
    template = "{% for m in messages %}{{ m.role ~ m.time ~ m.content }}{% endfor %}"
    messages = [
        {**SAID[0], "time": datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)},
        {**SAID[1], "time": b"\xff"},
    ]
    dated = Renderer([template] * 2, {}, [])
    try:
        ((sample,),) = dated.render_samples([("a.parquet row 1", Conversation(messages))])
    finally:
        dated.close()
    (texts, _) = render_jinja_template(conversations=[messages], chat_template=template)
    assert [sample.text] == texts


def test_our_template_counts_removed_reasoning_and_refuses_documents():
    answer = {**SAID[1], "reasoning_content": "hm"}
    (sample,) = render_builtin(Conversation([SAID[0], answer]), "|", "here")
    assert (sample.text, sample.thoughts_removed) == ("user: 2+2=\nassistant: 4|", 1)
    with refused("here has tools or documents"):
        render_builtin(Conversation(SAID, documents=[{"text": "a"}]), "|", "here")


def test_content_parts_are_joined_if_the_template_fails_on_them():
    template = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    contents = [{"type": "text", "text": word} for word in ("a", "b")]
    messages = [{"role": "user", "content": contents}, {"role": "assistant", "content": contents}]
    ((text, spans, *_),) = render.build_responder([template] * 2, {}, [])(
        Conversation(messages), False
    )
    assert text == "user:ab;assistant:ab;"
    assert [text[first:][:2] for first, _ in spans] == ["ab"]


def test_empty_generation_marks_contain_no_answer():
    template = "{% generation %}{% endgeneration %}{{ messages[1].content }}"
    assert render.build_responder([template] * 2, {}, [])(Conversation(SAID), False) == []
