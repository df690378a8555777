"""Compare predictions with all published runs, and generate the tables in PREDICTIONS.md."""

import functools
import itertools
import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

from distributed_training.plan.plan import Draft
from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.measured import compare, read_runs
from distributed_training.predict.memory import estimate_memory
from distributed_training.predict.predict import Prediction, local_cluster
from distributed_training.predict.rates import gpu_rates
from distributed_training.records.record import Record
from distributed_training.settings.files import ROOT
from distributed_training.settings.machine import Machine, find_gpu
from distributed_training.settings.request import build_config
from results.lab.analysis import blind
from results.lab.cores import predicted_times
from results.lab.runs import to_current_keys

RECORDS = ROOT / "results" / "records"
# Runs that started before this time kept two more copies of each loss chunk.
CHUNKS_IN_PLACE_SINCE = "2026-11-25T14"
# Runs that started before this time kept fp32 values for each logit if the vocabulary was sharded.
TP_LOSS_IN_PLACE_SINCE = "2026-11-29"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A run with its prediction and its measurements."""

    page: str  # name of the record's folder
    name: str
    record: Record
    plan: Draft
    prediction: Prediction

    @property
    def is_memory_comparable(self) -> bool:
        """Return whether the measured peak can be compared with the prediction.

        Memory that previous runs left in the process counts toward the peak. Old records contain
        the size of this memory, but not how much of it was in use. These records are excluded
        unless this size is less than a quarter of the peak on the fullest rank. Old runs that
        computed the loss in chunks, or over tp, are excluded, because the loss took more memory at
        that time."""
        since = TP_LOSS_IN_PLACE_SINCE if self.plan.mesh["tp"] > 1 else ""
        if self.plan.config.loss_chunk_tokens:
            since = CHUNKS_IN_PLACE_SINCE
        if self.record.started_at < since:
            return False
        ranks = [
            (rank["peak_allocated_bytes"], rank.get("left_over_bytes", 0))
            for rank in self.record.memory.get("by_rank", [])
            if "left_allocated_bytes" not in rank
        ]
        peak, left_over = max(ranks, key=lambda rank: rank[0] - rank[1], default=(1, 0))
        return left_over < peak / 4

    @property
    def memory_error(self) -> float:
        """Return the relative error of the predicted peak tensor memory on the fullest rank."""
        return self.prediction.memory.peak_bytes / self.record.memory["peak_allocated_bytes"] - 1

    @property
    def measured_s(self) -> float:
        return float(self.record.performance["step_time_s"]["p50"])

    @property
    def time_error(self) -> float:
        assert self.prediction.step is not None
        return self.prediction.step.seconds / self.measured_s - 1


def plan_of(record: Record) -> Draft:
    """Plan a recorded run with the current code, using the recorded layout and micro-batches."""
    values = to_current_keys(record.config)
    # Before graphs held whole steps, only single processes with compiled blocks launched graphs.
    graphs = record.world_size == 1 and record.strategy["engine"] == "native"
    machine = record.machine | {"compute_capability": tuple(record.machine["compute_capability"])}
    config = {
        "cuda_graphs": graphs and bool(values["compile"]),
        "async_tp": False,  # Early versions did not have it.
        "loss_chunk_tokens": 0,
        **values,
        "resume": None,
        "weights": "random",  # a recorded folder may be gone
        # In early records, the batch size is per replica. Now batch_size is per process.
        "batch_size": record.batch.global_batch_size // record.world_size,
        "grad_accum_steps": 1,
        "micro_batch_size": record.batch.micro_batch_size,
        "num_microbatches": record.batch.num_microbatches,
    }
    request = build_config(config)
    count = record.world_size
    return draft_plan(request, local_cluster(Machine(**machine), count, count))


@functools.cache
def gpu_rows(folder: Path = RECORDS) -> tuple[Row, ...]:
    """Return all measured GPU runs whose records are under `folder`."""
    return tuple(_read_rows(folder))


def _read_rows(folder: Path) -> Iterator[Row]:
    for path in sorted(folder.glob("*/*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(document, dict) and "schema_version" in document):
            continue  # not a run's record
        record = Record.model_validate(document)
        if record.machine["gpu_name"] and record.performance.get("step_time_s"):
            plan = plan_of(record)
            gpu = find_gpu(plan.machine.gpu_name)
            # The GPU's published rates, not rates that were measured on this machine
            rates = None if gpu is None else gpu_rates(gpu)
            yield Row(
                page=path.parent.name,
                name=path.stem,
                record=record,
                plan=plan,
                prediction=Prediction(plan, rates),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuRow:
    """A run on CPUs. `measured_bytes` and `predicted_bytes` are the RAM of the process that uses
    the most RAM."""

    name: str
    measured_bytes: int
    predicted_bytes: int
    seconds: float | None  # per step, or None if the run was not timed

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


@functools.cache
def cpu_rows(file: Path = RECORDS / "cpu" / "strategies.json") -> tuple[CpuRow, ...]:
    """Return the runs that cpu.py recorded, with predictions from the current code."""
    document = json.loads(file.read_text(encoding="utf-8"))
    values = document["machine"]
    machine = Machine(**values | {"compute_capability": tuple(values["compute_capability"])})
    rows = []
    for run in document["runs"]:
        count = run["processes"]
        request = build_config(to_current_keys(run["config"]))
        plan = draft_plan(request, local_cluster(machine, count, count))
        rows.append(
            CpuRow(
                name=f"{plan.strategy.name} x {count}",
                measured_bytes=run["peak_host_bytes"],
                predicted_bytes=estimate_memory(replace(plan, tokenized=True)).host_bytes,
                seconds=run["step_time_s"],
            )
        )
    return tuple(rows)


def cpu_times() -> dict[tuple[str, str], list[float]]:
    """Return for each run that cores.py recorded, by processor and name, its measured time per
    step, and the times that follow from the two measurements of the cores."""
    times = {}
    for file in sorted((RECORDS / "cpu").glob("cores*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        for name, run in document["runs"].items():
            key = document["processor"], name
            times[key] = [run["step_time_s"]["p50"], *predicted_times(run)]
    return times


def times_on_cpus() -> str:
    """Return a table of the runs that cores.py recorded."""
    rows = []
    for names, times in cpu_times().items():
        error = statistics.mean(times[1:]) / times[0] - 1
        rows.append([*names, *(f"{1000 * seconds:,.0f} ms" for seconds in times), f"{error:+.0%}"])
    return _table(rows, ["processor", "run", "measured", "predicted before", "after", "error"])


def on_cpus() -> str:
    """Return a table of the CPU runs, with one row per strategy and one column per number of
    processes. Each cell contains the measured RAM with the relative error of its prediction, and
    the measured time per step."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for row in cpu_rows():
        strategy, _, count = row.name.partition(" x ")
        text = f"{row.measured_bytes / 2**20:,.0f}, {row.memory_error:+.1%}"
        if row.seconds is not None:
            text += f"; {1000 * row.seconds:,.0f} ms"
        cells[strategy][count] = text
    counts = sorted({count for texts in cells.values() for count in texts}, key=int)
    rows = [[name, *(texts.get(count, "-") for count in counts)] for name, texts in cells.items()]
    return _table(rows, ["processes", *counts])


