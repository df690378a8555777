"""Build the tutorial as a static site: its pages as HTML, the explorer, pictures and the notebook.
The build needs no network.

    python results/lab/tutorial/website.py --output site --repository OWNER/NAME

Links between pages stay relative, so the site also opens from a folder. With --repository, links to
files outside the tutorial lead to GitHub, a badge opens the notebook in Colab, and the notebook
downloads the tutorial from GitHub.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import checkout
from markdown_it import MarkdownIt

TUTORIAL = checkout.ROOT / "pipedream_tutorial"
BRANCH = (
    "gh-pages"  # the workflow pushes the site to this branch, and Colab reads the notebook from it
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ max-width: 860px; margin: 0 auto; padding: 12px 16px 60px; font: 17px/1.55 sans-serif;
 overflow-wrap: anywhere; }}
img {{ max-width: 100%; }}
@media (max-width: 560px) {{  /* a picture scrolls sideways, so that its text stays readable */
 p:has(> img) {{ overflow-x: auto; }}
 p > img {{ max-width: none; width: 760px; }}
 p > img[src*="naive"] {{ width: 100%; }}  /* narrow */
}}
pre {{ overflow-x: auto; background: #f3f5f6; padding: 10px; font-size: 13px; line-height: 1.35; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
td, th {{ border: 1px solid #cfd6da; padding: 3px 9px; overflow-wrap: normal; }}
.badge {{ background: #555; color: #fff; border-radius: 3px; padding: 2px 7px; }}
</style>
</head>
<body>
<nav><a href="index.html">Tutorial</a> | <a href="ADVANCED.html">Advanced</a> |
<a href="COMPARISON.html">Comparison</a> | <a href="explorer.html">Explorer</a>{badge}</nav>
{body}
</body>
</html>
"""
COLAB = "https://colab.research.google.com"
# Colab's own badge would need network access.
BADGE = """ |
<a class="badge" href="{link}">Open the notebook in Colab</a>"""
FETCH = """# Colab has torch, numpy and matplotlib. This cell downloads the tutorial.
!git clone --quiet --depth 1 https://github.com/{repository} tutorial
%cd tutorial/pipedream_tutorial"""


def build_site(output: Path, repository: str = "") -> None:
    """Write the site to `output`, a folder that must not exist yet."""
    ignore = shutil.ignore_patterns("tests", "__pycache__", ".*")
    shutil.copytree(TUTORIAL, output, ignore=ignore)
    badge = ""
    if repository:
        link = f"{COLAB}/github/{repository}/blob/{BRANCH}/lecture.ipynb"
        badge = BADGE.format(link=link)
        add_fetching_cell(output / "lecture.ipynb", repository)
    for page in output.glob("*.md"):
        name = "index" if page.stem == "README" else page.stem
        html = render(page.read_text(), repository)
        title = page.read_text().partition("\n")[0].lstrip("# ")
        (output / f"{name}.html").write_text(PAGE.format(title=title, body=html, badge=badge))
        page.unlink()
    explorer = output / "explorer.html"
    explorer.write_text(explorer.read_text().replace("README.md", "index.html"))
    (output / ".nojekyll").touch()  # GitHub serves the files as they are


def render(text: str, repository: str) -> str:
    """Return a page as HTML, with GitHub's anchors."""
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    html = markdown.render(text)
    html = re.sub(r"<(h[1-6])>(.*?)</\1>", _add_anchor, html)
    html = re.sub(r'href="README\.md', 'href="index.html', html)
    html = re.sub(r'href="(\w+)\.md', r'href="\1.html', html)
    if repository:
        html = html.replace('href="../', f'href="https://github.com/{repository}/blob/main/')
    return html


def _add_anchor(heading: re.Match[str]) -> str:
    level, inner = heading.groups()
    plain = re.sub(r"<[^>]*>", "", inner).lower()
    anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
    return f'<{level} id="{anchor}">{inner}</{level}>'


def add_fetching_cell(path: Path, repository: str) -> None:
    """Insert a new first cell into the notebook. This cell fetches the tutorial."""
    book = json.loads(path.read_text())
    cell: dict[str, Any] = {
        "cell_type": "code", "execution_count": None, "id": "fetch", "metadata": {},
        "outputs": [], "source": FETCH.format(repository=repository),
    }  # fmt: skip
    book["cells"].insert(0, cell)
    path.write_text(json.dumps(book, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--repository", default="", help="OWNER/NAME on GitHub")
    arguments = parser.parse_args()
    build_site(arguments.output, arguments.repository)


if __name__ == "__main__":
    main()
