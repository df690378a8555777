"""Save runs under one layout and resume them under another.

python -m tests.faults.resharding    all pairs; writes results/resharding.json

The model is wider than the models in the tests, so that infinity keeps Adam moments in files.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed_training.planner.checks import has_libaio
from distributed_training.records.record import versions
from distributed_training.settings.files import ROOT
from tests.parity.support import (
    DEEP,
    MODELS,
    mesh,
    micro_batches,
    reference,
    run_cases,
    small_infinity,
)

# This model is deep enough for two stages on each of four processes, and its embedding has padding.
EIGHT_LAYERS = {**DEEP, "model": str(MODELS / "eight-layers-2050")}
WIDE = {**DEEP, "model": str(MODELS / "eight-wide-layers-2050")}
LORA = {
    **DEEP, "model": str(MODELS / "qwen3-eight-wide-layers-2050"), "lora_rank": 4,
    "lora_alpha": 8.0, "learning_rate": 1e-2,
}  # fmt: skip
NUM_STEPS = 6  # each run is saved after half of these steps
LOSS_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-3
_1F1B = {"pipeline_schedule": "1f1b"}
_ZB_V = {"pipeline_schedule": "zb-v"}
# Name -> CONFIG. A name ends in the number of processes.
LAYOUTS: dict[str, dict[str, Any]] = {
    **{
        f"{name} x {count}": {"strategy": name, **micro_batches(1)}
        for name in ("dp", "zero1", "zero2", "zero3", "offload", "fsdp")
        for count in (1, 2, 4)
    },
    **{
        f"infinity x {count}": {**small_infinity(sub_group_size=2**18), **micro_batches(1)}
        for count in ((1, 2, 4) if has_libaio() else ())
    },
    **{f"tp x {count}": {**mesh(tp=count), **micro_batches(1)} for count in (2, 4)},
    **{f"pp-1f1b x {count}": {**mesh(pp=count), **micro_batches(4), **_1F1B} for count in (2, 4)},
    **{f"pp-zb-v x {count}": {**mesh(pp=count), **micro_batches(8), **_ZB_V} for count in (2, 4)},
    **{f"hybrid x {count}": {"strategy": "hybrid", **micro_batches(2)} for count in (2, 4)},
    "hsdp x 4": {"strategy": "fsdp", "dp_replicate": 2, **micro_batches(1)},
    **{f"cp x {count}": {**mesh(cp=count), **micro_batches(2)} for count in (2, 4)},
    "dp-cp x 4": {"strategy": "dp", "cp": 2, **micro_batches(1)},
    "3d-shard-cp x 4": {**mesh(dp_shard=2, cp=2), **micro_batches(1)},
    "3d-tp-pp x 4": {**mesh(tp=2, pp=2), **micro_batches(4), **_1F1B},
    "3d-shard-tp x 4": {**mesh(dp_shard=2, tp=2), **micro_batches(1)},
    "3d-shard-pp-zb-v x 4": {**mesh(dp_shard=2, pp=2), **micro_batches(4), **_ZB_V},
}
# These layouts are only paired with each other. A run can only be resumed with the same settings of
# its algorithm, and other strategies have no local_steps.
LOCAL = {
    f"local_sgd x {count}": {"strategy": "local_sgd", "local_steps": 1, **micro_batches(1)}
    for count in (1, 2, 4)
}
Pair = tuple[str, str]


def processes_of(layout: str) -> int:
    return int(layout.rpartition(" ")[2])


def reshard(
    pairs: list[Pair], folder: Path, work: Mapping[str, Any]
) -> dict[Pair, dict[str, float]]:
    """For each pair, train half of the steps under the first layout and the other half under the
    second. Compare the losses of the second half and the final weights with an uninterrupted
    single-process run. For each pair, return the largest relative difference of a loss, and of a
    weight tensor in the 2-norm."""
    runs = _save({saved for saved, _ in pairs}, folder, work)
    return _resume(pairs, runs, work)


def _save(layouts: Iterable[str], folder: Path, work: Mapping[str, Any]) -> dict[str, str]:
    """Train under each layout for half of the steps, then save a checkpoint. Return the run folder
    for each layout."""
    runs: dict[str, str] = {}
    for count, names in _by_processes(layouts):
        cases = {
            name: {
                **work,
                **(LAYOUTS | LOCAL)[name],
                "output_dir": str(folder / name.replace(" ", "")),
            }
            for name in names
        }
        runs |= run_cases(cases, count, function="save_halfway", steps=NUM_STEPS)
    return runs


def _resume(
    pairs: list[Pair], runs: dict[str, str], work: Mapping[str, Any]
) -> dict[Pair, dict[str, float]]:
    """Resume each pair's saved run under the pair's second layout. `runs` maps saved layouts to run
    folders. Return the same differences as `reshard`."""
    expected = reference(dict(work), steps=NUM_STEPS)
    differences = {}
    for count, names in _by_processes({resumed for _, resumed in pairs}):
        cases = {
            f"{saved} -> {resumed}": {**work, **(LAYOUTS | LOCAL)[resumed], "resume": runs[saved]}
            for saved, resumed in pairs
            if resumed in names
        }
        results = run_cases(cases, count, function="continue_training", steps=NUM_STEPS)
        for pair_name, actual in results.items():
            saved, resumed = pair_name.split(" -> ")
            differences[saved, resumed] = _distance(actual, expected)
    return differences


def _by_processes(layouts: Iterable[str]) -> list[tuple[int, list[str]]]:
    ordered = sorted(layouts, key=processes_of)
    return [(count, list(names)) for count, names in itertools.groupby(ordered, processes_of)]


def _distance(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    assert set(actual["state"]) == set(expected["state"])
    losses = zip(actual["losses"], expected["losses"][NUM_STEPS // 2 :], strict=True)
    return {
        "loss": max(abs(ours / theirs - 1) for ours, theirs in losses),
        "weight": max(
            float((actual["state"][name] - weight).norm() / weight.norm().clamp(min=1e-9))
            for name, weight in expected["state"].items()
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "resharding.json")
    parser.add_argument("--dry-run", action="store_true", help="only check the command")
    a = parser.parse_args()
    if a.dry_run:
        return
    record = {
        "model": WIDE["model"].rpartition(":")[2],
        "num_steps": NUM_STEPS,
        "versions": versions(),
    }
    # Pairs with the same saved layout share its run.
    every = [*itertools.permutations(LAYOUTS, 2), *itertools.permutations(LOCAL, 2)]
    by_saved = itertools.groupby(every, lambda pair: pair[0])
    groups = [list(pairs) for _, pairs in by_saved]
    rows = list[dict[str, Any]]()
    for pairs in groups:
        with tempfile.TemporaryDirectory() as folder:
            rows += [
                {"saved": saved, "resumed": resumed, **differences}
                for (saved, resumed), differences in reshard(pairs, Path(folder), WIDE).items()
            ]
        a.out.write_text(json.dumps({**record, "pairs": rows}, indent=1) + "\n")
        print(f"{len(rows)} of {sum(map(len, groups))} pairs", flush=True)
    for key, limit in (("loss", LOSS_TOLERANCE), ("weight", WEIGHT_TOLERANCE)):
        worst = max(rows, key=lambda row: row[key])
        print(f"Largest difference in any {key}: {worst[key]:.1e} ({worst})")
        assert worst[key] <= limit


if __name__ == "__main__":
    main()
