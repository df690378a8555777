"""Make prompt-and-answer records from the embedded text, the code of Python's standard library."""

import ast
import json
from pathlib import Path

from distributed_training.data.corpus import read_embedded


def write_records(file: Path) -> None:
    """Write a prompt and a completion for every documented function in the standard library."""
    with file.open("w") as out:
        for text in read_embedded():
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError):  # a help topic
                continue
            lines = text.splitlines(keepends=True)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and (answer := ast.get_docstring(node)):
                    first = node.body[0]
                    source = lines[node.lineno - 1 : first.lineno - 1]
                    source += lines[first.end_lineno or first.lineno : node.end_lineno]
                    row = {"prompt": "".join(source), "completion": f'    """{answer}"""\n'}
                    out.write(json.dumps(row) + "\n")
