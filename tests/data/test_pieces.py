"""A text cut into pieces gives the ids of the whole; a record gives what is learnt of it."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed_training.data import pieces
from distributed_training.data.corpus import read_text
from distributed_training.data.pieces import Piece, cut_lines, cut_record, cut_text, find_form
from tests.support import refused

AWKWARD = st.sampled_from("ab1é字。.,'\"-_ \n\t\r\x0b\x1c\x85\u00a0\u2028\u3000\u180e\u200b🙂s")
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


def blocks_of(text, sizes):
    """The text in blocks of these sizes, over and over."""
    blocks, start = [], 0
    while start < len(text):
        blocks.append(text[start : start + sizes[len(blocks) % len(sizes)]])
        start += len(blocks[-1])
    return blocks


def ids_of(tokenizer, parts):
    return np.concatenate(tokenizer.encode_batch([piece.text for piece in parts])).tolist()


@pytest.fixture(scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_MIN", 3)
        yield


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(st.one_of(AWKWARD, st.characters(exclude_categories=["Cs"])), max_size=80),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=3),
)
def test_pieces_give_the_ids_of_the_whole_text(text, sizes, tokenizer, small_pieces):
    text += "x"  # a blank text is none
    parts = list(cut_text(blocks_of(text, sizes)))
    assert "".join(piece.text for piece in parts) == text
    assert parts == list(cut_text([text]))  # however it was read
    assert [piece.ends for piece in parts] == [False] * (len(parts) - 1) + [True]
    assert ids_of(tokenizer, parts) == tokenizer.encode_batch([text])[0].tolist()


def test_a_text_without_spaces_is_cut_all_the_same(monkeypatch):
    monkeypatch.setattr(pieces, "_MIN", 3)
    monkeypatch.setattr(pieces, "_MAX", 10)
    parts = [piece.text for piece in cut_text(blocks_of("x" * 25 + " yyyyy zz", [7]))]
    assert parts == ["x" * 10, "x" * 10, "x" * 5, " yyyyy", " zz"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(AWKWARD, max_size=60))
def test_lines_are_those_of_the_whole_text(text, tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode())
    for parts in (read_text(file, by_line=True), [text]):  # on disk, or in memory
        found = [piece.text for piece in cut_lines(parts)]
        assert found == [line for line in text.splitlines() if line.strip()]


def question(text):
    return Piece(text, in_loss=False, eos=False, ends=False)


def test_of_records_the_answers_are_learnt():
    record = {"prompt": "2+2=", "completion": "4", "id": 7}
    assert cut_record(record, "prompt", "here", None) == [question("2+2="), Piece("4")]
    assert cut_record({"prompt": "a", "completion": " "}, "prompt", "here", None) == []
    assert cut_record(CHAT, "messages", "here", None) == [
        question("system: Be brief.\nuser: 2 + 2?\nassistant:"),
        Piece(" 4", in_loss=True, eos=True, ends=False),
        question("user: 3 + 3?\nassistant:"),
        Piece(" 6", in_loss=True, eos=True, ends=True),
    ]
    assert cut_record({"messages": CHAT["messages"][:2]}, "messages", "here", None) == []
    forms = [record, {**record, "messages": []}, {**record, "text": ""}, {**CHAT, "prompt": ""}]
    found = [find_form(each, "here") for each in forms]
    assert found == ["prompt", "prompt", "text", "messages"]


@pytest.mark.parametrize(
    ("record", "form", "words"),
    [
        ([], "text", ['no "text" string', '{"text": "..."}']),
        ({"prompt": None}, "prompt", ['no "prompt" string', '"completion": "..."']),
        ({"messages": ["a"]}, "messages", ['a message has no "role" string']),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages", ['no "content" string']),
    ],
)
def test_a_record_of_another_form_is_refused(record, form, words):
    with refused("a.jsonl line 3", *words):
        cut_record(record, form, "a.jsonl line 3", None)
