"""Show pipeline schedules in the terminal: their timelines, costs and training losses.

    python -m pipedream
    python -m pipedream --set schedule=search --set memory=5
    python -m pipedream --help

Each run computes all of its output: grids and times by simulation, losses by training.
"""

import gc
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import pipedream_simple as simple
from pipedream_simple import number, percent

from pipedream.config import MIN_DURATION, SHARED_RULES, Rule, parse_arguments
from pipedream.draw.terminal import (
    LEGEND,
    bold,
    cells_of,
    draw,
    format_values,
    print_wrapped,
    use_color,
    width,
)
from pipedream.errors import UserError, main_with_errors
from pipedream.schedules.ops import save_csv
from pipedream.schedules.orders import SCHEDULES, build_schedule
from pipedream.simulate import comparison
from pipedream.simulate.comparison import Refused, Row

CONFIG: dict[str, Any] = {
    **simple.CONFIG,  # pipedream_simple.py's keys; some defaults differ
    "num_microbatches": 8,  # m: microbatches per batch
    "layers_per_stage": 2,  # residual blocks per stage in the model that is trained
    "verbose": None,  # True: draw every schedule; False: none; None: only a schedule that you name
    "schedule": "all",  # a schedule, all, search (find an order), or the path of an order's CSV
    "memory": None,  # with schedule=search: maximum microbatches held per rank; None: num_stages
    "overlap_saving": 0,  # share of the shorter pass hidden if F and B overlap (DualPipeV)
    "stage_scale": None,  # one factor per stage or chunk, such as [1, 1, 2, 1]; None: equal stages
    "learning_rate": 0.5,  # learning rate of plain SGD
    "steps": 20,  # number of batches to train on; 0: do not train
    "seed": 0,  # seed of the initial weights and the data
    "csv": None,  # CSV file for the schedule's order, which torch.distributed.pipelining loads
}

RULES = SHARED_RULES | {
    "layers_per_stage": Rule(kind=int, low=1, high=64),
    "verbose": Rule(kind=bool, nullable=True),
    "schedule": Rule(kind=str, choices=("all", "search", *SCHEDULES), file_suffix=".csv"),
    "memory": Rule(kind=int, nullable=True, low=1, high=512),
    "columns": Rule(kind=str, is_list=True, nullable=True, choices=tuple(simple.COLUMNS)),
    "num_batches": Rule(kind=int, low=2, high=64),
    "learning_rate": Rule(kind=float, low=MIN_DURATION, high=100),
    "steps": Rule(kind=int, low=0, high=10000),
    "seed": Rule(kind=int, low=0, high=2**31 - 1),
    "csv": Rule(kind=str, nullable=True),
}
SPECIAL_NAMES = ("all", "search")
USED_BY = {
    "memory": ("search",),
    "chunks": ("interleaved", "all"),
    "overlap_saving": ("dualpipe-v", "all"),
}
SCHEDULES_TO_TRAIN = (
    "naive", "gpipe", "1f1b",
    "pipedream", "pipedream-no-stash", "pipedream-vertical", "pipedream-2bw",
)  # fmt: skip
MIXED_NOTE = (
    "*: backward passes see newer weights than their forward passes, so they do not "
    "compute the gradient of any model."
)


def run_script(simple_main: Callable[[dict[str, Any]], None], config: dict[str, Any]) -> NoReturn:
    """Run `simple_main`, the main function of pipedream_simple.py, if that file supports the
    requested keys and schedule. Otherwise, run `show`. Then exit."""

    def run() -> None:
        defaults = CONFIG | config
        merged_config = read_config(defaults)
        name = merged_config["schedule"]
        simple_supports = all(
            merged_config[key] == defaults.get(key) for key in merged_config.keys() - config.keys()
        )
        if simple_supports and name in ("all", *simple.SCHEDULES) and not merged_config["steps"]:
            if name != "all":  # raises UserError for sizes that the schedule does not allow
                build_schedule(name, merged_config["num_stages"], merged_config["num_microbatches"])
            simple_main(merged_config)
        else:
            show(merged_config)

    main_with_errors(run)


def read_config(config: dict[str, Any]) -> dict[str, Any]:
    """Apply the command-line changes to `config`, and return the result. Raises UserError if the
    command line changes a key that the schedule does not use."""
    about = str(__doc__).split("\n\n")[0]
    checked = parse_arguments(config, RULES, about, script=__file__)
    for key, names in USED_BY.items():
        is_known_name = checked["schedule"] in (*SCHEDULES, *SPECIAL_NAMES)
        if is_known_name and checked[key] != config[key] and checked["schedule"] not in names:
            problem = f"{checked['schedule']} does not use {key}"
            raise UserError(problem, f"leave it out, or set schedule={names[0]}")
    return checked


