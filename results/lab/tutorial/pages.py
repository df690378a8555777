"""Generate the tutorial's TEST_RESULTS.md, the tables on its pages, and its pictures.

    python results/lab/tutorial/pages.py --write
    python results/lab/tutorial/pages.py --check

--write regenerates all of them from pipedream_tutorial/records/, the closed forms and the
simulator. Run it after any change to a schedule, a formula or a record. --check writes nothing, and
its exit code is 1 if --write would change a page or a picture. On a page, this program generates
the text between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from pipedream.config import FOLDER
from pipedream.errors import UserError, main_with_errors, nearest
from pipedream.runtime.record import RECORD_FORMAT
from pipedream.schedules.closed_forms import CLOSED_FORMS
from pipedream.schedules.ops import Op
from pipedream.schedules.orders import SCHEDULES, schedule_for_training
from pipedream.schedules.policies import weight_use

from results.lab.tutorial.tables import bubble_table, cut_table
from results.lab.tutorial.text import describe, render_page
from results.lab.tutorial.traffic import comparison_table

PAGES = ("README.md", "ADVANCED.md", "COMPARISON.md")
ZERO_BUBBLE = ("h200-p4-zero-bubble.json", "cpu-runtime-zero-bubble.json")
"""README.md shows the first of these that exists."""
_TABLE = re.compile(r"(<!-- table: (?P<name>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def load_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Map each file name to its runtime record, with CPU records first and H200 records after them.
    Raises UserError if a record has an unsupported format."""
    records = {}
    for pattern in ("cpu-runtime*.json", "h200-*.json"):
        for path in sorted(folder.glob(pattern)):
            record = records[path.name] = _load(path)
            if record.get("format") != RECORD_FORMAT:
                raise UserError(
                    f"{path} is not a record of format {RECORD_FORMAT}",
                    "make it again with pipedream_runtime.py --record",
                )
    return records


def _load(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}", "make the record again") from error


def idle_table() -> str:
    """Return a table of the closed forms for idle time, with the sizes or durations for which they
    hold."""
    texts = {
        name: (f"if {form.range_text}: " * (form.range_text != "always") + form.idle_text,)
        for name, form in CLOSED_FORMS.items()
    }
    return _formula_table(("X, idle time of each rank in one batch",), texts)


ACTIVATIONS = {
    "naive": "1",
    "gpipe": "m",
    "1f1b": "min(m, p-r)",
    "eager-1f1b": "min(m, 2 (p-r) - 1)",
    "pipedream": "p-r",
    "pipedream-vertical": "p-r",
    "pipedream-no-stash": "p-r",
    "pipedream-2bw": "p-r",
    "interleaved": "min(m v, (v-1) q + 2 (p-1-r) + 1) / v, with q microbatches per round",
    "zb-h1": "min(m, p)",
    "zb-h2": "min(m, 2p-1)",
    "zb-v": "min(p, m, (m+1+r)/2)",
    "v-half": "p//2 + 1 (if m >= p+2)",
    "v-min": "at most (p+4) // 3",
    "dualpipe-v": "p + 1/2 (the activations of 2p+1 stages)",
}
"""Closed forms for the largest number of microbatches that rank r holds."""
VERSIONS = {
    "pipedream": ("p-s", "min(i, p-1-s)"),
    "pipedream-vertical": ("p", "min(i, p-1)"),
    "pipedream-no-stash": (
        "1",
        "min(i, p-1-s); forward and backward passes use different versions",
    ),
    "pipedream-2bw": ("2 (if a batch has at least p-1 microbatches)", "1, or 0 in the first batch"),
}
"""For schedules without a flush: the number of weight versions on stage s, and the number of
updates that the gradient of microbatch i does not include."""


def activation_table() -> str:
    """Return a table of the formulas in ACTIVATIONS."""
    texts = {name: (text,) for name, text in ACTIVATIONS.items()}
    return _formula_table(("most microbatches held on rank r",), texts)


def version_table() -> str:
    """Return a table of the pairs of formulas in VERSIONS."""
    head = ("weight versions on stage s", "updates that microbatch i's gradient does not include")
    return _formula_table(head, VERSIONS)


def microbatch_table(p: int = 4, i: int = 4) -> str:
    """Return a table of the weight versions that each rank keeps in PipeDream when the backward
    pass of microbatch i begins."""
    schedule, policy = schedule_for_training("pipedream", p, 8, 1)
    lines = [
        f"| rank | F{i} used version | newest when B{i} begins | late by | versions kept (for) |",
        "|---:|---:|---:|---:|---|",
    ]
    for stage, use in weight_use(schedule, policy, 8).items():
        start = schedule.orders[stage].index(Op("B", stage, i))
        before = [op for op in schedule.orders[stage][:start] if isinstance(op, Op)]
        done = {op.microbatch for op in before if op.kind == "B"}
        in_flight = [op.microbatch for op in before if op.kind == "F"]
        waiting = [j for j in in_flight if j not in done]
        assert len({use.forward[j] for j in waiting} | {len(done)}) == use.peak_versions
        kept = ", ".join(f"{use.forward[j]} (B{j})" for j in waiting)
        used = use.forward[i]
        lines.append(f"| {stage} | {used} | {len(done)} | {len(done) - used} | {kept} |")
    return "\n".join(lines)


