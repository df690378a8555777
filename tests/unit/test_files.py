import json
import os
from pathlib import Path

import pytest

from distributed_training.files import (
    MAX_NESTING,
    check_unicode,
    load_json,
    nearest,
    parse_json,
    shown,
    user_path,
)
from tests.unit.conftest import refused


@pytest.mark.parametrize("text", ["a", "a/b.txt", "/no/such/folder/a", ".", "b" * 255])
def test_a_path_is_taken_as_written_whether_it_exists_or_not(text):
    assert user_path("dataset", text) == Path(text)


def test_below_a_file_is_a_path_too(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert user_path("dataset", str(path)) == path


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/some/home")
    assert user_path("output_dir", "~/runs") == Path("/some/home/runs")
    assert user_path("output_dir", "~") == Path("/some/home")


@pytest.mark.parametrize(
    "text", ["~nobody-of-that-name/a", "b" * 256, "a/" * 3000, "a\0b", "\ud800"]
)
def test_paths_that_pathlib_refuses(text):
    with refused("dataset=", "cannot be used as a path", "give another path"):
        user_path("dataset", text)


def test_a_circle_of_links(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with refused("resume=", "symbolic links"):
        user_path("resume", str(tmp_path / "a"))


def test_a_folder_that_may_not_be_entered(tmp_path, monkeypatch):
    """Root, whom tests may run as, may enter every folder: the system's answer is played."""
    stat = os.stat

    def forbidden(path, **options):
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", forbidden)
    with refused(f"weights='{tmp_path}'", "Permission denied"):
        user_path("weights", str(tmp_path))


@pytest.mark.parametrize("text", ['{"a": [1, null]}', "[]", "NaN", "1e400"])
def test_json_is_parsed(text):
    assert repr(parse_json(text)) == repr(json.loads(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ("1" * 5000, "more digits"),
        ("[-" + "1" * 5000 + "]", "more digits"),
        ("[1,]", "line 1 column"),
        ("\ufeff{}", "BOM"),
    ],
    ids=["lists", "objects", "digits", "negative", "comma", "byte order mark"],
)
def test_every_refusal_of_json_is_of_one_kind(text, message):
    with pytest.raises(json.JSONDecodeError, match=message):
        parse_json(text)


def nested(depth):
    return "[" * depth + "]" * depth


def test_nesting_that_could_not_be_copied_or_printed_is_refused(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(nested(MAX_NESTING))
    assert load_json(file, "preset") is not None
    file.write_text(nested(MAX_NESTING + 1))
    with refused(f"preset {file} is nested more than {MAX_NESTING} levels deep"):
        load_json(file, "preset")
    file.write_text('{"a":' * 500 + "1" + "}" * 500)
    with refused("nested"):
        load_json(file, "preset")


def test_half_a_surrogate_pair_is_named():
    check_unicode("generate", "\U0001f600 ä \0")
    with refused("generate holds '\\udc00'", "half of a surrogate pair"):
        check_unicode("generate", "ok \udc00")


def test_nearest():
    assert nearest("batchsize", ["epochs", "batch_size"]) == "batch_size"
    assert nearest("qqqq", ["epochs", "batch_size"]) is None


def test_values_are_shown_whatever_they_are():
    inside_itself: list = []
    for _ in range(100_000):
        inside_itself = [inside_itself]
    assert shown("a") == "'a'"
    assert shown([1, None]) == "[1, None]"
    assert shown(10**5000) == "a int too large to print"
    assert shown(inside_itself) == "a list too large to print"
    assert shown("a" * 300).startswith("'aaa")
    assert shown("a" * 300).endswith(" ... (302 characters)")
    assert len(shown("a" * 100_000)) < 250
