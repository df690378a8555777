"""Test that tests/prose.py finds forbidden phrases, but ignores code and lines with a
`prose: REASON` comment."""

from pathlib import Path

from tests import prose

SOURCE = '''"""Of this module."""
found = "3 bytes a token"
print(f"{found} tokens a second")  # it
#   goes on
kept = "3 bytes a token"  # prose: a record's words
print("bytes per token")
# Whether it is done
'''
PAGE = """It sends 16 bytes a
parameter, too.
`that is learnt`

    moments that goes on
"""


def messages(name: str, text: str, folder: Path) -> list[str]:
    (folder / name).write_text(text)
    return [f"{line}: {message}" for _, line, message in prose.findings(folder / name)]


def test_phrases_are_found_in_source_code(tmp_path):
    found = messages("a.py", SOURCE, tmp_path)
    assert [line.split(":")[0] for line in found] == ["1", "2", "2", "3", "4", "7"]
    assert "begins with 'Of'" in found[0]
    assert "'bytes a token'" in found[1] + found[2]
    assert "'tokens a second'" in found[3]
    assert "'goes on'" in found[4]
    assert "begins with 'Whether'" in found[5]


def test_phrases_are_found_on_pages(tmp_path):
    found = messages("a.md", PAGE, tmp_path)
    assert [line[:3] for line in found] == ["1: ", "2: "]
    assert "'bytes a parameter'" in found[0]
