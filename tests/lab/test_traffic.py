"""Compare the formulas for communication volume with recorded counts and with the figures in the
documents."""

import json

import pytest

from distributed_training.models.gpt2 import SIZES, gpt2_size
from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.mechanism import PipelineRank
from distributed_training.predict.predict import local_cluster
from distributed_training.predict.traffic import tensor_bytes
from distributed_training.settings.files import ROOT
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import load_strategy
from tests.models.hub_folders import make_folder
from tests.parity.support import BASE, micro_batches, run_cases
from tests.parity.test_fewer_bytes import CASES
from tests.parity.test_layouts import FULL, LORA, SELECTIVE, UNTIED
from tests.support import CPU_MACHINE, cpu_topology

RECORD = json.loads((ROOT / "results/records/cpu-traffic/traffic.json").read_text())


def with_recorded_loss(total, place):
    """Return the bytes of the version that made the record. Its loss under tp summed 12 bytes per
    token instead of gathering 8 from each rank."""
    tokens = place.num_microbatches * place.tokens if place.has_last_stage and place.tp > 1 else 0
    sums, gathers = ("tp", "all_reduce"), ("tp", "all_gather")
    return total | {
        sums: total.get(sums, 0) + 12 * tokens,
        gathers: total.get(gathers, 0) - 8 * tokens * place.tp,
    }


# An earlier version could keep norms whole under tp.
COUNTED = [name for name in RECORD["cases"] if "no sequence_parallel" not in name]


@pytest.mark.parametrize("name", COUNTED)
def test_published_counts_equal_the_formulas(name, tmp_path, monkeypatch):
    case = RECORD["cases"][name]
    values = {**RECORD["base"], **case["config"]}
    model = values["model"]
    monkeypatch.setitem(SIZES, model, gpt2_size(**RECORD["models"][model]))
    changes = values.pop("zero_optimization", None)
    if changes is not None:
        document = dict(load_strategy(build_config(values)).document)
        document["zero_optimization"] = {**document["zero_optimization"], **changes}
        (tmp_path / "own.json").write_text(json.dumps(document))
        values["deepspeed_config"] = str(tmp_path / "own.json")
    config = build_config(values)
    count = case["processes"]
    assert len(case["ranks"]) == count
    plan = draft_plan(config, local_cluster(CPU_MACHINE, count, count))
    for rank in case["ranks"]:
        place = PipelineRank(plan, cpu_topology(plan, rank["rank"]).pp_rank)
        total = with_recorded_loss(dict(tensor_bytes(place)), place)
        expected = {" ".join(key): bytes_ for key, bytes_ in total.items() if bytes_}
        assert {key: row["tensor_bytes"] for key, row in rank["counted"].items()} == expected


def test_counted_bytes_equal_the_formulas(tmp_path):
    cp = {**BASE, **UNTIED, "strategy": "cp", **micro_batches(2)}
    fsdp = {**BASE, "strategy": "fsdp", **micro_batches(2)}
    cases = {
        "cp": cp,
        "cp, full": {**cp, "dp_shard": 2, "cp": 2, **FULL},
        "dp, cp": {**cp, "strategy": "dp", "cp": 2},
        "fsdp": fsdp,  # gathers each block twice
        "fsdp, LoRA": {**fsdp, **LORA},  # gathers weights outside the blocks once
        "expert_parallel": {
            **fsdp,
            **FULL,
            "model": str(make_folder("qwen3_moe", tmp_path)),
            "dp_replicate": 2,
            "expert_parallel": True,
        },
        "expert_parallel, chosen rows": {
            **fsdp,
            **SELECTIVE,
            "model": str(make_folder("qwen3_moe", tmp_path)),
            "expert_parallel": True,
        },
    }
    options = {"function": "count_bytes", "module": "tests.lab.cases"}
    found = run_cases(CASES, 2, **options) | run_cases(cases, 4, **options)
    for name, ranks in found.items():
        for rank in ranks:
            counted = {key: row["sent_bytes"] for key, row in rank["counted"].items()}
            assert counted == rank["formula_sent_bytes"], name
