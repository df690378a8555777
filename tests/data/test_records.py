"""Test records in all supported formats."""

import shutil
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from distributed_training.data.chats import prepare
from distributed_training.data.chats.records import Record
from distributed_training.data.pieces import PROMPT, TEXT
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from tests.data.test_corpus import corpus_of
from tests.data.test_samples import jsonl
from tests.support import refused

CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3 + 3?"},
        {"role": "assistant", "content": "6"},
        {"role": "user", "content": "Thanks"},
    ]
}


USER = {"role": "user", "content": "2+2="}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = {"function_call": CALL["function"], "tool_calls": [CALL]}


def conversation_of(record, columns=()):
    """Return a record's messages, the indices of the messages that are not in the loss, and the
    notes with their counts."""
    notes = Counter()
    record = Record(record, "here", dict(columns))
    assert record.form in ("messages", "prompt")
    conversation = record.read_conversation(notes)
    return conversation.messages, conversation.skip, dict(notes)


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ANSWER], "id": 7}, [USER, ANSWER]),
        (
            {"conversations": [
                {"from": "system", "value": "s"}, {"from": "human", "value": "2+2="},
                {"from": "gpt", "value": "4"},
            ]},
            [{"role": "system", "content": "s"}, USER, ANSWER],
        ),
        (
            {"conversations": [
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "4"},
            ]},
            [
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "4"},
            ],
        ),
        ({"prompt": "2+2=", "completion": "4"}, [USER, ANSWER]),
        ({"question": "2+2=", "answer": "4"}, [USER, ANSWER]),
        ({"instruction": "2+2=", "output": "4"}, [USER, ANSWER]),
        (
            {"instruction": "Add.", "input": "2, 2", "output": "4", "system": "s"},
            [
                {"role": "system", "content": "s"}, {"role": "user", "content": "Add.\n2, 2"},
                ANSWER,
            ],
        ),
        (
            {"instruction": "Add.", "context": "2, 2", "response": "4", "history": []},
            [{"role": "user", "content": "Add.\n2, 2"}, ANSWER],
        ),
        (
            {"instruction": "2+2=", "input": "", "output": "4", "history": [["2+2=", "4"]] * 2},
            [USER, ANSWER] * 3,
        ),
        ({**CHAT, "tools": "null"}, CHAT["messages"]),
        (
            {"prompt": "2+2=", "response": "4", "system": "s"},
            [{"role": "system", "content": "s"}, USER, ANSWER],
        ),
        ({"messages": [USER, {"role": "model", "content": "4"}]}, [USER, ANSWER]),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
        ({"messages": '[{"role": "user", "content": "2+2="}]'}, [USER]),
        (
            {"messages": [{"role": "assistant", "content": None, **CALLED, "tool_calls": None}]},
            [{"role": "assistant", "content": "", **CALLED}],
        ),
    ],
)  # fmt: skip
def test_conversations_are_read_in_every_format(record, messages):
    assert conversation_of(record)[0] == messages


def test_messages_that_are_not_trained_on():
    quiet = {**ANSWER, "weight": 0}
    untrained = {**ANSWER, "train": False}
    messages = [USER, quiet, USER, {**ANSWER, "weight": 1}, USER, untrained]
    assert conversation_of({"messages": messages})[1] == [1, 5]
    # Keys of axolotl, verl and ms-swift (ms-swift#9263, verl#5472)
    for key in ("training", "trainable", "loss_mask", "loss"):
        messages = [{**USER, key: 1}, {**ANSWER, key: False}, USER, {**ANSWER, key: True}]
        _, trained, notes = conversation_of({"messages": messages})
        assert (trained, [*notes.values()]) == ([1], [1])
    pair = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "system": "s"}
    assert conversation_of(pair)[1] == [0, 1, 2, 3]
    record = {"messages": [{"role": "system", "content": "s"}, USER, ANSWER]}
    assert conversation_of({**record, "system": "s"})[2] == {}
    assert [*conversation_of({**record, "system": "t"})[2].values()] == [1]
    null = {"role": "assistant", "content": None}
    messages = [USER, null, USER, {**null, "tool_calls": [CALL]}]
    _, trained, notes = conversation_of({"messages": messages})
    assert (trained, [*notes.values()]) == ([1], [1])
    (note,) = conversation_of({"messages": [{"role": "critic", "content": "no"}]})[2].items()
    assert "'critic'" in note[0]
    assert note[1] == 1


def test_columns_are_renamed():
    columns = {"prompt": "q", "completion": "a"}
    record = Record({"q": "2+2=", "a": "4", "prompt": "other"}, "here", columns)
    assert record.read_pair() == ("2+2=", "4")
    pair = {"prompt": "2+2=", "completion": "4", "text": "5"}
    assert Record(pair, "here", {"text": "text"}).form == TEXT
    with refused('"a"', "'q'"):
        Record({"q": "2+2=", "prompt": "4", "completion": "4"}, "here", columns)
    with refused("'c0', 'c1'"):
        Record({"c0": 1, "c1": 1}, "here", {})