def show(config: dict[str, Any]) -> None:
    """Print the schedules that `config` names, write the requested files, and train a small model
    if `steps` is not 0."""
    name = config["schedule"]
    sizes = config["num_stages"], config["num_microbatches"]
    rows: Iterable[Row | Refused]
    gc.disable()  # saves 20% of the run time: tables create millions of tuples, but no cycles
    if name == "all":
        if config["csv"] is not None:
            fix = "add --set schedule=1f1b or another"
            raise UserError("--csv can write only one schedule", fix)
        rows = comparison.compare(config)
    else:
        if name == "search":
            print("searching ...", file=sys.stderr, flush=True)
        row = comparison.measure(name, config)
        _ = row.staleness  # raises UserError if 2BW has too few microbatches
        if config["csv"] is not None:
            write_csv(row, Path(config["csv"]))
        schedule = row.batch.schedule
        sizes = schedule.num_ranks, schedule.num_microbatches  # a file has its own sizes
        rows = [row]
    scale = config["stage_scale"]
    factors = f", stages times {' '.join(map(number, scale))}" if scale else ""
    print_wrapped(simple.title_line(*sizes, config) + factors)
    if config["verbose"] or (config["verbose"] is None and name != "all"):
        print_wrapped(LEGEND)
        title_by_orders: dict[object, str] = {}
        rows = list(rows)
        for one in rows:
            print()
            print_schedule(one, title_by_orders)
        print()
    print_comparison(rows, config)
    if config["steps"]:
        gc.enable()
        print(flush=True)
        print_training(config)


def write_csv(row: Row, path: Path) -> None:
    """Write the schedule's order to a CSV file. Raises UserError for schedules without a flush."""
    if not row.flushes:
        problem = f"{row.name} does not flush, and a CSV file cannot contain weight updates"
        raise UserError(problem, "add --set schedule=1f1b, the same order with a flush")
    save_csv(row.batch.schedule, path)
    print(f"wrote {path}", file=sys.stderr)


def print_schedule(row: Row | Refused, title_by_orders: dict[object, str]) -> None:
    """Print a schedule's grid and costs. `title_by_orders` maps orders to the title of the schedule
    whose grid shows them. If `title_by_orders` contains this schedule's orders, refer to that grid
    instead of drawing it again. If a schedule has no flush, draw several batches, because the first
    batch alone looks the same with and without a flush."""
    print(bold(row.title))
    if isinstance(row, Refused):
        print_wrapped(row.reason, "  not possible: ")
        return
    timeline = row.batch if row.flushes else row.stream
    orders = timeline.schedule.orders
    if orders in title_by_orders:
        print(f"  the same grid as {title_by_orders[orders]}")
    else:
        title_by_orders[orders] = row.title
        text = draw(timeline, width(), color=use_color())
        print(simple.draw_or_save(Path(row.name).stem, cells_of(timeline), text))
    idle = row.batch_idle
    print_item(
        "one batch",
        f"time {number(row.batch.makespan)}, utilization {percent(1 - idle.makespan_fraction)}, "
        f"bubble {percent(idle.makespan_fraction)} (within the ranks' own spans "
        f"{percent(idle.span_fraction)})",
    )
    utilization = percent(1 - row.stream_idle.makespan_fraction)
    stream = number(row.stream_makespan)
    print_item(f"{row.config['num_batches']} batches", f"time {stream}, utilization {utilization}")
    if row.bound is None:
        print_closed_form(row)
    else:  # an order from a search
        print_item(
            "minimized",
            "first the time of one batch, then the longest span of any rank, which bounds the time "
            "of each additional batch",
        )
        bound = number(row.bound)
        if row.batch.makespan == row.bound:
            print_item(
                "shorter",
                f"impossible with one stage per rank and this memory limit: the minimum is {bound}",
            )
        else:
            order = "no order with one stage per rank that fits in this memory"
            print_item("shorter", f"possibly, but {order} takes less than {bound}")
    print_item(
        "activations", f"maximum microbatches held: {format_values(row.peak_activations, 'rank')}"
    )
    print_item("weights", row.policy.text)
    print_item(
        "",
        f"maximum versions kept: {format_values(row.peak_versions, 'stage')}; "
        f"maximum updates behind: {format_values(row.staleness, 'stage')}",
    )


