"""Generate the table of other trainers in PREDICTIONS.md."""

import json
import statistics

from tabulate import tabulate

from distributed_training.settings.files import ROOT

RECORDS = ROOT / "results" / "records"
DOCUMENT = json.loads((RECORDS / "trainers.json").read_text())
LATER = json.loads((RECORDS / "h200-2026" / "beside-plan.json").read_text())
PACKAGES = {"TRL's": "trl", "Unsloth": "unsloth"}
CLASSES = {"trl": "TRL's SFTTrainer", "trainer": "Trainer"}


def beside_trainers() -> str:
    """Return a table of the errors of `plan --for`: one line per trainer."""
    errors: dict[str, list[float]] = {}
    settings: dict[str, set[str]] = {}
    versions: dict[str, set[str]] = {}

    def add_version(name: str, traced: dict[str, str]) -> None:
        package = PACKAGES.get(name.partition(" ")[0], "transformers")
        versions.setdefault(name, set()).add(f"{package} {traced[package]}")

    for row in DOCUMENT["rows"]:
        name = row["trainer"]
        errors.setdefault(name, []).extend(row["GiB"] / peak - 1 for peak in row["measured"])
        settings.setdefault(name, set()).add(row["settings"])
        add_version(name, row["versions"])
    for key in ("predicted", "corrected"):
        for label, row in LATER["rows"].items():
            if "measured" not in row:
                continue
            name = f"{CLASSES[row['trainer']]}, {key}"
            error = row[key]["peak_bytes"] / row["measured"]["allocated_bytes"] - 1
            errors.setdefault(name, []).append(error)
            settings.setdefault(name, set()).add(label)
            add_version(name, row[key]["versions"])
    lines = [
        [
            name,
            len(settings[name]),
            len(values),
            f"{statistics.median(map(abs, values)):.1%}",
            f"{max(values, key=abs):+.1%}",
            ", ".join(sorted(versions[name])),
        ]
        for name, values in sorted(errors.items())
    ]
    headers = ["trainer", "settings", "runs", "median error", "largest", "version"]
    return tabulate(lines, headers, "github", disable_numparse=True)


def count_times() -> tuple[int, int]:
    """Return how many measured steps are inside their ranges, and how many there are."""
    ranges = [seconds for row in DOCUMENT["rows"] for seconds in row.get("seconds", {}).values()]
    for row in LATER["rows"].values():
        if "measured" in row:
            ranges.append([*row["corrected"]["step_time_s"], row["measured"]["step_time_s"]])
    return sum(low <= seconds <= high for low, high, seconds in ranges), len(ranges)
