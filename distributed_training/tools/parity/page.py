"""Print the result of `parity`, and write it as a web page and as JSON."""

import math
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from distributed_training.records import report
from distributed_training.records.display import WIDTH, short_name, short_path
from distributed_training.records.record import provenance, write_json
from distributed_training.records.tables import EMPTY_CELL, Table
from distributed_training.settings.files import plural
from distributed_training.settings.machine import Machine
from distributed_training.tools.parity.ranks import LIMITS, ROUNDING_FACTOR
from distributed_training.tools.parity.trials import OK, Trial


def summary(trials: Sequence[Trial], num_missing: int = 0) -> list[str]:
    """Return the result in one line, then one line per layout with the reason for the layout's
    verdict. `num_missing` is the number of layouts that were not checked."""
    names: dict[str, list[str]] = {}
    for trial in trials:
        names.setdefault(trial.verdict, []).append(trial.name)
    num_ok = len(names.get(OK, ()))
    text = f"{num_ok} of {plural(len(trials), 'layout')} {'agrees' if num_ok == 1 else 'agree'} "
    text += "with the single-process run."
    for verdict, adjective in (
        ("differs", "Different results"), ("failed", "Failed"), ("skipped", "Skipped"),
        ("other work", "Not comparable by design"),
    ):  # fmt: skip
        if layouts := names.get(verdict):
            text += f" {adjective}: {len(layouts)} ({', '.join(layouts)})."
    if num_missing:
        text += f" Not checked: {num_missing}."
    reasons = [f"{trial.name} ({trial.verdict}): {trial.why}" for trial in trials if trial.why]
    return [text, *reasons]


def write_page(
    out: Path, trials: Sequence[Trial], machine: Machine, *, num_missing: int = 0
) -> None:
    """Write parity.json and parity.html, and print the table. The first two entries in `trials` are
    the single-process reference runs. `num_missing` is the number of layouts that were not
    checked."""
    reference, layouts = trials[0].result, trials[2:]
    config = reference["config"]
    heading, *notes = summary(layouts, num_missing)
    title = (
        f"model {config['model']}, dataset {config['dataset']}, precision {config['precision']}; "
        f"{reference['num_steps']} steps, each with {reference['global_batch_size']} x "
        f"{config['max_length']} tokens; {layouts[-1].num_processes} processes on "
        f"{machine.gpu_name or 'CPU'}"
    )
    limits = ", ".join(f"{limit:g} for {quantity}" for quantity, limit in LIMITS.items())
    explanation = (
        "Each value is the largest relative difference from the single-process run, over all "
        "steps and all tensors of the weights and of AdamW's state. The tolerance is the larger "
        f"of a fixed limit ({limits}) and {ROUNDING_FACTOR} times the difference between the two "
        "single-process runs (reference and rounding)."
    )
    columns = {"layout": [trial.name for trial in trials]}
    for quantity in LIMITS:
        differences = [
            max(trial.apart.get(quantity, {}).values(), default=math.inf) for trial in trials
        ]
        columns[quantity] = [f"{d:.1e}" if d < math.inf else EMPTY_CELL for d in differences]
    columns["seconds"] = [f"{trial.seconds:.0f}" for trial in trials]
    columns["verdict"] = [trial.verdict for trial in trials]
    table = Table(title="Differences", about=explanation, columns=columns)
    origin = provenance(shlex.join(["python", *sys.argv]))
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    source = f"{origin['command']}; {origin['made_at']}; commit {origin['git_commit']}; {versions}"
    settings = {
        "dataset": short_name(config["dataset"]), "precision": config["precision"],
        "steps": f"{reference['num_steps']} steps, each with {reference['global_batch_size']} x "
                 f"{config['max_length']} tokens",
        "processes": str(layouts[-1].num_processes), "device": machine.gpu_name or "CPU",
    }  # fmt: skip
    model = short_name(config["model"])
    section = report.Section(title, notes, [table], heading=model, settings=settings)
    text = report.render_page("html", "Layout parity", heading, [section], source)
    (out / "parity.html").write_text(text, encoding="utf-8")
    rows = [
        {"name": trial.name, "set": trial.values, "verdict": trial.verdict, "why": trial.why,
         "mesh": trial.mesh, "seconds": trial.seconds, "apart": trial.apart}
        for trial in trials
    ]  # fmt: skip
    origin |= {"heading": heading, "rule": explanation, "config": config}
    origin |= {"machine": machine, "limits": LIMITS, "spreads": ROUNDING_FACTOR}
    write_json(out / "parity.json", {**origin, "runs": rows})
    print(f"\n{report.format_for_terminal(section)}\n{textwrap.fill(explanation, WIDTH)}")
    print(textwrap.fill(heading, WIDTH))
    print(f"Wrote {short_path(out)}/parity.html and parity.json.")
