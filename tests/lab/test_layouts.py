import json

import pytest

from distributed_training.plan.orders import build_orders
from distributed_training.settings.files import ROOT
from results.lab.analysis.bubble import bubble, explain
from tests.conftest import SMALL, assert_ok, heavy_pool


def test_idle_time_is_the_slowest_ranks_phase_minus_kernel_time():
    first = {"phase_s": 8.0, "computing_s": 6.0, "kernels_s": 5.0, "operations_s": {"F 0": 1.0}}
    second = {"phase_s": 10.0, "computing_s": 9.0, "kernels_s": 8.0, "operations_s": {"F 0": 2.0}}
    found = bubble([first, second])
    assert found["by_rank"] == pytest.approx([0.5, 0.2])
    assert found["idle_share"] == pytest.approx(0.35)
    assert found["between_operations"]["by_rank"] == pytest.approx([0.4, 0.1])
    assert found["between_operations"]["operations_s"] == {"F 0": 2.0}


def test_a_bubble_is_split_into_formula_operations_messages_and_gaps():
    """With two stages of equal duration and two micro-batches, 1F1B leaves each rank idle for a
    third of a step. Any additional idle time comes from unequal stages, messages and gaps between
    operations."""
    pipeline = {"schedule": "1f1b", "num_microbatches": 2, "ideal_bubble": 1 / 3}
    equal = {"F 0": 1.0, "F 1": 1.0, "B 0": 2.0, "B 1": 2.0}
    idle = {"idle_share": 0.5, "between_operations": {"idle_share": 0.4, "operations_s": equal}}
    orders = build_orders("1f1b", 2, 2)
    parts = explain(idle, pipeline, orders, (0, 1))
    expected = {"formula": 1 / 3, "unequal_operations": 0, "messages": 0.4 - 1 / 3, "gaps": 0.1}
    assert parts == pytest.approx(expected)
    # Stage 1 sets the pace. The step takes 1 + 2 x (2 + 4) + 2 = 15, and stage 0 is busy for 6.
    idle["between_operations"]["operations_s"] = {**equal, "F 1": 2.0, "B 1": 4.0}
    parts = explain(idle, pipeline, orders, (0, 1))
    assert parts["unequal_operations"] == pytest.approx(1 - (6 + 12) / 2 / 15 - 1 / 3)
    assert sum(parts.values()) == pytest.approx(0.5)


def test_each_run_of_a_plan_has_its_own_batch_settings(tmp_path):
    """Each run in a plan trains with its own batch settings. Under torchrun, a restarted run reuses
    its folder, but different runs in a plan must have different folders."""
    runs = [{"batch_size": 1}, {"batch_size": 4}, {"batch_size": 4, "grad_accum_steps": 2}]
    common = {**SMALL, "strategy": "dp", "generate": None}
    (tmp_path / "plan.json").write_text(json.dumps({"common": common, "runs": runs}))
    command = [tmp_path / "plan.json", tmp_path / "out", "--last", 3]
    shown = heavy_pool().script(
        command, script=ROOT / "results/lab/layouts.py", num_processes=2, TORCHELASTIC_RUN_ID="none"
    )
    assert_ok(shown)
    records = [json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()]
    cut = {(r["batch"]["micro_batch_size"], r["batch"]["num_microbatches"]) for r in records}
    assert cut == {(1, 1), (4, 1), (4, 2)}
