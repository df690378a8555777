"""Generate the table of other calculators in PREDICTIONS.md."""

import json
import statistics

from tabulate import tabulate

from distributed_training.settings.files import ROOT

DOCUMENT = json.loads((ROOT / "results" / "records" / "rivals.json").read_text())
NAMES = ("ours", *(package.partition("==")[0] for package in DOCUMENT["packages"]))


def beside_rivals() -> str:
    """Return a table of the memory of measured runs, and of the errors of each calculator."""
    errors: dict[str, list[float]] = {name: [] for name in NAMES}
    lines = []
    for label, row in DOCUMENT["rows"].items():
        cells = [label, f"{row['measured GiB']:.1f}"]
        for name in NAMES:
            if row[name] is None:
                cells.append("-")
                continue
            errors[name].append(row[name] / row["measured GiB"] - 1)
            cells.append(f"{row[name]:.1f} ({errors[name][-1]:+.0%})")
        lines.append(cells)
    medians = [statistics.median(map(abs, values)) for values in errors.values()]
    lines.append(["median error", "", *(f"{median:.0%}" for median in medians)])
    return tabulate(lines, ["run, GiB", "measured", *NAMES], "github", disable_numparse=True)
