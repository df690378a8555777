"""A scaling law of one's own: six sizes, each trained on several numbers of tokens, on one GPU.

    python results/lab/scaling_law.py FOLDER [--sizes 0.1M 0.3M] [--tokens 0.3M]

Runs results/plans/scaling-law.json in one process and leaves scaling-law.json and a picture in the
FOLDER: losses; the fit of E + A / N^alpha + B / D^beta to them with its residuals; and, for each
size, how far the fit to all others is off. A run that is in the FOLDER already is not done again.
One small corpus, of which the longest runs see the samples twice, and learning rates that nobody
tuned: constants hold for this text only, and how far they carry to larger models is not shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkout
import numpy as np
from tabulate import tabulate

from distributed_training.advise.scaling import count
from distributed_training.records.display import short_path
from distributed_training.records.provenance import provenance
from distributed_training.records.record import write_json
from distributed_training.run.loop import learning_rate
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, load_json
from distributed_training.settings.parser import Parser
from results.lab.analysis.law import Point, fit_law, left_out, residuals
from results.lab.exchanges import validation_loss
from results.lab.harness import Run, every_run, open_group
from results.lab.pages.learning import draw_scaling_law

PLAN_FILE = "results/plans/scaling-law.json"
PLAN = load_json(ROOT / PLAN_FILE, "plan")
MODELS = Path(__file__).with_name("scaling_models")
DEADLINE_S = 540.0  # after which no run begins
Runs = dict[str, dict[str, Any]]


def cases(sizes: Sequence[str], tokens: Sequence[str]) -> Runs:
    """CONFIG values of each run, by name; the shortest of all sizes first."""
    return {
        f"{size}, {amount} tokens": {
            **PLAN["common"], "model": f"{MODELS}:{size}", **PLAN["sizes"][size],
            **PLAN["tokens"][amount],
        }
        for amount in tokens for size in sizes
    }  # fmt: skip


def train(run: Run) -> dict[str, Any]:
    """Train to the end of the schedule: parameters, tokens, validation loss, seconds."""
    steps = run.plan.num_steps or 0
    began = time.perf_counter()
    for step in range(steps):
        run.engine.set_learning_rate(learning_rate(run.plan.config, step, steps))
        run.engine.train_step(run.batch(step))
    loss = validation_loss(run)
    config = run.plan.config
    return {
        "parameters": run.plan.size.num_parameters,
        "tokens": len(run.data.train) * config.epochs * config.max_length,
        "loss": loss,
        "steps": steps,
        "seconds": time.perf_counter() - began,
    }


def points_of(runs: Runs) -> list[Point]:
    return [(found["parameters"], found["tokens"], found["loss"]) for found in runs.values()]


def summarise(runs: Runs) -> dict[str, Any] | None:
    """The fit, its residuals by run, and those of each size under the fit to the others; None for
    fewer than four sizes or three numbers of tokens."""
    points = points_of(runs)
    if len({n for n, _, _ in points}) < 4 or len({d for _, d, _ in points}) < 3:
        return None
    fit = fit_law(points)
    return {
        "fit": {key: asdict(fit)[key] for key in ("irreducible", "a", "alpha", "b", "beta")},
        "residuals": dict(zip(runs, residuals(fit, points), strict=True)),
        "left_out": {str(int(size)): errors for size, errors in left_out(points).items()},
    }


def describe(summary: dict[str, Any]) -> str:
    """The constants, and a row a size that was left out."""
    fit = summary["fit"]
    worst = max(map(abs, summary["residuals"].values()))
    lines = [
        f"loss = {fit['irreducible']:.3f} + {fit['a']:.4g} / N^{fit['alpha']:.3f} + "
        f"{fit['b']:.4g} / D^{fit['beta']:.3f}; off by at most {100 * worst:.1f}%",
        "",
    ]
    rows = [
        [count(int(size)), f"{100 * np.mean(errors):+.1f}%", f"{100 * max(map(abs, errors)):.1f}%"]
        for size, errors in summary["left_out"].items()
    ]
    return "\n".join([*lines, tabulate(rows, ["left out", "mean", "at most"], stralign="right")])


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is not in the folder yet, then fit."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="FOLDER")
    parser.add_argument("--sizes", nargs="+", default=list(PLAN["sizes"]), choices=PLAN["sizes"])
    parser.add_argument("--tokens", nargs="+", default=list(PLAN["tokens"]), choices=PLAN["tokens"])
    options = parser.parse_args(argv)
    file = options.out / "scaling-law.json"
    before = load_json(file, "record") if file.exists() else {"plan": PLAN, "runs": {}}
    if before["plan"] != PLAN:
        fix = "name another folder"
        raise UserError(f"{short_path(file)} was made by another {PLAN_FILE}", fix=fix)
    runs: Runs = before["runs"]
    wanted = cases(options.sizes, options.tokens)
    with open_group() as group:
        todo = {name: values for name, values in wanted.items() if name not in runs}
        for name, ranks in every_run(group, todo, train, deadline_s=DEADLINE_S):
            runs[name] = ranks[0]
            shown = f"loss {ranks[0]['loss']:.3f}, {ranks[0]['seconds']:.0f} s"
            print(f"{name}: {shown}", flush=True)
            options.out.mkdir(parents=True, exist_ok=True)
            write_json(file, {
                "what": "validation loss of small GPT-2s by parameters and tokens, embedded text",
                **provenance("python results/lab/scaling_law.py FOLDER"),
                "device": str(group.device), "plan": PLAN, "summary": summarise(runs),
                "runs": runs,
            })  # fmt: skip
    for name in wanted:
        if name not in runs:
            print(f"not done within {DEADLINE_S:.0f} s: {name}; the same command goes on with it")
    if (summary := summarise(runs)) is None:
        print("too few runs for a fit: it takes four sizes and three numbers of tokens")
        return 0
    print(describe(summary))
    figure = draw_scaling_law(load_json(file, "record"))
    figure.savefig(options.out / "scaling-law.png", metadata={"Software": None})
    print(f"record and picture in {short_path(options.out)}")
    return 0


if __name__ == "__main__":
    checkout.run(main)
