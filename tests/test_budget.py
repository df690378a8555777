"""Test that no room of the project grows unnoticed. `budget.json` holds the size of each room in
code tokens. To write the present sizes, run: python -m tests.test_budget"""

import ast
import collections
import functools
import io
import json
import tokenize

import pytest

from distributed_training.settings.files import ROOT

BUDGET = ROOT / "tests" / "budget.json"
FOLDERS = ("distributed_training", "pipedream_tutorial", "results/lab", "tests")
SLACK = 0.005  # a room that has become smaller by a larger share gets a smaller budget
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def count_tokens(source: str) -> int:
    """Return the number of tokens in Python code without comments, docstrings and layout."""
    docstring_lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (ast.get_docstring(node, clean=False) is not None):
            docstring_lines.add(node.body[0].lineno)
    return sum(
        token.type not in _LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in docstring_lines)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


@functools.cache
def count_rooms() -> dict[str, int]:
    """Return the number of tokens of each room by its path. The rooms are the folders and files of
    distributed_training, and the other FOLDERS as a whole."""
    sizes = collections.Counter[str]()
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT).parts
            room = "/".join(parts[:2]) if folder == "distributed_training" else folder
            sizes[room] += count_tokens(file.read_text())
    return {room: size for room, size in sorted(sizes.items()) if size}


BUDGET_BY_ROOM: dict[str, int] = json.loads(BUDGET.read_text())


def test_every_room_has_a_budget():
    assert list(count_rooms()) == list(BUDGET_BY_ROOM)


@pytest.mark.parametrize("room", BUDGET_BY_ROOM)
def test_room_keeps_its_budget(room):
    size, budget = count_rooms()[room], BUDGET_BY_ROOM[room]
    assert size <= budget, f"{room} grew to {size}: take something out, or raise tests/budget.json"
    assert size >= (1 - SLACK) * budget, f"{room} has only {size}: lower tests/budget.json"


if __name__ == "__main__":
    BUDGET.write_text(json.dumps(count_rooms(), indent=2) + "\n")
