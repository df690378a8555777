"""Regenerate the generated parts of the documents, and the figures that the documents show.

    python results/lab/documents.py                        rewrites all documents, like `make docs`
    python results/lab/documents.py --check README.md      fails if the document is out of date

The generated parts are cog blocks, which call results/lab/pages/ and the package, and the figures
in sentences (results/lab/pages/sentences.py).
"""

from collections.abc import Sequence
from pathlib import Path

import checkout
from cogapp import Cog
from cogapp.cogapp import CogCheckFailed, CogError

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT
from distributed_training.settings.keys import Parser
from results.lab.pages import figures, sentences, tables

PATTERNS = (
    "README.md", "TRAINING_RESULTS.md", "REAL_MODELS_GUIDE.md", "CLUSTER_QUICKSTART.md",
    "CONTRIBUTING.md", "configs/README.md", "strategies/README.md", "strategies/LAWS.md",
    "strategies/*/README.md", "results/PREDICTIONS.md", "results/MEASUREMENTS.md",
    "results/BUGS.md", "results/every_run.txt", "results/lab/planner_page/index.html",
)  # fmt: skip
COMMAND = "python results/lab/documents.py"


def fill_blocks(option: str, documents: Sequence[Path]) -> None:
    """Run cog with `-r` (write) or `--check` on the documents. Raises UserError if a document
    differs from its records or cannot be read, or if a block cannot be filled."""
    names = " ".join(map(str, documents))
    try:
        Cog().callable_main(["cog", option, "--verbosity=1", *map(str, documents)])
    except CogCheckFailed:
        what = "documents differ from results/records"
        fix = f"run: {COMMAND} {names}"
        raise UserError(what, fix=fix) from None
    except CogError as error:
        cause = error.__context__
        text = str(cause if isinstance(cause, UserError) else error).splitlines()[-1]
        raise UserError(f"a generated block in {names} failed", text) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{names} cannot be read or written", str(error)) from None


def fill_sentences(document: Path, *, write: bool) -> None:
    """Update the figures in a page's sentences. Without `write`, raise UserError if a figure is out
    of date."""
    text = document.read_text(encoding="utf-8")
    filled = sentences.fill(text, sentences.read_formulas(document))
    if write:
        document.write_text(filled, encoding="utf-8")
    elif filled != text:
        what = f"figures in the sentences of {document} differ from results/records"
        raise UserError(what, fix=f"run: {COMMAND} {document}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument(
        "documents",
        nargs="*",
        type=Path,
        help="documents to rewrite (default: all with generated parts)",
    )
    parser.add_argument("--check", action="store_true", help="fail if a document is out of date")
    arguments = parser.parse_args(argv)
    documents = arguments.documents
    if not documents:
        documents = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
    fill_blocks("--check" if arguments.check else "-r", documents)
    for document in documents:
        if document.suffix == ".md":
            fill_sentences(document, write=not arguments.check)
    plots = tables.RECORDS_DIR.with_name("plots")
    figures.update_figures(documents, tables.RECORDS_DIR, plots, write=not arguments.check)
    return 0


if __name__ == "__main__":
    checkout.run(main)
