"""Generate the table of other trainers in PREDICTIONS.md."""

import json
import statistics

from tabulate import tabulate

from distributed_training.settings.files import ROOT

DOCUMENT = json.loads((ROOT / "results" / "records" / "trainers.json").read_text())


def beside_trainers() -> str:
    """Return a table of the errors of `plan --for`: one line per trainer."""
    errors: dict[str, list[float]] = {}
    settings: dict[str, set[str]] = {}
    for row in DOCUMENT["rows"]:
        name = row["trainer"]
        errors.setdefault(name, []).extend(row["GiB"] / peak - 1 for peak in row["measured"])
        settings.setdefault(name, set()).add(row["settings"])
    lines = [
        [
            name,
            len(settings[name]),
            len(values),
            f"{statistics.median(map(abs, values)):.1%}",
            f"{max(values, key=abs):+.1%}",
        ]
        for name, values in sorted(errors.items())
    ]
    headers = ["trainer", "settings", "runs", "median error", "largest"]
    return tabulate(lines, headers, "github", disable_numparse=True)
