"""Predict measured runs with the simulator, and write a record and a table that compare
predictions and measurements.

The simulator uses the durations of one measured run. The unit of time is a nanosecond, and times
are exact fractions. This module does not import torch.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

from pipedream.schedules.ops import Item, Op, Schedule, transfers
from pipedream.schedules.policies import Policy, weight_use
from pipedream.simulate.measures import idle
from pipedream.simulate.simulator import Costs, Timeline, simulate, stage_factors

RECORD_FORMAT = 1
Record = Mapping[str, Any]
Report = dict[str, Any]
"""Results from one rank's run: slices (thread, operation, start_ns, end_ns) and (stage,
peak_versions) pairs. The rank with the last stage adds (microbatch, mean loss) pairs. On a GPU, the
report also has the allocator's peak_memory_mib, and waited_for_host. The latter is the share of
operations, from 0 to 1, that had finished by the time the host had launched them."""


class Slice(NamedTuple):
    """An operation or pair that a rank computed, or the transfer of a result. All slices use the
    same clock."""

    rank: int
    thread: str  # compute, send or receive
    item: Item  # for a transfer: the operation that produced the result
    start_ns: int
    end_ns: int


class Case(NamedTuple):
    """A schedule and a number of microbatches."""

    name: str  # key of SCHEDULES, path of a CSV file, or SEARCH_PREFIX and a memory limit
    num_microbatches: int  # per batch
    schedule: Schedule  # schedule of all batches; before a search, 1F1B with the same stages
    policy: Policy
    memory: int | None = None  # for a search: microbatches that a rank may hold


class MeasuredRun:
    """Measured run of a case. It is the repeat with the median makespan, or the faster of the two
    middle repeats if the number of repeats is even."""

    def __init__(
        self, case: Case, by_rank: Sequence[Sequence[Report]], weights: Sequence[Any] = ()
    ) -> None:
        """`by_rank` contains the reports of each rank, one per repeat. `weights` contains the final
        weights by stage, if they were requested."""
        self.case = case
        self.weights = weights
        repeats = []
        for ranks in zip(*by_rank, strict=True):
            slices = [
                Slice(rank, thread, Op(*op), *times)
                for rank, report in enumerate(ranks)
                for thread, op, *times in report["slices"]
            ]
            computed = [s for s in slices if s.thread == "compute"]
            span = max(s.end_ns for s in computed) - min(s.start_ns for s in computed)
            repeats.append((span, ranks, slices))
        spans = [span for span, _, _ in repeats]
        span = median_low(spans)
        _, ranks, self.slices = repeats[spans.index(span)]
        self.durations: dict[tuple[str, int], list[int]] = defaultdict(list)  # by kind, stage
        for (kind, stage, _), s in self.by_operation("compute").items():
            self.durations[kind, stage].append(s.end_ns - s.start_ns)
        utilization = sum(map(sum, self.durations.values())) / (case.schedule.num_ranks * span)
        sent, received = self.by_operation("send"), self.by_operation("receive")
        received_early = [
            op for op in sent.keys() & received if received[op].end_ns < sent[op].start_ns
        ]

        def medians(*kinds: str) -> list[float]:
            return [
                _ms(sum(median(self.durations[kind, stage] or [0]) for kind in kinds))
                for stage in range(case.schedule.num_stages)
            ]

        m = case.num_microbatches
        losses = [loss for _, loss in sorted(pair for rank in ranks for pair in rank["losses"])]
        means = [sum(losses[first : first + m]) / m for first in range(0, len(losses), m)]
        versions = sorted(pair for rank in ranks for pair in rank["peak_versions"])
        on_gpus = [rank for rank in ranks if "peak_memory_mib" in rank]
        self.measured: dict[str, Any] = {
            "makespan_ms": _ms(span),
            "utilisation": round(utilization, 5),
            "bubble": round(1 - utilization, 5),
            "repeat_makespans_ms": list(map(_ms, spans)),
            "forward_ms": medians("F"),
            "backward_ms": medians("B", "I", "W"),  # B, or I + W
            "peak_versions": [peak for _, peak in versions],
            # peak_memory_mib and waited_for_host have one value per rank, or are null on a CPU.
            "peak_memory_mib": [round(rank["peak_memory_mib"], 1) for rank in on_gpus] or None,
            "received_before_sent": len(received_early),  # 0 if the stages' clocks agree
            "waited_for_host": [round(rank["waited_for_host"], 4) for rank in on_gpus] or None,
            "losses": [loss if isfinite(loss) else None for loss in means],  # one per batch
            "weights_equal": None,  # bitwise equal to one process's weights; null: not checked
        }

    def by_operation(self, thread: str) -> dict[Op, Slice]:
        """Map each operation to its slice on `thread`, which is "compute", "send" or "receive". The
        slice of a transfer belongs to the operation that produced the result."""
        return {op: s for s in self.slices if s.thread == thread for op in s.item.parts}

    @cached_property
    def communication_ns(self) -> Fraction:
        """Median time from the end of a sending operation to the start of the receiving operation.
        A receiving operation counts only if its rank was idle, which means that the rank had ended
        its previous operation when the result was produced. The value is 0 if no rank was idle."""
        computed = self.by_operation("compute")
        orders = self.case.schedule.flat
        previous_ops = {op: previous for order in orders for previous, op in pairwise(order)}
        gaps = [
            Fraction(computed[receiver].start_ns - computed[sender].end_ns)
            for sender, receiver in transfers(self.case.schedule)
            if receiver not in previous_ops
            or computed[previous_ops[receiver]].end_ns <= computed[sender].end_ns
        ]
        return max(Fraction(0), median(gaps or [Fraction(0)]))

    def costs(self, num_stages: int) -> Costs:
        """Return the costs for the same layers partitioned into `num_stages` equal stages. The
        costs consist of this run's communication time and mean durations. If the run did not split
        its backward passes, each pass counts as an input gradient."""
        stages = range(self.case.schedule.num_stages)

        def means(*kinds: str) -> tuple[Fraction, ...]:
            averages = []
            for stage in stages:
                ns = [ns for kind in kinds for ns in self.durations[kind, stage]]
                averages.append(Fraction(sum(ns) * len(stages), (len(ns) or 1) * num_stages))
            return tuple(stage_factors(averages, num_stages))

        return Costs(
            forward=means("F"), input_gradient=means("B", "I"), weight_gradient=means("W"),
            communication=self.communication_ns,
        )  # fmt: skip

    def predict(self, schedule: Schedule) -> Timeline | None:
        """Simulate another schedule with this run's durations. Return None if the schedule splits
        backward passes but this run did not, because the durations of the halves are then
        unknown."""
        if schedule.splits_backward and not self.case.schedule.splits_backward:
            return None
        return simulate(schedule, self.costs(schedule.num_stages))


def build_record(
    runs: Sequence[MeasuredRun], calibration_run: MeasuredRun, run_metadata: Record
) -> dict[str, Any]:
    """Return a JSON-serializable record with one case per run. All times are in milliseconds. Lists
    have one entry per stage, except `losses` (one per batch), `repeat_makespans_ms` (one per
    repeat), `peak_memory_mib` and `waited_for_host` (one per rank).

    `run_metadata` has the keys command, versions, machine, emulated_ms, workload and config. All
    runs are predicted from the durations measured in `calibration_run`. The record contains these
    durations as `calibration`. For an order found by a search, `found` contains each rank's
    sequence of F, I and W for one batch. `predicted` is null if the durations do not apply to the
    schedule.
    """
    first = calibration_run.case
    costs = calibration_run.costs(first.schedule.num_stages)
    backward = map(sum, zip(costs.input_gradient, costs.weight_gradient, strict=True))
    cases = []
    for run in runs:
        m, schedule = run.case.num_microbatches, run.case.schedule
        case = {
            "schedule": run.case.name,
            "num_microbatches": m,
            "num_batches": schedule.num_microbatches // m,
            "calibrated_on": run is calibration_run,
            "measured": run.measured,
            "predicted": None,
        }
        if run.case.memory is not None:
            case["found"] = ["".join(op.kind for op in order[: 3 * m]) for order in schedule.flat]
        timeline = calibration_run.predict(schedule)
        if timeline is not None:
            bubble = float(idle(timeline).makespan_fraction)
            uses = weight_use(schedule, run.case.policy, m).values()
            case["predicted"] = {
                "makespan_ms": _ms(timeline.makespan),
                "utilisation": round(1 - bubble, 5),
                "bubble": round(bubble, 5),
                "peak_versions": [use.peak_versions for use in uses],
            }
        cases.append(case)
    return {
        "format": RECORD_FORMAT,
        **run_metadata,
        "num_stages": first.schedule.num_ranks,
        "calibration": {
            "schedule": first.name,
            "num_microbatches": first.num_microbatches,
            "forward_ms": list(map(_ms, costs.forward)),
            "backward_ms": list(map(_ms, backward)),
            "communication_ms": _ms(costs.communication),
        },
        "cases": cases,
    }


def _ms(ns: Fraction | float) -> float:
    return round(float(ns) / 1e6, 4)


def device_name(device: Any) -> str:
    """Return the name of a GPU. For a CPU, return the name that Linux reports."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", info.read_text()) if info.is_file() else None
    return f"CPU, {model[1]}" if model else "CPU"


