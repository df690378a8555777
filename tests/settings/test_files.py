import pytest

from distributed_training.settings.config import PATHS, build_config
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import expand_home, load_json, shown
from tests.support import refused


def test_home_is_expanded_and_else_a_path_is_taken_as_written(monkeypatch):
    monkeypatch.setenv("HOME", "/some/home")
    for text, path in (("~/runs", "/some/home/runs"), ("~", "/some/home"), ("a/b.txt", "a/b.txt")):
        assert expand_home("output_dir", text) == path
    assert expand_home("dataset", "b" * 255) == "b" * 255


@pytest.mark.parametrize("text", ["~nobody-of-that-name/a", "b" * 256, "a/" * 3000])
def test_paths_that_the_system_refuses(text):
    for key in PATHS:
        with refused(f"{key}=", "cannot be used as a path"):
            build_config({key: text})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{\n "epochs": 2,\n}', ["cannot be read as JSON", "line 3 column 1"]),
        (b"", ["line 1 column 1"]),
        (b"\xef\xbb\xbf{}", ["BOM"]),
        (b'{"model": "\xff"}', ["cannot be read", "0xff"]),
        (b"[" * 100_000, ["nested too deeply"]),
        (b'{"model": "\\udc00"}', ["half a surrogate pair"]),
    ],
)
def test_what_is_not_json_is_named_with_its_place(content, words, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with refused(f"preset {tmp_path / 'a.json'}", *words):
        load_json(tmp_path / "a.json", "preset")


def test_a_folder_and_a_missing_file(tmp_path):
    (tmp_path / "large.json").write_text("[1]")
    assert load_json(tmp_path / "large.json", "preset") == [1]
    with refused("cannot be read"):
        load_json(tmp_path, "preset")
    with refused("larg.json does not exist", "did you mean large.json?"):
        load_json(tmp_path / "larg.json", "preset")
    with refused("does not exist", "there are none"):
        load_json(tmp_path / "nowhere" / "x.json", "preset")


def test_long_values_are_cut():
    assert shown([1, None]) == "[1, None]"
    assert shown("a" * 300) == f"'{'a' * 199} ... (302 characters)"


def test_parts_of_an_error_are_joined_into_one_line():
    error = UserError("a is\nwrong.", " because\u2028of b. ", "type\tc")
    assert str(error) == "a is wrong; because of b; type c"