@pytest.mark.parametrize(
    ("record", "unread"),
    [
        ({"text": "a", "system": "", "id": 7}, ["system", "id"]),
        ({"messages": [], "tools": [], "history": [], "prompt": ""}, ["history", "prompt"]),
        ({"prompt": "2+2=", "input": "", "completion": "4", "label": False}, ["input", "label"]),
        ({"instruction": "2+2=", "input": "", "output": "4", "system": ""}, []),
        ({"q": "2+2=", "prompt": "other", "completion": "4", "text": "4"}, ["prompt"]),
    ],
)
def test_unread_columns_are_listed(record, unread):
    columns = {"prompt": "q"} if "q" in record else {}
    record = Record({**record, "image": None}, "here", columns)
    read = {TEXT: record.read_text, PROMPT: record.read_pair}
    read.get(record.form, lambda: record.read_conversation(Counter()))()
    assert record.find_unread() == unread


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": 1, "completion": "a"}, ['"prompt" is 1', '"completion": "..."']),
        ({"text": "a", "prompt": "a", "completion": False}, ['"completion" is False']),
        ({"messages": [USER, ANSWER], "system": 0}, ['"system" is 0']),
        ({"messages": [USER, ANSWER], "tools": ["f"]}, ["'f'", '"tools"']),
        ({"prompt": "", "chosen": ""}, ['"completion"', "'prompt', 'chosen'"]),
        ({"messages": [{**ANSWER, "weight": 0.5}]}, ["message 1", "'weight': 0.5"]),
        ({"messages": [{**ANSWER, "train_detail": [{}]}]}, ["has 'train_detail'"]),
        ({"messages": ["a"]}, ['"role"']),
        ({"messages": [{"role": "user", "content": 1}]}, ['no "content" string']),
        ({"messages": [{"role": "user"}]}, ['no "content" string']),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["is not text"]),
        ({"messages": [{**ANSWER, "content": [{"type": "thinking"}]}]}, ["is not text"]),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, ["tool_calls"]),
        ({"messages": 7}, ["messages"]),
        ({"instruction": "a", "output": "a", "history": [["b"], [1]]}, ['no "content" string']),
        ({"messages": [ANSWER], "chat_template_kwargs": [1]}, ["chat_template_kwargs"]),
        ({"conversations": [{"from": "function_call", "value": "oops"}]}, ["oops"]),
    ],
)
def test_malformed_records_are_refused(record, words):
    with refused("a.jsonl line 3", *words):
        Record(record, "a.jsonl line 3", {}).read_conversation(Counter())


TEMPLATE = """{{ tools or '' }}{% for m in messages %}{{ m.content or '' }}
{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}
{% endfor %}"""


@pytest.mark.parametrize(
    ("old", "new", "omitted", "quoted"),
    [
        ("", "", [0, 0, 0], 0),
        ("arguments }}", "arguments | tojson }}", [0, 0, 0], 1),
        ("c.function.name", "'call'", [0, 4, 0], 0),
        ("m.tool_calls or []", "[]", [0, 4, 0], 0),
        ("m.tool_calls or []", "(m.tool_calls or [])[:1]", [0, 1, 0], 0),
        ("tools or ''", "''", [0, 0, 2], 0),
        ("m.content or ''", "m.role if m.role == 'user' else m.content", [4, 0, 0], 0),
        ("m.content or ''", "'' if m.role == 'tool' else m.content", [1, 0, 0], 0),
    ],
)
def test_values_omitted_or_quoted_twice_by_a_template_give_notes(
    old, new, omitted, quoted, tmp_path
):
    """A note is printed if a template omits messages, tool calls or tools, which the transformers
    library drops silently (Megatron-Bridge#4072), if a column is not read, or if a template quotes
    the arguments of tool calls twice. In OpenAI's format, the arguments are already a JSON string,
    which the `tojson` filter quotes again (oumi#2599)."""
    call, as_text = (
        {"function": {"name": "get_time", "arguments": x}} for x in ({"x": 1}, '{"x": 1}')
    )
    rows = [
        {"messages": [USER, {**ANSWER, "tool_calls": [call]}]},
        {"messages": [USER, {**ANSWER, "tool_calls": [as_text]}]},
        {"messages": [USER, ANSWER], "tools": [call]},
        # The list of tools has the names of calls, and the answer has the words of the result.
        {
            "messages": [
                USER,
                {**ANSWER, "tool_calls": [call, call]},
                {"role": "tool", "content": "4"},
                ANSWER,
            ],
            "tools": [call],
        },
    ]
    folder = shutil.copytree(EMBEDDED_DIR, tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace(old, new))
    source = jsonl(tmp_path / "rows", [{**row, "label": 0} for row in rows])["train"][0]
    counts = prepare.Counts()
    pieces = prepare.read_pieces(source, Tokenizer(folder), by_line=False, counts=counts)
    assert all(piece.templated for piece in pieces)
    by_kind = [counts.notes[f"{kind} {prepare.OMITTED}"] for kind in ("message", "call", "tool")]
    assert by_kind == omitted
    assert counts.notes[prepare.QUOTED] == quoted
    assert counts.notes[f"{prepare.IGNORED_COLUMNS} ['label']"] == len(rows)


