import os
from pathlib import Path

import pytest

from distributed_training.settings.errors import UserError, run_and_report_errors
from distributed_training.settings.files import (
    MARK,
    atomic_folder,
    check_replaced,
    load_json,
    shown,
    write_own,
)
from distributed_training.settings.request import build_config
from tests.support import refused

PATHS = (
    "model", "dataset", "validation_dataset", "tokenizer", "weights", "deepspeed_config",
    "offload_dir", "output_dir", "resume",
)  # fmt: skip


def test_home_is_expanded_and_other_paths_stay_unchanged(monkeypatch):
    monkeypatch.setenv("HOME", "/some/home")
    for text, path in (("~/runs", "/some/home/runs"), ("~", "/some/home"), ("./a/b", "./a/b")):
        for key in PATHS:
            assert getattr(build_config({key: text}), key) == path


@pytest.mark.parametrize(
    "kind", ["quote", "whole quote", "changed", "folder", "pipe", "link", "below a file"]
)
def test_files_that_this_program_did_not_write_are_not_replaced(kind, tmp_path):
    path, own = tmp_path / "a", tmp_path / "b"
    for number in range(2):
        write_own(own, f"# {MARK}\nnaïve {number} {MARK} 7\n")
        for file in (own, tmp_path / "c"):
            check_replaced(file)
    if kind == "quote":
        path.write_text(f"# {MARK}")
    elif kind == "whole quote":
        path.write_text(f"see: {own.read_text()}")
    elif kind == "changed":
        path.write_text(own.read_text() + "\n")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "below a file":
        path = own / "a"
    else:
        path.symlink_to("missing")
    with refused(str(path)):
        check_replaced(path)


@pytest.mark.parametrize(
    ("name", "content", "messages"),
    [
        ("a", b'{\n "epochs" 2\n}', ["line 2 column 11"]),
        ("a", b'{"model": "\xff"}', ["0xff"]),
        ("large", b"[1]", ["large.json"]),
        ("a", b"[" * 2000 + b"]" * 2000, ["Recursion limit"]),
    ],
)
def test_invalid_json_is_refused_with_its_location(name, content, messages, tmp_path):
    (tmp_path / f"{name}.json").write_bytes(content)
    file = tmp_path / f"{name}.json".replace("large", "larg")
    with refused(f"preset {file}", *messages):
        load_json(file, "preset")


def test_files_change_when_a_slow_disk_has_stored_them(tmp_path, monkeypatch):
    """Otherwise, whoever watches their times takes a slow export for a hang."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.utime(descriptor, (1, 1)))
    folder = tmp_path / "hf"
    with atomic_folder(folder) as unfinished:
        (unfinished / "a").touch()
    for path in (folder / "a", folder):
        assert path.stat().st_mtime > 1


def test_errors_are_one_line_of_limited_length():
    assert run_and_report_errors(Path("a" * 300).exists) == 2
    error = UserError("a is\nwrong.", " because\u2028of b. ", "type\tc")
    assert str(error) == "a is wrong. Because of b. Type c."
    assert shown([1, None]) == "[1, None]"
    assert shown("a" * 300) == f"'{'a' * 199} ... (302 characters)"
