"""Compare our orders with torch's orders, run our CSVs in torch's runtime, and read CSVs that torch
wrote."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipedream.schedules.ops import load_csv, save_csv
from pipedream.schedules.orders import build_schedule
from starting import run

CHILD = Path(__file__).with_name("run_csv.py")
SIZES = [(p, m) for p in range(1, 7) for m in range(1, 17)]
SHARED_SCHEDULES: list[tuple[str, str, int]] = [
    ("gpipe", "ScheduleGPipe", 1),
    ("1f1b", "Schedule1F1B", 1),
    ("interleaved", "ScheduleInterleaved1F1B", 2),
    ("interleaved", "ScheduleInterleaved1F1B", 3),
    ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
    ("zb-v", "ScheduleZBVZeroBubble", 2),
    ("dualpipe-v", "ScheduleDualPipeV", 2),
]


def build_theirs(kind: str, p: int, m: int, v: int) -> Any:
    """Build torch's schedule from fake stages. The constructor of torch's schedule reads only
    numbers from the stages."""
    from torch.distributed.pipelining import schedules as theirs  # slow to import

    same = {"num_stages": p * v, "group_size": p, "group_rank": 0, "submod": None}
    stages = [
        SimpleNamespace(stage_index=i, is_first=i == 0, is_last=i == p * v - 1, **same)
        for i in range(0, p * v, p)
    ]
    single = kind in ("ScheduleGPipe", "Schedule1F1B")
    return getattr(theirs, kind)(stages[0] if single else stages, m)


def operations(order: Iterable[Any]) -> list[str]:
    """Return a rank's operations, without torch's bubbles and final reduction."""
    return [str(item) for item in order if item is not None and "REDUCE_GRAD" not in str(item)]


def forward_numbered_from_1(op: str) -> str:
    """Add 1 to the microbatch number of a forward pass. In the order that torch 2.13 lists for the
    last rank of 1F1B, forward passes are numbered from 1. torch does not use this list to run
    1F1B."""
    stage, forward, microbatch = op.partition("F")
    return f"{stage}F{int(microbatch) + 1}" if forward else op


@pytest.mark.parametrize(("name", "kind", "v"), SHARED_SCHEDULES)
def test_torchs_orders_and_csvs_equal_ours(name: str, kind: str, v: int, tmp_path: Path) -> None:
    compared = 0
    for p, m in SIZES:
        try:
            theirs = build_theirs(kind, p, m, v)
        except ValueError:
            continue
        schedule = build_schedule(name, p, m, v)
        ours = list(map(operations, schedule.orders))
        if name == "1f1b":
            ours[-1] = list(map(forward_numbered_from_1, ours[-1]))
        assert ours == [operations(theirs.pipeline_order[rank]) for rank in range(p)], (p, m)
        compared += 1
        if m == 2 * p and name not in ("gpipe", "1f1b"):  # these two write no CSV
            theirs._dump_csv(tmp_path / f"{name}.csv", format="compute_only")
            assert load_csv(tmp_path / f"{name}.csv") == schedule
    assert compared >= 54


def test_our_csvs_run_in_torchs_runtime_with_the_gradients_of_the_full_batch(
    tmp_path: Path,
) -> None:
    schedules = {name: build_schedule(name, 4, 8) for name in ("1f1b", "zb-h1", "zb-h2")}
    for name, schedule in schedules.items():
        save_csv(schedule, tmp_path / f"{name}.csv")
    done = run([str(tmp_path), *schedules], start=[sys.executable, str(CHILD)])
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(4):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for name, schedule in schedules.items():
            assert found[name]["apart"] <= 1e-12
            assert found[name]["ran"] == operations(schedule.orders[rank])
