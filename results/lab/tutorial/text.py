"""Format records as the tables and paragraphs of TEST_RESULTS.md.

This module does not import torch."""

from collections.abc import Mapping, Sequence

import checkout  # noqa: F401
from pipedream.runtime.record import launch_bound_cases, makespan_error, render

from results.lab.tutorial.goals import goal_of, is_met, points_error, validation_cases
from results.lab.tutorial.tables import Record, final_loss_table, study_intro, title_of, wrap


def describe(record: Record) -> str:
    """Return text such as '4 stages, CPU, 20 + 40 ms slept, times from GPipe'."""
    text = f"{record['num_stages']} stages, {_device(record)}"
    slept = record["emulated_ms"]
    if slept["forward"] or slept["backward"]:
        text += f", {slept['forward']:g} + {slept['backward']:g} ms slept"
    return f"{text}, times from {title_of(record['calibration']['schedule'])}"


def title(record: Record) -> str:
    """Return text such as '4 stages, CPU, times from GPipe'."""
    calibration = title_of(record["calibration"]["schedule"])
    return f"{_machine_name(record)}, times from {calibration}"


def _machine_name(record: Record) -> str:
    return f"{record['num_stages']} stages, {_device(record).replace('NVIDIA ', '')}"


def _device(record: Record) -> str:
    return record["machine"]["device"].partition(",")[0]


def summary(records: Mapping[str, Record]) -> str:
    """Return a table with one row per record. Each row contains the simulator's largest errors and
    whether they meet the goal."""
    lines = [
        "| record | times from | runs predicted | makespan error "
        "| utilization error, points | goal |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, record in records.items():
        link = f"[{_machine_name(record)}](records/{name})"
        link += f" | {title_of(record['calibration']['schedule'])}"
        cases = validation_cases(record)
        if not cases:
            lines.append(f"| {link} | 0 | - | - | nothing was predicted |")
            continue
        percent = max(abs(makespan_error(case)) for case in cases)
        points = max(abs(points_error(case)) for case in cases)
        lines.append(
            f"| {link} | {len(cases)} | {percent:.1f}% | {points:.1f} "
            f"| {'met' if is_met(record) else 'not met'} |"
        )
    return "\n".join(lines)


RUNTIME = """## One run

`pipedream_runtime.py` trains under every schedule, with one process per rank. Without GPUs, each
process emulates a GPU by sleeping for 10 ms per forward pass and 20 ms per backward pass:

```bash
python pipedream_runtime.py --num_stages 4
```

{table}

*Equal* means that the weights are bit-identical to the weights from training in one process. The
simulator uses the mean durations of one run (\\*) to predict the other runs. On GPUs, run
`python ../results/lab/tutorial/benchmark.py NAME`. NAME is `flushes`, `zero-bubble` or `search`."""


def render_page(records: Mapping[str, Record], one_run: Record, study: Record) -> str:
    """Return the content of TEST_RESULTS.md."""
    parts = [
        "# Measured results",
        wrap(verdict(records)),
        wrap(
            "`python results/lab/tutorial/pages.py --write` generates this page from "
            "[records/](records/). Each record contains its command, machine and versions."
        ),
        RUNTIME.format(table=printed_table(one_run)),
        "## Prediction against measurement",
        wrap(
            "The makespan lasts from the first start to the last end. The utilization is the "
            "share of the makespan in which stages compute, and its error is in percentage "
            "points. "
            f"The goals are errors of at most {_goals(records)}."
        ),
        summary(records),
        "![Measured and simulated utilization](figures/prediction.png)",
    ]
    parts += ["## Effect of weight stashing", study_intro(study), final_loss_table(study)]
    return "\n\n".join(parts) + "\n"


def verdict(records: Mapping[str, Record]) -> str:
    """Return text that states how many records meet the goal. It also states in how many runs the
    weights and weight versions are as expected, and whether the clocks agree."""
    cases = [case for record in records.values() for case in record["cases"]]
    missed = [title(record) for record in records.values() if not is_met(record)]
    equal = [case["measured"]["weights_equal"] for case in cases]
    same_versions = [
        case["measured"]["peak_versions"] == case["predicted"]["peak_versions"]
        for case in cases
        if case["predicted"] is not None
    ]
    early = sum(case["measured"]["received_before_sent"] for case in cases)
    late = [
        f"{title(record)}: {run}"
        for record in records.values()
        for run in launch_bound_cases(record)
    ]
    missed_text = f" (not for {'; '.join(missed)})" if missed else ""
    clocks = (
        f"{early} messages arrived before they were sent, so the clocks disagree."
        if early
        else "No message arrived before it was sent, so the clocks agree."
    )
    return (
        f"The simulator meets the accuracy goal for {len(records) - len(missed)} of {len(records)} "
        f"records{missed_text}. "
        f"In {_share_of([same for same in equal if same is not None]).lower()} runs whose final "
        "weights were compared, the weights are bit-identical to the weights of one process. "
        f"{_share_of(same_versions)} runs that were also simulated kept as many weight versions as "
        f"predicted. {clocks}"
        + (f" A GPU waited for its host in {', '.join(late)}." if late else "")
    )


def _share_of(flags: Sequence[bool]) -> str:
    return f"All {len(flags)}" if all(flags) else f"{sum(flags)} of {len(flags)}"


def printed_table(record: Record) -> str:
    """Return a record's table as the runtime printed it, in a fenced block."""
    table = render(record).strip("\n").partition("\n\n")[0]
    return f"```text measured\n{table}\n```"


def _goals(records: Mapping[str, Record]) -> str:
    """Return text such as '10% of the makespan on CPU and 3 percentage points of utilization on
    NVIDIA H200'."""
    goals = {_device(record): goal_of(record).text for record in records.values()}
    return " and ".join(f"{goal} on {device}" for device, goal in goals.items())
