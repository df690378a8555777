"""Check docstrings, comments, messages, pages and names for wording that our style forbids.

    python -m tests.prose              # fails if findings exceed the limits in tests/prose.json
    python -m tests.prose --list PATH  # prints the findings in a file or folder
    python -m tests.prose --lower      # lowers the limits in tests/prose.json to current counts

To keep a phrase, write `prose: REASON` in a comment on its line."""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "tests/prose.json"
SUFFIXES = {".py", ".md", ".ipynb", ".js", ".html", ".jinja", ".sh", ".slurm", ".yaml"}
OPENING = re.compile(r"(Of|What|Whether|That|Those|The same|How|Where|Why|By)\b")
COMMENT_OPENING = re.compile(r"(Of|What|Whether|Those)\b")
OWN_EXAMPLES = {"prose", "test_prose"}
EMPTY_NAMES = {"found", "each", "own", "place", "said", "asked"}
UNIT = (
    r"(\d+(?:[.,]\d+)*|one|two|three|four|once|twice|times|s|ms|us|seconds?|minutes?|hours?|bytes?|[KMGT]i?B"
    r"|tokens|samples|sequences|updates|steps|messages?|passes|lines?|blocks|dollars)"
)
OWNER = (
    r"(steps?|GPU|token|process|parameter|run|batch|micro-?batch|sample|layer|epoch|node|rank|stage"
    r"|second|minute|hour)"
)
PHRASES = {
    rf"(?<![-.\w]){UNIT} an? {OWNER}\b(?!')": "write 'per', not 'a'",
    r", too(?=[.,;:)!?]|$)": "drop the comma, or write 'also'",
    r"\blearnt\b": "learned, or trained on",
    r"\bmend(s|ed)?\b": "fix",
    r"\b(go|goes|going|went) on\b": "continue",
    r"\b(is|are|was|were) left(?=[.,;:)]|$)": "remain",
    r"\b(is|are|was|were) there(?=[.,;:)]|$)": "is available",
    r"\b(which|that|what|it|they) (is|are) there\b": "is available",
    r"\bdealt out\b": "partitioned",
    r"\bon the wire\b": "communication volume",
    r"\brehearsals?\b": "smoke test",
    r"\bDeepSpeed JSONs?\b": "DeepSpeed configuration",
    r"(?<![-\w])quick(er|est)\b": "fast, faster, fastest",
    r"(?<!each\s)(?<!all\s)(?<!some\s)(?<!most\s)(?<!multiple\s)\bof which\b": "new sentence",
    r"\blikewise\b": "name the thing",
    r"\bso many\b": "name the number",
    r"\b(no|have|has|the) room for\b": "free memory, or space",
    r"(?<!Adam\s)(?<!AdamW\s)(?<!'s\s)\bmoments\b": "optimizer state, or Adam moments",
    r"\bthe arithmetic\b": "compute dtype",
    r"(?<!scaling\s)(?<!Chinchilla's\s)\blaws?\b(?![/.])": "formula",
    r"\ball the same\b": "still",
    r"\bin turns?\b": "alternately, or in order",
    r"\b(whoever|whatever (is|the|it|they))\b": "name the actor, or 'for all'",
    r"\bfor ever\b": "forever",
    r"\b(put|puts|putting) off\b": "delay",
    r"\banew\b": "again",
    r"\bone's\b": "name the owner",
    r"\bthe one (before|after)\b": "the previous, the next",
    r"\bwhere (none|one|they|there) (is|are|has|have)\b": "if",
    r"\b(is|are) (told|asked|said)\b": "name the actor",
    r"\bis tried\b|\bare tried\b|\bhave been tried\b": "is tested",
    r"\bwhat (is|are) (missing|left|kept|sent|new)\b": "name the thing",
    r"\bwhat (else|came|comes|goes|takes|needs|makes)\b": "name the thing",
}
PATTERNS = {re.compile(phrase.replace(" ", r"\s+")): hint for phrase, hint in PHRASES.items()}


Finding = tuple[Path, int, str]


def find_phrases(text: str, first_line: int) -> Iterator[tuple[int, str]]:
    for pattern, hint in PATTERNS.items():
        for match in pattern.finditer(text):
            line = first_line + text.count("\n", 0, match.start())
            yield line, f"'{' '.join(match[0].split())}': {hint}"


