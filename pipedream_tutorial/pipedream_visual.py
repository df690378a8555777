"""Draws the tutorial's pictures of simulated timelines: python pipedream_visual.py

Change CONFIG, or type --set num_stages=8, or --only all_schedules,naive_pipeline. Those
of records are drawn by results/lab/tutorial/pages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipedream.config import SHARED_RULES, Rule, parse_arguments
from pipedream.errors import UserError, errors_in_one_line, main_with_errors
from pipedream.schedules.policies import POLICIES, weight_use
from pipedream.simulate.comparison import Case, Refused, Row, compare, measure

with errors_in_one_line():  # matplotlib may be missing
    from matplotlib.figure import Figure
    from pipedream.draw import charts, grids

CONFIG: dict[str, Any] = {
    "num_stages": 4,  # stages of the pipeline, one a rank
    "num_microbatches": 8,  # microbatches that a batch is cut into
    "chunks": 2,  # stages a rank under interleaved 1F1B
    "forward": 1,  # time of one microbatch's forward pass on a rank, in any unit
    "input_gradient": 1,  # time of the half of the backward pass that gives the input's gradient
    "weight_gradient": 1,  # time of the half that gives the weights' gradients
    "communication": 0,  # time from one rank to the next; occupies neither
    "overlap_saving": 0,  # share of the shorter one hidden when F and B run together (DualPipeV)
    "stage_scale": None,  # uneven stages: one factor a stage, such as [1, 1, 2, 1], or a chunk
    "weight_size": 1,
    "output": "figures",
    "only": None,
}

OVER_TIME = ("gpipe", "1f1b", "zb-h1", "pipedream", "pipedream-vertical", "pipedream-2bw")
AGAINST_M = (
    "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "chimera",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be drawn; everything simulated is computed when a picture first needs it."""

    case: Case
    config: Mapping[str, Any]

    @cached_property
    def rows(self) -> list[Row | Refused]:
        """All schedules; their streams have two batches."""
        return list(compare(replace(self.case, num_batches=2)))

    @property
    def found(self) -> list[Row]:
        return [row for row in self.rows if isinstance(row, Row)]

    @property
    def refused(self) -> list[Refused]:
        return [row for row in self.rows if isinstance(row, Refused)]

    def row(self, name: str) -> Row:
        return measure(name, self.case)


def naive_pipeline(work: Work, path: Path) -> Figure:
    return grids.draw_picture(grids.naive(work.row("naive").batch), path)


def microbatch_forward(work: Work, path: Path) -> Figure:
    cut = work.row("gpipe").batch
    whole = replace(
        work.case, num_microbatches=1, forward=work.case.forward * work.case.num_microbatches
    )
    batches = map(grids.forwards_only, (measure("gpipe", whole).batch, cut))
    return grids.draw_picture(grids.microbatch_forward(*batches), path)


def microbatch_backward(work: Work, path: Path) -> Figure:
    return grids.draw_picture(grids.microbatch_backward(work.row("gpipe").batch), path)


def weight_versioning(work: Work, path: Path) -> Figure:
    batch, m = work.row("pipedream").batch, work.case.num_microbatches
    uses = [
        (text, weight_use(batch.schedule, POLICIES[policy], m))
        for text, policy in (("with stashing", "stash"), ("without stashing", "in-place"))
    ]
    return grids.draw_weight_versioning(batch, uses, path)


def utilization_comparison(work: Work, path: Path) -> Figure:
    return charts.draw_utilization(work.found, work.refused, path)


def all_schedules(work: Work, path: Path) -> Figure:
    return grids.draw_picture(grids.all_schedules(work.found, work.refused), path)


def bubble_vs_microbatches(work: Work, path: Path) -> Figure:
    p = work.case.num_stages
    counts = sorted({2**k for k in range(p.bit_length())} | {p * 2**k for k in range(5)})
    many = sorted({*range(1, 2 * p), *(p * k for k in range(1, 17)), *counts})
    return charts.draw_bubble(charts.idle_curves(AGAINST_M, work.case, counts, many), p, path)


def memory_vs_bubble(work: Work, path: Path) -> Figure:
    return charts.draw_memory_vs_bubble(work.found, work.config["weight_size"], path)


def activations_and_versions(work: Work, path: Path) -> Figure:
    found = {row.name: row for row in work.found}
    shown = [found[name] for name in OVER_TIME if name in found]
    return charts.draw_activations_and_versions(shown, path)


PICTURES: dict[str, Callable[[Work, Path], Figure]] = {
    picture.__name__: picture
    for picture in (
        naive_pipeline,
        microbatch_forward,
        microbatch_backward,
        weight_versioning,
        utilization_comparison,
        all_schedules,
        bubble_vs_microbatches,
        memory_vs_bubble,
        activations_and_versions,
    )
}

SUFFIXES = {"all_schedules": ".svg"}  # larger than a page: sharp at any width

SHARED = (
    "chunks", "forward", "input_gradient", "weight_gradient", "communication", "overlap_saving",
    "stage_scale",
)  # fmt: skip
RULES: dict[str, Rule] = {
    # Larger pipelines have cells too small to see.
    "num_stages": replace(SHARED_RULES["num_stages"], high=16),
    "num_microbatches": replace(SHARED_RULES["num_microbatches"], high=64),
    **{key: SHARED_RULES[key] for key in SHARED},
    "weight_size": Rule(
        kind=SHARED_RULES["forward"].kind,
        above=0,
        high=1000,
        text="memory of a rank's weights, in units of one microbatch's activations on a rank",
    ),
    "output": Rule(kind=str, text="folder for the pictures; made if it is not there"),
    "only": Rule(
        kind=str,
        many=True,
        none=True,
        choices=tuple(PICTURES),
        text="the pictures to draw; None: all of them",
    ),
}


def main() -> None:
    """Draw what CONFIG and the command line say, and print the files' names."""
    config = parse_arguments(
        CONFIG, RULES, "Draw the tutorial's pictures from simulated timelines.", script=__file__
    )
    case = Case(
        num_stages=config["num_stages"],
        num_microbatches=config["num_microbatches"],
        num_batches=1,
        **{key: config[key] for key in SHARED},
    )
    scale = case.stage_scale
    if scale is not None and len(scale) % case.num_stages:
        raise UserError(
            f"stage_scale has {len(scale)} values for {case.num_stages} stages",
            f"give {case.num_stages}, such as {','.join(['1'] * case.num_stages)}",
        )
    folder, work = Path(config["output"]), Work(case=case, config=config)
    folder.mkdir(parents=True, exist_ok=True)
    for name in config["only"] or PICTURES:
        path = folder / f"{name}{SUFFIXES.get(name, '.png')}"
        PICTURES[name](work, path)
        print(path, flush=True)


if __name__ == "__main__":
    main_with_errors(main)