CHATML = """{% for m in messages %}<|endoftext|>{{ m.role ~ '|' ~ m.content }}
{%- if m.name %}{{ m['name'] }}{% endif %}<|endoftext|>{% endfor %}
{%- if add_generation_prompt %}<|endoftext|>assistant|{% endif %}"""


def read_file(file, template):
    """Return what is trained on in a file of chats under a template, and the notes."""
    folder = shutil.copytree(EMBEDDED_DIR, file.parent / "tokenizer", dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    counts = prepare.Counts()
    source = corpus_of(file)["train"][0]
    pieces = prepare.read_pieces(source, Tokenizer(folder), by_line=False, counts=counts)
    trained = [piece.text[first:last] for piece in pieces for first, last in piece.spans]
    return trained, {note: count for note, count in counts.notes.items() if count}


KEYS = ("tool_calls", "reasoning_content", "thinking", "refusal", "function_call", "audio")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_null_answers_are_not_trained_on_whatever_keys_stand_beside_them(suffix, tmp_path):
    """OpenAI's clients write every key, and tables have every key in every row."""
    null = {"role": "assistant", "content": None}
    nulls = [null, *({**null, key: None} for key in KEYS), {**null, "tool_calls": []}]
    rows = [{"messages": [USER, answer, USER, ANSWER]} for answer in nulls]
    if suffix == ".jsonl":
        jsonl(tmp_path, rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    trained, notes = read_file(tmp_path / f"a{suffix}", CHATML)
    assert trained == ["4<|endoftext|>"] * len(rows)
    assert [*notes.values()] == [len(rows)]


def test_keys_of_messages_that_no_template_reads_are_counted(tmp_path):
    keys = {"images": ["a.png"], "refusal": "", "thought": "hm", "prefix": False, "audio": None}
    message = {**USER, **keys, "name": "Ann", "weight": 1}
    jsonl(tmp_path, [{"messages": [message, USER, {**ANSWER, "images": []}]}] * 3)
    trained, notes = read_file(tmp_path / "a.jsonl", CHATML)
    assert trained == ["4<|endoftext|>"] * 3
    counts = {"images": 6, "refusal": 3, "thought": 3, "prefix": 3}
    assert {
        f"{prepare.IGNORED_KEY} {key!r}": n for key, n in counts.items()
    }.items() <= notes.items()
    assert not any("name" in note or "audio" in note for note in notes)


@pytest.mark.parametrize("content", [None, "", "I look."])
def test_silence_is_not_trained_if_a_template_omits_the_call(content, tmp_path):
    call = {"name": "get_time", "arguments": "{}"}
    answer = {"role": "assistant", "content": content, "function_call": call}
    jsonl(tmp_path, [{"messages": [USER, answer, USER, ANSWER]}])
    trained, notes = read_file(tmp_path / "a.jsonl", CHATML)
    assert trained == [f"{text}<|endoftext|>" for text in (content, "4") if text]
    assert notes[f"call {prepare.OMITTED}"] == 1


R1 = """{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|endoftext|>
{%- elif m.content %}<|assistant|>MARK{{ m.content }}<|endoftext|>{% ENDMARK %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"""


@pytest.mark.parametrize(("mark", "end"), [("generation", "endgeneration"), ("if true", "endif")])
def test_answers_asked_for_by_another_prompt_and_empty_answers_are_counted(mark, end, tmp_path):
    """Inside a block of reasoning, which the prompt begins, the text would be reasoning."""
    jsonl(tmp_path, [{"messages": [USER, {**ANSWER, "content": ""}, USER, ANSWER]}] * 2)
    template = R1.replace("ENDMARK", end).replace("MARK", f"{{% {mark} %}}")
    trained, notes = read_file(tmp_path / "a.jsonl", template)
    assert trained == ["4<|endoftext|>"] * 2
    texts = ("<|endoftext|><|assistant|>", "<|endoftext|><|assistant|><think>")
    assert notes[prepare.UNASKED.format(*map(repr, texts))] == 2
    assert notes[prepare.EMPTY] == 2


THINKS = """{% for m in messages %}{% for part in m.content if m.content is not string %}
{{- '[THINK]' ~ part.thinking ~ '[/THINK]' if part.type == 'thinking' else part.text }}
{%- else %}{{ m.content }}{% endfor %}<|endoftext|>{% endfor %}"""


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("template", "answer", "lost"), [(THINKS, "[THINK]hm[/THINK]4", 0), (CHATML, "4", 3)]
)
def test_reasoning_in_parts_is_rendered_or_counted(template, answer, lost, suffix, tmp_path):
    """As in Mistral's format, for which the template of Ministral 3 is written."""
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "4"}]
    rows = [{"messages": [{**USER, "content": parts[1:]}, {**ANSWER, "content": parts}]}] * 3
    jsonl(tmp_path, rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    trained, notes = read_file(tmp_path / f"a{suffix}", template)
    assert trained == [f"{answer}<|endoftext|>"] * 3
    assert notes == ({prepare.THOUGHTS: lost} if lost else {})