def write_atomically(name: str, record: Record) -> None:
    """Replace the file atomically, so that it is never incomplete, even if the run is interrupted.
    If the file is a link, replace the link's target."""
    path = Path(name).resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    temporary.replace(path)


# The first operations of a run always end as soon as they are launched.
MAX_LAUNCH_BOUND_SHARE = 0.2


def launch_bound_cases(record: Record) -> list[str]:
    """Return the runs in which more than MAX_LAUNCH_BOUND_SHARE of a stage's operations ended as
    soon as the host had launched them. The times of such operations partly measure launching. An
    operation is not counted if the GPU waits for the host only in the middle of the operation."""
    return [
        _case_name(case)
        for case in record["cases"]
        if max(case["measured"].get("waited_for_host") or [0]) > MAX_LAUNCH_BOUND_SHARE
    ]


def _case_name(case: Record) -> str:
    return f"{case['schedule']} m={case['num_microbatches']}"


def makespan_error(case: Record) -> float:
    """Return the percentage by which the simulated makespan exceeds the measured makespan."""
    return 100 * (case["predicted"]["makespan_ms"] / case["measured"]["makespan_ms"] - 1)


def render(record: Record) -> str:
    """Return a record as a table. Each line shows the measured and predicted values of one run."""
    calibration = record["calibration"]
    cases = record["cases"]
    times = zip(calibration["forward_ms"], calibration["backward_ms"], strict=True)
    average = "; ".join(f"stage {stage}: {f:.2f} + {b:.2f}" for stage, (f, b) in enumerate(times))
    lines = [
        "",
        f"{'schedule':20}{'m':>4}  {'makespan, ms':^24}  {'bubble, %':^26}  versions  weights",
        f"{'':24}  {'measured':>8} {'simulated':>9} {'%':>5}  "
        f"{'measured':>8} {'simulated':>9} {'points':>7}",
        *map(_line, cases),
        "",
        f"* Durations were measured in this run ({calibration['schedule']}, "
        f"m={calibration['num_microbatches']}). Forward + backward, in ms: {average}; "
        f"transfer between stages: {calibration['communication_ms']:.2f}",
        "bubble: idle share of all stages' time; utilization is 100% minus this",
        "simulated: from mean durations; other programs on this machine can slow down single "
        "operations",
        "results received before they were sent: "
        f"{sum(case['measured']['received_before_sent'] for case in cases)}",
    ]
    memory = {_case_name(case): case["measured"]["peak_memory_mib"] for case in cases}
    if any(memory.values()):
        lines.append("peak memory by stage, MiB")
        for name, peaks in memory.items():
            lines.append(f"  {name}: {', '.join(f'{mib:.0f}' for mib in peaks)}")
    late_cases = launch_bound_cases(record)
    if late_cases:
        lines.append(
            f"the GPU waited for the host to start its work in {', '.join(late_cases)}, so these "
            "compute times include launch overhead; set a larger microbatch_size"
        )
    return "\n".join(lines)


def _line(case: Record) -> str:
    measured = case["measured"]
    predicted = case["predicted"]
    makespan, bubble = f"{'-':>9} {'-':>5}", f"{'-':>9} {'-':>7}"
    if predicted is not None:
        points = 100 * (predicted["bubble"] - measured["bubble"])
        makespan = f"{predicted['makespan_ms']:9.1f} {makespan_error(case):+5.1f}"
        bubble = f"{100 * predicted['bubble']:9.2f} {points:+7.2f}"
    versions_kept = measured["peak_versions"]
    versions = ",".join(map(str, versions_kept))
    if len(versions_kept) > 4 and len(set(versions_kept)) == 1:
        versions = f"{versions_kept[0]} each"
    equal = {None: "not checked", True: "equal", False: "DIFFER"}[measured["weights_equal"]]
    star = "*" if case["calibrated_on"] else ""
    return (
        f"{case['schedule'] + star:20}{case['num_microbatches']:4d}  "
        f"{measured['makespan_ms']:8.1f} {makespan}  {100 * measured['bubble']:8.2f} {bubble}  "
        f"{versions:8}  {equal}"
    )
