"""`compare`: the same work under several strategies, one run after the other, on one page.

    python real_model_example.py compare --strategies dp,fsdp,zero2 --seeds 3
    python real_model_example.py compare results/plans/h200-x1.json --out results/records/h200-x1

A plan is JSON: {"num_gpus": N, "common": {CONFIG keys}, "runs": [{CONFIG keys}, ...]}. Every run is
the command that a user would type; what it prints goes to log.txt. Records lie in the folder as
soon as they are there: started again, only runs without one are done. No torch in this process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from tqdm import tqdm

from distributed_training.records import page
from distributed_training.records.display import WIDTH, gib, short_path
from distributed_training.records.record import METRICS_FILE, RECORD_FILE, Record, write_json
from distributed_training.records.tables import (
    layout_words,
    measured_peak,
    tokens_per_s,
    validation_loss,
)
from distributed_training.tools.wanted import Build, Run, Values, Wanted, comparisons_of, plan_runs

ELSEWHERE = ("output_dir",)  # keys that may differ between equal runs
RECORDS = f"[!l]*/{RECORD_FILE}"  # not through the link "latest"
PATIENCE_S = 30.0  # for a run that was told to stop


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `compare` takes besides CONFIG's keys."""
    add = parser.add_argument_group("What to compare").add_argument
    add("plan", nargs="?", metavar="PLAN.json", help="runs, as in results/plans/")
    add("--strategies", metavar="A,B", help="without a plan: strategies, separated by commas")
    add("--seeds", type=int, default=1, metavar="N", help="runs of each, with seed, seed + 1, ...")
    add("--out", metavar="FOLDER", help="for records and page; default: in output_dir")
    add("--git_commit", help=argparse.SUPPRESS)  # of this tree, where it has no .git


def run(arguments: argparse.Namespace, build: Build, script: Path) -> int:
    """Do what is missing, then write the page; 1 where no run finished, 130 where interrupted."""
    wanted = plan_runs(arguments, build, script)
    take_finished(wanted)
    there, each = sum(run.record is not None for run in wanted.runs), wanted.num_processes
    processes = f"{each} process{'es' * (each > 1)}"
    kept = f"; {there} are there already" * bool(there)
    print(f"{len(wanted.runs)} runs with {processes} each, in {short_path(wanted.out)}{kept}")
    if arguments.dry_run:
        print("\n".join(f"  {' '.join(run.texts)}" for run in wanted.left))
        return 0
    wanted.out.mkdir(parents=True, exist_ok=True)
    print(f"what they print goes to {short_path(wanted.out)}/log.txt", flush=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as for Ctrl-C
    interrupted = False
    try:
        do_what_is_left(wanted)
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted with {len(wanted.left)} to go; the same command goes on with them")
    finally:
        signal.signal(signal.SIGTERM, before)
    write_page(wanted)
    failed = all(run.record is None for run in wanted.runs)
    return 128 + signal.SIGINT if interrupted else int(failed)


def take_finished(wanted: Wanted) -> None:
    """Give each run the finished record of the same CONFIG that lies in the folder."""
    known: dict[str, Record] = {}
    for path in sorted(wanted.out.glob("*.json")):
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.get("status") == "ok":
            record = Record.model_validate(values)
            known[_asked(record.config_requested, record.world_size)] = record
    for run in wanted.runs:
        if run.config is not None:
            words = json.loads(to_json(run.config.to_user_words()))
            run.record = known.get(_asked(words, wanted.num_processes))


def _asked(words: Values, num_processes: int) -> str:
    kept = {key: value for key, value in words.items() if key not in ELSEWHERE}
    return json.dumps([num_processes, kept], sort_keys=True)


def do_what_is_left(wanted: Wanted) -> None:
    """Train, one run after the other; a layout that failed with one seed is not tried with the
    next."""
    seeds = len({run.values["seed"] for run in wanted.runs}) > 1
    for number, run in enumerate(wanted.runs, 1):
        place, began = f"{number:>3}/{len(wanted.runs)}  ", time.monotonic()
        if run.record is not None:
            continue
        if not run.why:
            print(f"{place}{run.describe(seeds)} ...", flush=True)
            train(wanted, run)
            wanted.durations_s.append(time.monotonic() - began)
        for other in wanted.left:
            if run.why and other.layout == run.layout:
                other.why = run.why
        line = f"{place}{describe_end(run, seeds)}{_left(wanted)}"
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * len(place)), flush=True)