def share_within(errors: Sequence[float], limit: float) -> float:
    """Return the share of errors whose absolute value is at most `limit`."""
    return sum(abs(error) <= limit for error in errors) / len(errors)


def group_by_work(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the runs that did the same work. Return the groups that contain more than one layout,
    by name."""
    sets = defaultdict(list)
    for row in rows:
        config = row.record.config
        batch = row.record.batch.global_batch_size
        work = f"{config['model']}, {batch} x {config['max_length']}, {config['precision']}"
        sets[f"{row.page}: {work}"].append(row)
    return {name: same for name, same in sets.items() if len(set(map(_layout, same))) > 1}


def predicted_s(row: Row) -> float:
    return row.measured_s * (1 + row.time_error)


def first_choice(rows: Sequence[Row]) -> tuple[Row, Row]:
    """Return the run with the shortest predicted time and the run with the shortest measured
    time."""
    first = min(rows, key=lambda row: (predicted_s(row), row.measured_s))
    return first, min(rows, key=lambda row: row.measured_s)


def rank_correlation(rows: Sequence[Row]) -> float:
    """Return Spearman's rank correlation between predicted and measured times."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(value) + order.count(value) / 2 for value in values]

    measured = ranks([row.measured_s for row in rows])
    return statistics.correlation(ranks(list(map(predicted_s, rows))), measured)


@functools.cache
def _published_errors() -> list[tuple[str, float]]:
    """Return a list with one pair for each run in blind.json that has a measured time. A pair
    contains a label that names the source and the GPUs, and the relative error of the predicted
    time."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for row in json.loads(blind.TABLE.read_text(encoding="utf-8")):
            error = blind.prediction_errors(row, Path(folder))[0]
            if error is not None:
                source = row["source"].partition(",")[0]
                cluster = row["cluster"]
                gpus = cluster.replace("x", " x ") if "x" in cluster else "one GPU"
                runs.append((f"{source}, {gpus}", error))
    return runs


GROUPS = ("one GPU", "several GPUs", "mixtures", "low bits", "published, H100", "published, A100")


@functools.cache
def covered() -> dict[str, list[tuple[bool, float, float] | None]]:
    """Return for each group whether each measured run is inside the range that runs of other model
    families give for it, and the range. A run that is not comparable with them has None."""
    by_group: dict[str, list[tuple[bool, float, float] | None]] = {name: [] for name in GROUPS}
    runs = read_runs()
    for run in runs:
        others = [other for other in runs if other["family"] != run["family"]]
        shares = compare(run, others).shares
        entry = None
        if shares is not None:
            entry = shares[0] <= run["seconds"] / run["predicted_s"] <= shares[1], *shares
        is_low = run["base_dtype"] in ("nf4", "fp8")
        index = 2 if run["experts"] else 3 if is_low else int(run["processes"] > 1)
        if not run["torch"]:  # published by others
            index = 4 if run["gpu"].startswith("H100") else 5
        if "RunPod" not in run["record"]:  # the width of ranges on other GPUs
            by_group[GROUPS[index]].append(entry)
    return by_group


def coverage() -> str:
    """Return a table of how often measured times are inside the ranges."""
    rows = []
    for name, entries in covered().items():
        ranges = [entry for entry in entries if entry is not None]
        low, high = (statistics.median(entry[index] for entry in ranges) - 1 for index in (1, 2))
        share = sum(entry[0] for entry in ranges) / len(ranges)
        counts = [str(len(ranges)), f"{share:.0%}", f"{low:+.0%} to {high:+.0%}"]
        rows.append([name, *counts, str(len(entries) - len(ranges))])
    return _table(rows, ["", "runs", "inside", "median range", "runs without a range"])


def kept_back() -> str:
    """Return a table of the published runs that no range was fitted to."""
    by_gpu: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for row in json.loads(blind.TABLE.read_text(encoding="utf-8")):
            if row["is_blind"]:
                prediction = blind.predict_row(row, Path(folder))[0]
                low, high = prediction.likely_s or (0.0, 0.0)
                is_inside = low <= (blind.measured_s(row) or 0.0) <= high
                generation = prediction.plan.machine.compute_capability
                name = "H100 and H200" if generation == (9, 0) else "other generations"
                by_gpu[name].append((high > 0, is_inside))
    rows = [
        [name, *map(str, (len(runs), *map(sum, zip(*runs, strict=True))))]
        for name, runs in by_gpu.items()
    ]
    return _table(rows, ["GPUs", "published runs kept back", "with a range", "inside"])


def published() -> str:
    """Return a table of the errors in the predicted times of published runs, with one row for each
    combination of source and GPUs."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, error in _published_errors():
        by_source[source].append(error)
    table_rows = [
        [source, str(len(errors)), f"{share_within(errors, 0.10):.0%}"]
        + [f"{error:+.0%}" for error in (min(errors), statistics.median(errors), max(errors))]
        for source, errors in by_source.items()
    ]
    headers = ["source, GPUs", "runs", "within 10%", "lowest error", "median", "highest error"]
    return _table(table_rows, headers)


def distribution() -> str:
    """Return a table of the share of runs whose prediction error is within each limit."""
    rows = gpu_rows()
    unseen = [row for row in rows if row.page not in fitted_pages()]
    table_rows = []
    for quantity, errors in (
        ("peak memory, held-out pages", memory_errors(unseen)),
        ("step time, held-out pages", [row.time_error for row in unseen]),
        ("step time, published by others", [error for _, error in _published_errors()]),
        ("peak memory, all pages", memory_errors(rows)),
        ("step time, all pages", [row.time_error for row in rows]),
    ):
        shares = [f"{share_within(errors, limit):.0%}" for limit in (0.02, 0.05, 0.10, 0.25)]
        low = min(errors)
        high = max(errors)
        table_rows.append([quantity, str(len(errors)), *shares, f"{low:+.0%}", f"{high:+.0%}"])
    headers = [
        "",
        "runs",
        "within 2%",
        "5%",
        "10%",
        "25%",
        "largest underestimate",
        "largest overestimate",
    ]
    return _table(table_rows, headers)


def fitted_pages() -> set[str]:
    """Return the pages whose records were used to set constants, according to constants.json."""
    file = ROOT / "distributed_training" / "predict" / "constants.json"
    sources = " ".join(entry["record"] for entry in json.loads(file.read_text()).values())
    return set(re.findall(r"h200-[\w-]+", sources))


def memory_errors(rows: Iterable[Row]) -> list[float]:
    """Return the memory errors of all runs whose peaks can be compared with predictions."""
    return [row.memory_error for row in rows if row.is_memory_comparable]


def choices() -> str:
    """Return text that states how often the planner's first choice was the fastest run. A table
    lists the sets of runs in which another run was faster."""
    other_sets = []
    sets = group_by_work(gpu_rows())
    for name, rows in sets.items():
        first, best = first_choice(rows)
        slowdown = first.measured_s / best.measured_s - 1
        if slowdown:
            other_sets.append([name, _layout(first), _layout(best), f"{slowdown:.1%}"])
    ranked = statistics.mean(rank_correlation(rows) for rows in sets.values() if len(rows) > 2)
    text = (
        f"In {len(sets) - len(other_sets)} of {len(sets)} sets of runs with "
        "the same model, batch and precision, the planner's first choice was the fastest run. "
        "The rank correlation of predicted and measured times is on average "
        f"{ranked:.2f} (sets of at least three runs)."
    )
    table = _table(other_sets, ["other sets", "first choice", "fastest", "slower by"])
    return f"{text}\n\n{table}"


def every_row() -> str:
    """Return all runs as aligned text, grouped by page."""
    lines = [_line("", "memory", "time")]
    for page, rows in itertools.groupby(gpu_rows(), key=lambda row: row.page):
        lines += [page, *(_line(*_cells(row)) for row in rows)]
    return "\n".join(lines)


def worst(error_of: Callable[[Row], float], rows: Iterable[Row], count: int = 4) -> str:
    """Return a table of the `count` rows with the largest errors."""
    rows = sorted(rows, key=lambda row: -abs(error_of(row)))[:count]
    return _table([[f"{row.page}/{row.name}", f"{error_of(row):+.0%}"] for row in rows],
                  ["record", "error"])  # fmt: skip


def worst_times() -> str:
    return worst(lambda row: row.time_error, gpu_rows())


def worst_memory() -> str:
    return worst(
        lambda row: row.memory_error, (row for row in gpu_rows() if row.is_memory_comparable)
    )


def _layout(row: Row) -> str:
    return row.record.layout_name


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"  {row.name}",
        f"{row.memory_error:+.1%}" if row.is_memory_comparable else "-",
        f"{row.time_error:+.1%}",
    )


def _line(name: str, *cells: str) -> str:
    return f"{name:<66}" + "".join(f"{cell:>9}" for cell in cells)


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
