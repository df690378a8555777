"""Generate the table and count the rows of BUGS.md from the record of results/lab/bugs.py."""

import re
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tabulate import tabulate

from distributed_training.settings.files import ROOT, load_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIST = ROOT / "results/lab/bugs.toml"
RECORD = Path("cpu-bugs/rows.json")
NUMBERS = re.compile(r"differs by (\S+), but rounding explains at most (\S+)\.(?: |$)")


def read_bugs(records: Path) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Return each bug of bugs.toml and what `parity` said, or None if it was not run."""
    results = load_json(records / RECORD, "record")["bugs"]
    return [(bug, results.get(bug["name"])) for bug in tomllib.loads(LIST.read_text())["bug"]]


def is_caught(result: dict[str, Any] | None) -> bool:
    """Return whether `parity` named a difference. A run that fails is no silent bug."""
    return result is not None and any(
        why and said != "failed" for _, said, _, why in result["rows"]
    )


def excess(result: dict[str, Any]) -> float:
    """Return the largest difference of a result, relative to its tolerance."""
    pairs = [pair for *_, why in result["rows"] for pair in NUMBERS.findall(why)]
    return max((float(difference) / float(limit) for difference, limit in pairs), default=0.0)


def correct_rows(records: Path) -> list[tuple[str, str, float | None, str]]:
    """Return the rows of layouts in comparisons of correct code, without those that do other
    work or were skipped, and the rows of references that were called wrong."""
    results = load_json(records / RECORD, "record")["correct"].values()
    rows = [row for result in results for row in result["rows"]]
    references = ("reference", "rounding")
    return [
        row
        for row in rows
        if row[1] not in ("skipped", "other work", *references) or (row[1] in references and row[3])
    ]


def table(records: Path = ROOT / "results/records") -> str:
    """Return a table of all bugs and of what `parity` said."""
    rows = []
    for bug, result in read_bugs(records):
        said = bug.get("unseen", "")
        if result is not None:
            reasons = [f"{row[0]}: {row[3].partition('. ')[0]}" for row in result["rows"] if row[3]]
            said = reasons[0].rstrip(".") if reasons else "nothing"
        rows.append([f"[{bug['name']}]({bug['url']})", bug["what"], said])
    return tabulate(rows, ["bug", "what goes wrong", "what `parity` says"], tablefmt="github")


def summary(records: Path = ROOT / "results/records") -> str:
    """Return a sentence with the numbers of caught bugs and of correct comparisons."""
    bugs = read_bugs(records)
    caught = sum(is_caught(result) for _, result in bugs)
    rows = correct_rows(records)
    wrong = sum(row[1] != "ok" for row in rows)
    text = f"`parity` catches {caught} of {len(bugs)} bugs. It called {wrong} of "
    return text + f"{len(rows)} comparisons of correct code wrong."


def picture(records: Path) -> Figure:
    """Plot the largest difference of each bug and of all correct layouts, relative to the
    tolerance."""
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    figure.suptitle("Largest difference / tolerance: bugs, and correct layouts", x=0.01, ha="left",
                    fontsize=11, fontweight="bold")  # fmt: skip
    axes = figure.subplots()
    bugs = [(bug["name"], excess(result)) for bug, result in read_bugs(records) if result]
    measured = [(name, value) for name, value in bugs if value]
    axes.plot([value for _, value in measured], range(len(measured)), "o", color="#d55e00")
    correct = [max(row[2], 1e-4) for row in correct_rows(records) if row[2] is not None]
    axes.plot(correct, [len(measured)] * len(correct), "|", color="#0072b2", markersize=14)
    axes.set_yticks(
        range(len(measured) + 1),
        [*(name for name, _ in measured), f"{len(correct)} correct layouts"],
    )
    axes.axvline(1, color="#999999", linewidth=0.8)
    axes.set(xscale="log", xlabel="1: the tolerance; 0.0001: this or less")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure
