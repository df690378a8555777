"""Our orders against torch's, our CSVs in torch's runtime, torch's CSVs in our simulator."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipedream.schedules.catalogue import build_schedule
from pipedream.schedules.ops import load_csv, save_csv
from pipedream.simulate.simulator import build_costs, simulate
from starting import run

CHILD = Path(__file__).with_name("run_csv.py")
SIZES = [(p, m) for p in range(1, 7) for m in range(1, 17)]
BOTH: list[tuple[str, str, int]] = [
    ("gpipe", "ScheduleGPipe", 1),
    ("1f1b", "Schedule1F1B", 1),
    ("interleaved", "ScheduleInterleaved1F1B", 2),
    ("interleaved", "ScheduleInterleaved1F1B", 3),
    ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
    ("zb-v", "ScheduleZBVZeroBubble", 2),
    ("dualpipe-v", "ScheduleDualPipeV", 2),
]

IDS = [f"{name}-{v}" for name, _, v in BOTH]
MULTI = [row for row in BOTH if row[0] not in ("gpipe", "1f1b")]


def build_theirs(kind: str, p: int, m: int, v: int) -> Any:
    """A schedule of torch's, whose constructor asks its stages for numbers only."""
    from torch.distributed.pipelining import schedules as theirs  # seconds, for this file alone

    same = {"num_stages": p * v, "group_size": p, "group_rank": 0, "submod": None}
    stages = [
        SimpleNamespace(stage_index=i, is_first=i == 0, is_last=i == p * v - 1, **same)
        for i in range(0, p * v, p)
    ]
    made = getattr(theirs, kind)
    single = issubclass(made, theirs.PipelineScheduleSingle)
    return made(stages[0] if single else stages, m)


def their_orders(kind: str, p: int, m: int, v: int) -> list[list[str]]:
    """Compute operations by rank, without bubbles and without the reduction at the end."""
    orders = build_theirs(kind, p, m, v).pipeline_order
    return [
        [str(a) for a in orders[rank] if a is not None and "REDUCE_GRAD" not in str(a)]
        for rank in range(p)
    ]


def our_orders(name: str, p: int, m: int, v: int) -> list[list[str]]:
    return [[str(item) for item in order] for order in build_schedule(name, p, m, v).orders]


def forward_numbered_from_1(op: str) -> str:
    """torch 2.13 prints the last rank of 1F1B so; its 1F1B does not run from what it prints."""
    stage, forward, microbatch = op.partition("F")
    return f"{stage}F{int(microbatch) + 1}" if forward else op


@pytest.mark.parametrize(("name", "kind", "v"), BOTH, ids=IDS)
def test_orders_equal_torchs(name: str, kind: str, v: int) -> None:
    compared = 0
    for p, m in SIZES:
        try:
            expected = their_orders(kind, p, m, v)
        except ValueError:
            continue
        ours = our_orders(name, p, m, v)
        if name == "1f1b":
            ours[-1] = list(map(forward_numbered_from_1, ours[-1]))
        assert ours == expected, (p, m)
        compared += 1
    assert compared >= 54


@pytest.mark.parametrize(("name", "kind", "v"), MULTI, ids=IDS[-len(MULTI) :])
def test_a_csv_that_torch_wrote_is_read_and_simulated_as_ours(
    name: str, kind: str, v: int, tmp_path: Path
) -> None:
    for p, m in ((2, 4), (3, 6), (4, 8)):
        build_theirs(kind, p, m, v)._dump_csv(tmp_path / f"{name}.csv", format="compute_only")
        loaded, ours = load_csv(tmp_path / f"{name}.csv"), build_schedule(name, p, m, v)
        assert loaded == ours
        durations = {"forward": 2, "input_gradient": 3, "weight_gradient": 1, "communication": 1}
        before, after = (simulate(s, build_costs(s, **durations)) for s in (ours, loaded))
        assert before.events == after.events


def test_our_csvs_run_in_torchs_runtime_with_the_gradients_of_the_full_batch(
    tmp_path: Path,
) -> None:
    names = ["1f1b", "zb-h1", "zb-h2"]
    for name in names:
        save_csv(build_schedule(name, 4, 8), tmp_path / f"{name}.csv")
    done = run([str(tmp_path), *names], start=[sys.executable, str(CHILD)])
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(4):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for name in names:
            assert found[name]["apart"] <= 1e-12
            assert found[name]["ran"] == our_orders(name, 4, 8, 1)[rank]