def in_python(source: str, in_tests: bool) -> Iterator[tuple[int, str]]:
    """Yield findings in docstrings, comments, messages and (outside tests) assigned names."""
    skip = set()  # docstrings, which are checked separately, and parts of f-strings
    for node in ast.walk(ast.parse(source)):  # ast.walk yields parents before children
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                docstring = node.body[0].value  # type: ignore[attr-defined]
                skip.add(docstring)
                if match := OPENING.match(docstring.value.lstrip()):
                    yield docstring.lineno, f"docstring begins with '{match[0]}': begin with a verb"
                yield from find_phrases(docstring.value, docstring.lineno)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES and not in_tests:
                yield node.lineno, f"'{node.id}' says nothing: name the thing"
        elif isinstance(node, ast.JoinedStr):
            skip.update(node.values)
            parts = [part.value if isinstance(part, ast.Constant) else "7" for part in node.values]
            yield from ((node.lineno, message) for _, message in find_phrases("".join(parts), 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skip:
            yield from ((node.lineno, message) for _, message in find_phrases(node.value, 1))
    paragraph: list[str] = []
    for i, line in enumerate(source.split("\n"), 1):
        if match := re.search(r"(^\s*|  )# ?(.*)", line):
            paragraph.append(match[2])
        if not match or match[1] == "  " or i == source.count("\n"):
            first_line = i - len(paragraph) + (1 if match else 0)
            if paragraph and (opening := COMMENT_OPENING.match(paragraph[0])):
                yield first_line, f"comment begins with '{opening[0]}': begin with a noun or a verb"
            yield from find_phrases("\n".join(paragraph), first_line)
            paragraph = []


def blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n") + "`"


def in_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield findings in Markdown text, except in code and in generated parts."""
    text = re.sub(r"(?s)<!-- ?\[\[\[cog.*?\[\[\[end\]\]\].*?-->", blank, text)
    text = re.sub(r"(?ms)^\s*```.*?^\s*```|<!--(?! prose:).*?-->|^(    |>)[^\n]*", blank, text)
    yield from find_phrases(re.sub(r"`[^`\n]+`|\]\([^)]*\)", blank, text), 1)


def findings(path: Path) -> list[Finding]:
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    if path.suffix == ".py":
        results = in_python(text, "tests" in path.parts)
    else:
        results = in_markdown(text) if path.suffix in (".md", ".ipynb") else find_phrases(text, 1)
    lines = ["", *text.split("\n")]
    exemption = re.compile(r"prose: \w+")
    return [
        (path, line, message)
        for line, message in sorted(results)
        if not exemption.search(lines[line])
    ]


def folder_of(path: Path) -> str:
    """Return the name under which the findings in a file are counted. The name is the file's folder
    or, for a page, the file's path."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts if path.suffix == ".md" else parts[:2] if len(parts) > 2 else parts[:1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", metavar="PATH", nargs="+", default=[], dest="listed")
    parser.add_argument("--lower", action="store_true")
    args = parser.parse_args(arguments)
    listing = subprocess.run(
        ["git", "ls-files", *args.listed], cwd=ROOT, check=True, capture_output=True, text=True
    )
    files = [ROOT / name for name in listing.stdout.splitlines()]
    files = [path for path in files if path.suffix in SUFFIXES and path.stem not in OWN_EXAMPLES]
    results = [finding for path in files for finding in findings(path)]
    counts = Counter(folder_of(path) for path, _, _ in results)
    limits = json.loads(LIMITS.read_text())
    if args.lower:
        lowered = {name: min(count, limits.get(name, 0)) for name, count in counts.items()}
        LIMITS.write_text(json.dumps(lowered, indent=1, sort_keys=True) + "\n")
        return 0
    failing = {name for name, count in counts.items() if count > limits.get(name, 0)}
    for path, line, message in results:
        if args.listed or folder_of(path) in failing:
            print(f"{path.relative_to(ROOT)}:{line}: {message}")
    for name in sorted(failing if not args.listed else ()):
        print(f"{name}: {counts[name]} findings, {limits.get(name, 0)} allowed")
    return 1 if failing and not args.listed else 0


if __name__ == "__main__":
    sys.exit(main())