def describe_end(run: Run, seeds: bool) -> str:
    """A line on what came of a run."""
    if run.record is None:
        return f"{run.describe(seeds)}: {run.why}"
    speed = tokens_per_s(run.record)
    loss = validation_loss(run.record)
    parts = [
        "" if speed is None else f"{speed:,.0f} tokens/s",
        f"peak {gib(measured_peak(run.record))}",
        "" if loss is None else f"validation loss {loss:.4f}",
    ]
    return f"{run.describe(seeds)}: {', '.join(filter(None, parts))}"


def _left(wanted: Wanted) -> str:
    """How many runs there still are, and for how long if they take as long as those before."""
    if not wanted.left or not wanted.durations_s:
        return ""
    seconds = len(wanted.left) * sum(wanted.durations_s) / len(wanted.durations_s)
    return f"; {len(wanted.left)} left, {tqdm.format_interval(round(seconds))}"


def train(wanted: Wanted, run: Run) -> None:
    """Do one run and keep its record, or the reason why there is none."""
    folder = wanted.out / "runs"
    before = set(folder.glob(RECORDS))
    settings = [*run.texts, f"output_dir={folder}"]
    command = [sys.executable, str(wanted.script), *wanted.options, "--set", *settings]
    with open(wanted.out / "log.txt", "a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        place = log.tell()
        code = wait_for(command, log)
    said = (wanted.out / "log.txt").read_bytes()[place:].decode(errors="replace")
    new = set(folder.glob(RECORDS)) - before
    if not new:
        run.why = _reason(said, code)
        return
    path = new.pop()
    values = json.loads(path.read_text(encoding="utf-8"))
    values["git_commit"] = wanted.git_commit or values["git_commit"]
    values["loss_seconds"] = training_seconds(path.parent / METRICS_FILE)
    record = Record.model_validate(values)
    if record.status == "ok":
        run.record = record
        write_json(wanted.out / free_name(record, wanted.out), values)
    else:
        run.why = f"{record.status}: {record.error or _reason(said, code)}"


def wait_for(command: Sequence[str], log: Any) -> int:
    """The exit code of a program in a session of its own; on Ctrl-C it is told to stop first."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        raise


def _reason(said: str, code: int) -> str:
    """The line in which a run says why it did not start, else its last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"exit code {code}"])[-1]


def training_seconds(metrics: Path) -> list[float]:
    """Seconds of training until the end of each step, evaluation and saving left out."""
    if not metrics.is_file():
        return []
    steps = [json.loads(line)["step_time_s"] for line in metrics.read_text().splitlines()]
    return [round(seconds, 4) for seconds in itertools.accumulate(steps)]


def free_name(record: Record, folder: Path) -> str:
    """What distinguishes the record; the same run again gets a number."""
    model = record.config["model"].rpartition("/")[2]
    words = [model, record.strategy["name"], *layout_words(record), record.config["precision"]]
    name = "-".join([*words, f"b{record.batch.micro_batch_size}", f"x{record.world_size}"])
    names = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(2)))
    return next(f"{name}.json" for name in names if not (folder / f"{name}.json").exists())


def write_page(wanted: Wanted) -> None:
    """compare.md with its plots, compare.html, and a table on the screen."""
    from distributed_training.records.plots import save_pngs  # slow to import

    comparisons = comparisons_of(wanted)
    out = wanted.out
    plots = []
    for number, comparison in enumerate(comparisons, 1):
        plots.append(save_pngs(comparison, out, f"-{number}" if len(comparisons) > 1 else ""))
    done = sum(run.record is not None for run in wanted.runs)
    left = "" if done == len(wanted.runs) else f" of {len(wanted.runs)}"
    heading = f"{done}{left} runs, each in processes of its own, one after the other."
    title = "Strategies side by side"
    (out / "compare.md").write_text(page.markdown(title, heading, comparisons, plots), "utf-8")
    (out / "compare.html").write_text(page.html(title, heading, comparisons), "utf-8")
    for comparison in comparisons:
        print(f"\n{page.terminal(comparison)}")
    print(f"\nwrote {short_path(out)}/compare.md and compare.html")
