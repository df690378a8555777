"""Makes explorer.html, one file that needs no network, from the files in this folder.

python explorer/build.py           writes it
python explorer/build.py --check   exits with 1 where it is not what the files make

The scripts are ES modules, so that node can run the engine as it stands. A page that is opened by a
double click may not load modules from files, so they are put one after the other, each after those
that it imports, and what they import and export is left out. Top-level names therefore have to
differ between files.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "explorer.html"
ENTRY = HERE / "ui" / "main.mjs"
_IMPORT = re.compile(r'^import (?P<what>[^"]*?) from "(?P<path>[^"]+)";(?: //.*)?\n', re.MULTILINE)
_NAME = re.compile(r"^(?:export )?(?:async )?(?:function\*?|const|let|class) (\w+)", re.MULTILINE)


def in_order(path: Path, done: list[Path]) -> list[Path]:
    """The modules that `path` needs, each after what it imports, and `path` itself at the end."""
    for found in _IMPORT.finditer(path.read_text()):
        needed = (path.parent / found["path"]).resolve()
        if needed not in done:
            in_order(needed, done)
    done.append(path)
    return done


def bundle() -> str:
    """All scripts as one. Raises ValueError for a top-level name that two files have."""
    owner: dict[str, Path] = {}
    parts = []
    for path in in_order(ENTRY, []):
        text = path.read_text()
        for name in _NAME.findall(text):
            if name in owner:
                raise ValueError(f"{name} is in {owner[name].name} and in {path.name}")
            owner[name] = path
        spaces = re.findall(r'^import \* as (\w+) from "([^"]+)"', text, re.MULTILINE)
        body = _IMPORT.sub("", text)
        for space, source in spaces:  # `orders.zbV` is zbV of the file it is from
            assert (path.parent / source).is_file()
            body = re.sub(rf"\b{space}\.(\w+)", r"\1", body)
        body = re.sub(r"^export ", "", body, flags=re.MULTILINE).strip()
        parts.append(f"// --- {path.relative_to(HERE)}\n{body}\n")
    return "\n".join(parts)


def build() -> str:
    """The page's text."""
    page = (HERE / "page.html").read_text()
    page = page.replace("@STYLE@\n", (HERE / "style.css").read_text())
    return page.replace("@SCRIPT@\n", bundle())


def main() -> None:
    """Write the page, or compare it."""
    page = build()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.is_file() or PAGE.read_text() != page:
            sys.exit(f"{PAGE.name} is not what explorer/ makes; type python explorer/build.py")
    elif sys.argv[1:]:
        sys.exit("error: the only argument is --check")
    else:
        PAGE.write_text(page)
        print(PAGE)


if __name__ == "__main__":
    main()