def _formula_table(head: tuple[str, ...], texts: Mapping[str, tuple[str, ...]]) -> str:
    """Return a table that shows each schedule's cells. Schedules with equal cells share a row."""
    lines = [f"| schedule | {' | '.join(head)} |", "|---|" + "---|" * len(head)]
    for cells in dict.fromkeys(texts.values()):
        names = "; ".join(SCHEDULES[name].title for name in texts if texts[name] == cells)
        lines.append(f"| {names} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(folder: Path) -> dict[str, Callable[[], str]]:
    """Map each table name to a function that generates the table."""
    records = load_records(folder / "records")
    return {
        "microbatch 4": microbatch_table,
        "idle time": idle_table,
        "activations": activation_table,
        "weight versions": version_table,
        "cut backward": lambda: cut_table(_load(folder / "records/cpu-cut.json")),
        "gpt2-medium on 4": partial(comparison_table, "gpt2-medium", 4),
        "measured bubbles": lambda: bubble_table(
            next(records[name] for name in ZERO_BUBBLE if name in records)
        ),
    }


def fill(text: str, builders: Mapping[str, Callable[[], str]]) -> str:
    """Return the page's text with every table regenerated. Raises UserError for an unknown
    table."""

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in builders:
            raise UserError(f"there is no table {name!r}", nearest(name, builders))
        return f"{match[1]}\n{builders[name]()}\n\n{match[3]}"

    return _TABLE.sub(table, text)


def pages(folder: Path) -> dict[str, str]:
    """Map each page name to the page's expected content."""
    builders = tables(folder)
    texts = {name: fill((folder / name).read_text(), builders) for name in PAGES}
    study = _load(folder / "records/cpu-staleness.json")
    one_run = _load(folder / "records/readme-runtime-p4.json")
    results = render_page(load_records(folder / "records"), one_run, study)
    return texts | {"TEST_RESULTS.md": results}


def pictures(folder: Path) -> dict[str, tuple[str, Callable[[Path], object]]]:
    """Map each file name to a pair: the digest of the drawn data, and the function that draws the
    picture."""
    from results.lab.tutorial import figures as figure_module

    records = load_records(folder / "records")
    described_records = [(describe(record), record) for record in records.values()]
    zero_bubble = records["h200-p4-zero-bubble.json"]
    curve = _load(folder / "records/curve-cpu.json")
    searched = _load(folder / "records/frontier.json")
    errors = _load(folder / "records/cpu-staleness.json")["gradient_errors"]
    drawings: dict[str, tuple[str, Callable[[Path], object]]] = {
        "figures/prediction.png": (
            figure_module.prediction_digest(described_records),
            partial(figure_module.draw_prediction, described_records),
        ),
        "figures/gib_per_rank.png": (
            figure_module.gib_digest(zero_bubble),
            partial(figure_module.draw_gib, zero_bubble),
        ),
        "figures/frontier.png": (
            figure_module.frontier_digest(searched),
            partial(figure_module.draw_frontier, searched),
        ),
        "figures/held.png": (figure_module.held_digest(), figure_module.draw_held),
        "figures/microbatch_size.png": (
            figure_module.hash_data(curve),
            partial(figure_module.draw_microbatch_size, curve),
        ),
        "figures/gradient_error.png": (
            figure_module.gradient_digest(errors),
            partial(figure_module.draw_gradient_error, errors),
        ),
    }
    for name, build in figure_module.PICTURES.items():
        picture = build()
        drawings[f"figures/{name}.png"] = (
            figure_module.digest(picture),
            partial(figure_module.draw_picture, picture),
        )
    return drawings


def read_digest(path: Path) -> str | None:
    """Return the digest in a PNG's metadata, or None if the file or the digest does not exist."""
    from PIL import Image

    if not path.is_file():
        return None
    with Image.open(path) as image:
        return image.info.get("Source")


def outdated_files(folder: Path) -> list[str]:
    """Return the files that --write would change."""
    changed = [
        name
        for name, text in pages(folder).items()
        if not (folder / name).is_file() or (folder / name).read_text() != text
    ]
    drawn = pictures(folder).items()
    return changed + [name for name, (digest, _) in drawn if read_digest(folder / name) != digest]


def write_outdated(folder: Path) -> list[str]:
    """Write the files that are not up to date, and return their names."""
    names, texts, drawings = outdated_files(folder), pages(folder), pictures(folder)
    for name in names:
        if name in texts:
            (folder / name).write_text(texts[name])
        else:
            drawings[name][1](folder / name)
    return names


def main() -> None:
    """Write or check the files. Print the names of the files that change."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="regenerate the pages and pictures")
    action.add_argument(
        "--check", action="store_true", help="only list the pages and pictures that are out of date"
    )
    if parser.parse_args().write:
        names = write_outdated(FOLDER)
        print("\n".join(f"Wrote {name}." for name in names) or "All files are up to date.")
        return
    names = outdated_files(FOLDER)
    if names:
        command = "python results/lab/tutorial/pages.py --write"
        text = f"error: These files are out of date: {', '.join(names)}. Run:\n  {command}"
        print(text, file=sys.stderr)
        sys.exit(1)
    print("All files are up to date.")


if __name__ == "__main__":
    main_with_errors(main)
