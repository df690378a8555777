"""Predict every measured run with today's code, and write the runs with which the planner compares
plans: `python -m results.lab.measured`.

They come from the records of runs in results/records/, from tables there, whose rows with their
clusters and CONFIG are listed in results/tables.json, and from those published runs (blind.json)
that are not kept to test the ranges. Of equal runs, the last one is used."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from distributed_training.planner.answer import name_with_mode
from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.measured import TABLE, describe_run
from distributed_training.predict.predict import Prediction, parse_cluster
from distributed_training.settings.files import ROOT, JsonObject
from distributed_training.settings.machine import find_gpu
from distributed_training.settings.request import build_config
from results.lab.analysis import blind
from results.lab.pages import validate
from results.lab.runs import write_inputs

TABLES = ROOT / "results" / "tables.json"
COMMON = {"strategy": "dp", "weights": "random", "precision": "bf16"}


class Run(NamedTuple):
    """A measured run."""

    torch: str  # version, such as 2.14; "" if unknown
    record: str  # file in results/records/, or the source of a published run
    prediction: Prediction
    seconds: float  # measured, per step


def measured_runs(folder: Path) -> Iterator[Run]:
    """Yield the measured runs on GPUs, older ones first. `folder` is for the models' files."""
    for row in validate.gpu_rows():
        version = (row.record.model_extra or {})["versions"]["torch"][:4]
        yield Run(version, f"{row.page}/{row.name}.json", row.prediction, row.measured_s)
    for number, entry in enumerate(json.loads(TABLES.read_text(encoding="utf-8"))):
        document = json.loads((validate.RECORDS / entry["record"]).read_text(encoding="utf-8"))
        row = document[entry["section"]][entry["row"]]
        values = {**COMMON, **entry["config"]}
        values = write_inputs(values, folder / str(number) / entry.get("name", "model"))
        cluster = parse_cluster(entry["cluster"])
        plan = draft_plan(build_config(values), cluster)
        seconds = row["step_time_s"] if "step_time_s" in row else row["ms"] / 1000
        version = document["versions"]["torch"][:4]
        yield Run(version, entry["record"], Prediction(plan, cluster.rates), seconds)
    for row in json.loads(blind.TABLE.read_text(encoding="utf-8")):
        seconds = blind.measured_s(row)
        if not row["is_blind"] and seconds is not None:
            source = folder / row["source"].partition(",")[0]
            source.mkdir(exist_ok=True)
            yield Run("", row["source"], blind.predict_row(row, source)[0], seconds)


def as_row(run: Run) -> JsonObject:
    """Return the line of a run in the planner's table."""
    plan = run.prediction.plan
    step = run.prediction.step
    assert step is not None
    gpu = find_gpu(plan.machine.gpu_name)
    place = gpu.name if gpu else "CPU process"
    count = plan.num_processes
    return describe_run(plan, step.bound_by) | {
        "torch": run.torch,
        "name": f"{plan.model.label}, {name_with_mode(run.prediction)}",
        "place": place if count == 1 else f"{count} x {place}",
        "seconds": round(run.seconds, 5),
        "predicted_s": round(step.seconds, 5),
        "record": run.record,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = list(map(as_row, measured_runs(Path(folder))))
    different = {json.dumps(list(row.values())[:-5]): row for row in rows}
    lines = ",\n ".join(map(json.dumps, different.values()))
    TABLE.write_text(f"[\n {lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
