"""Print the number of code tokens in each folder of the project: names, numbers, strings and
operators, without comments, docstrings and layout.

    python results/lab/sizes.py"""

import ast
import collections
import io
import tokenize

import checkout
from tabulate import tabulate

FOLDERS = ("distributed_training", "pipedream_tutorial", "results/lab", "tests")
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def count_tokens(source: str) -> int:
    """Return the number of code tokens in Python source."""
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


def main() -> int:
    sizes = collections.Counter[str]()
    for folder in FOLDERS:
        for file in (checkout.ROOT / folder).rglob("*.py"):
            parts = file.relative_to(checkout.ROOT).parts
            count = count_tokens(file.read_text())
            sizes[folder] += count
            if folder == "distributed_training":
                sizes["/".join(parts[:2])] += count
    print(tabulate(sorted(sizes.items()), headers=["folder", "code tokens"], tablefmt="simple"))
    return 0


if __name__ == "__main__":
    checkout.run(main)
