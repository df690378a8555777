"""Compare a plan with measured runs: the nearest run, and the range in which the time of a step
lies according to the errors of comparable runs. This module does not import torch."""

import functools
import math
import re
import statistics
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from distributed_training.plan.plan import Draft
from distributed_training.predict.rates import FITTED
from distributed_training.settings.files import JsonObject, load_json
from distributed_training.settings.machine import find_gpu

# Measured runs, with predictions by today's code: `python -m results.lab.measured` writes them.
TABLE = Path(__file__).with_name("measured.json")


class Evidence(NamedTuple):
    """Measured runs that are comparable with a prediction."""

    nearest: str  # the nearest run, for the user
    # Range of measured / predicted step time that contains 80% of such runs, or None if no
    # comparable run was measured
    shares: tuple[float, float] | None


@functools.cache
def read_runs() -> list[JsonObject]:
    runs: list[JsonObject] = load_json(TABLE, "the table of measured runs")
    return runs


def describe_run(plan: Draft, bound_by: str) -> JsonObject:
    """Return the properties by which runs are compared. Runs with the same properties are the same
    run."""
    gpu = find_gpu(plan.machine.gpu_name)
    label = plan.model.label.lower()
    batch = plan.batch
    compared = vars(FITTED.comparison.equal).keys()
    return {
        **{name: value for name, value in plan.config if name in compared},
        "model": label,
        "family": re.match(r"gpt-oss|[a-z]*", label)[0],  # type: ignore[index]  # always matches
        "code": plan.model.family,
        "experts": bool(plan.size.stack_names()),
        "gpu": gpu and gpu.name,
        "generation": gpu and str(gpu.compute_capability),
        "several_nodes": plan.num_processes > plan.processes_here,
        "axes": " ".join(axis for axis, size in plan.mesh.items() if size > 1),
        "zero": plan.strategy.traits.uses_zero,
        "strategy": plan.strategy.name,
        "pipeline_schedule": plan.mesh["pp"] > 1 and plan.config.pipeline_schedule,
        "num_microbatches": batch.num_microbatches,
        "adapters": plan.config.lora_rank > 0,
        "waits": bound_by in ("host", "host RAM", "disk"),
        "torch": FITTED.comparison.torch,
        "parameters": plan.size.num_parameters,
        "processes": plan.num_processes,
        "max_length": plan.config.max_length,
        "tokens": batch.micro_batch_size * plan.config.max_length,
    }


def distance(run: JsonObject, other: JsonObject) -> float:
    """Return how much two runs differ, in units of FITTED.comparison."""
    weights = FITTED.comparison
    differing = [weight for name, weight in vars(weights.equal).items() if run[name] != other[name]]
    doublings = [
        weight * abs(math.log2(run[name] / other[name]))
        for name, weight in vars(weights.doubling).items()
    ]
    return math.fsum(differing + doublings)


def _rank(run: JsonObject, runs: list[JsonObject]) -> list[tuple[float, JsonObject]]:
    """Return the nearest runs with their distances, or [] if even the nearest is too far away."""
    constants = FITTED.comparison
    ranked = sorted(((distance(run, other), other) for other in runs), key=itemgetter(0))
    is_near = bool(ranked) and ranked[0][0] <= constants.limit
    return ranked[: constants.neighbors] if is_near else []


def compare(run: JsonObject, runs: list[JsonObject]) -> Evidence:
    """Return what `runs` say about the predicted time of `run`: the errors of the nearest runs,
    each widened by its distance. If its GPU's generation has few comparable runs, runs of the other
    generations are used, and the range is widened by the errors that other GPUs had. There is no
    range for a generation without any run."""
    constants = FITTED.comparison
    counts = Counter(other["generation"] for other in runs)
    often = [other for other in runs if counts[other["generation"]] >= constants.neighbors]
    same = [other for other in often if other["generation"] == run["generation"]]
    others = often if counts[run["generation"]] else []
    ranked, factors = _rank(run, same), (1.0, 1.0)
    if not ranked:
        ranked, factors = _rank(run, others), constants.other_generation
    if not ranked:
        return Evidence("no comparable run was measured", None)
    shortest, nearest = ranked[0]
    name, seconds = nearest["name"], nearest["seconds"]
    text = f"measured: {seconds:.3g} s, this very run on {nearest['place']}"
    if shortest:
        error = nearest["predicted_s"] / seconds - 1
        text = f"nearest: {name}, {nearest['place']}: {seconds:.3g} s, predicted {error:+.1%}"
    errors = [(other["seconds"] / other["predicted_s"], d) for d, other in ranked]
    ends = [
        statistics.quantiles(
            [error * constants.widening ** (sign * d) for error, d in errors],
            n=10,
            method="inclusive",
        )[index]
        for index, sign in ((0, -1), (-1, 1))
    ]
    return Evidence(text, (ends[0] * factors[0], ends[1] * factors[1]))