def print_item(label: str, text: str) -> None:
    print_wrapped(text, f"  {label:<13}")


def print_closed_form(row: Row) -> None:
    """Print the idle time of one batch, computed both by the closed form and by simulation."""
    form_and_sizes = comparison.closed_form(row.name, row.config)
    if form_and_sizes is None:
        text = "none with uneven stages, communication, overlap or a file"
        print(f"  closed form  {text}")
        return
    form, sizes = form_and_sizes
    if not form.idle_holds(sizes):
        print_item("closed form", f"{form.idle_text}: valid for {form.range_text}, but not here")
        return
    print_item(
        "closed form",
        f"a rank idles for {number(form.makespan_idle(sizes))}, simulated "
        f"{number(max(row.batch_idle.makespan))}; rank 0 within its own span "
        f"{number(form.span_idle(sizes, 0))}, simulated {number(row.batch_idle.span[0])}",
    )
    print_item("", f"{form.idle_text}; as published: {form.published} (arXiv {form.source})")


def print_comparison(rows: Iterable[Row | Refused], config: dict[str, Any]) -> None:
    """Print a table row for each schedule, or the reason why the schedule is impossible."""
    has_mixed_versions = False
    shown = config["columns"]
    print(simple.table_line("", simple.COLUMNS, shown))
    for row in rows:
        if isinstance(row, Refused):
            print_wrapped(f"not possible: {row.reason}", f"{row.title:<24}")
            continue
        idle = row.batch_idle
        values = (
            row.batch.makespan, idle.makespan_fraction, idle.span_fraction,
            row.stream_makespan, row.stream_idle.makespan_fraction,
            row.peak_activations, row.weight_copies, row.staleness,
        )  # fmt: skip
        line = simple.table_line(row.title, values, shown)
        print(line + "*" * row.mixes_versions, flush=True)
        has_mixed_versions = has_mixed_versions or row.mixes_versions
    for note in (*simple.notes(config), *([MIXED_NOTE] if has_mixed_versions else [])):
        print_wrapped(note)


def print_training(config: dict[str, Any]) -> None:
    """Train a small model under each weight policy, or only under the schedule that `config` names.
    Print the losses, gradient errors and weight versions."""
    name = config["schedule"]
    if name != "all" and name not in SCHEDULES:
        print("Not trained. To train under a CSV, use pipedream_runtime.py --schedule PATH.")
        return
    try:
        import torch
    except ModuleNotFoundError:
        print_wrapped(
            "torch is not installed in this Python; run python -m pip install -r "
            "requirements.txt in the tutorial's folder, or --set steps=0 to skip training",
            "Not trained: ",
        )
        return
    title = (
        f"Trained: {config['layers_per_stage']} layers on each of {config['num_stages']} stages, "
        f"{config['steps']} batches of {config['num_microbatches']} microbatches, SGD at "
        f"{config['learning_rate']:g}"
    )
    print(
        f"{bold(title)}\n"
        f"{'':<24}{'loss at':>9}{'final':>10}{'gradient off at':>23}   weight versions\n"
        f"{'':<24}{'start':>9}{'loss':>10}{'its weights':>14}{'newest':>9}   by stage",
        flush=True,
    )
    from pipedream.train.oracle import final_loss, train_and_check

    torch.set_num_threads(1)
    settings = config | {"num_batches": config["steps"]}
    for schedule_name in SCHEDULES_TO_TRAIN if name == "all" else [name]:
        title = SCHEDULES[schedule_name].title
        try:
            result, errors = train_and_check(schedule_name, every=3, **settings)
        except UserError as error:
            print_wrapped(f"{title}: {error}", "Not trained: ")
            continue
        loss = final_loss(result, config["num_microbatches"])
        end = "diverged" if result.diverged else f"{loss:.4f}"
        median_error = median(error.relative_error for error in errors)
        median_staleness = median(error.staleness_error for error in errors)
        print(
            f"{title:<24}{result.losses[0]:>9.4f}{end:>10}"
            f"{median_error:>14.2g}{median_staleness:>9.2g}  ",
            *result.peak_versions,
            flush=True,  # training takes a second or two
        )
    print_wrapped(
        "final loss: mean over the last batches that contain every sample once. gradient off: "
        "relative error of the backward passes' gradient, compared with autograd through the "
        "whole model, at the weights of the microbatch's own forward pass and at the newest "
        "weights, which are updated. Medians over every third microbatch."
    )


if __name__ == "__main__":
    main_with_errors(lambda: show(read_config(CONFIG)))
