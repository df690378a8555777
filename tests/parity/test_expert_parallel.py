"""Compare expert parallelism with a single process. In every case, the rows that a product leaves
unwritten, because their experts are on other ranks, contain NaN."""

import functools

import pytest

from tests.models.hub_folders import make_folder
from tests.parity.support import (
    BASE,
    assert_equal_runs,
    assert_resumes,
    mesh,
    micro_batches,
    named_cases,
    reference,
    run_tables,
)
from tests.parity.test_layouts import COMPILED, FULL, SELECTIVE
from tests.parity.test_packing import PACKED

SHARD2 = {**mesh(dp_shard=2), **micro_batches(1), "expert_parallel": True}
FOUR = {**micro_batches(1), "expert_parallel": True}
STACKS = "q_proj,experts.gate_up_proj,experts.down_proj"
LORA = {"lora_rank": 4, "learning_rate": 1e-2, "lora_targets": STACKS}
FORMS = {
    "": {}, "packed": PACKED, "lora": LORA, "nf4": {**LORA, "base_dtype": "nf4"},
    "bf16": {**LORA, "precision": "bf16"},
}  # fmt: skip
CASES = {
    2: {
        "qwen3_moe/accumulated": {**SHARD2, **micro_batches(2)},
        "qwen3_moe, packed/full": {**SHARD2, **FULL},
        "qwen3_moe, lora/selective": {**SHARD2, **SELECTIVE},
        "qwen3_moe, nf4/fsdp": SHARD2,
        "gpt_oss, lora/fsdp": SHARD2,  # biases, transposed stacks
        "deepseek_v3/fsdp": SHARD2,  # shared experts
        "qwen3_5_moe_text, lora/fsdp": SHARD2,
    },
    4: {
        "qwen3_moe/shard4": {**mesh(dp_shard=4), **FOUR},
        "gpt_oss/copies2-shard2": {**mesh(dp_replicate=2, dp_shard=2), **FOUR},
        "qwen3_moe, packed/shard2-cp2": {**mesh(dp_shard=2, cp=2), **FOUR},
    },
}  # fmt: skip
TRACED = {2: {"qwen3_moe, lora/traced-full": {**SHARD2, **COMPILED, **FULL}}}
TABLES = {"train_with_unwritten_rows": CASES, "trace_with_unwritten_rows": TRACED}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Return a function that returns the CONFIG values for a case's reference run."""

    @functools.cache
    def model(kind):
        wide = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
        changes = wide if kind == "qwen3_moe" else {}  # for groups of 64 values
        return str(make_folder(kind, tmp_path_factory.mktemp(kind), **changes))

    def values(name):
        kind, _, form = name.partition("/")[0].partition(", ")
        return {**BASE, **FORMS[form], "model": model(kind)}

    return values


@pytest.fixture(scope="module")
def results(request, work):
    return run_tables(request, TABLES, work)


@named_cases(TABLES)
def test_experts_that_stay_equal_one_process(what, count, name, results, work):
    assert_equal_runs(results[what](count)[name], reference(work(name)))


def test_steps_were_repeated_with_larger_buffers(results):
    """Only one of two ranks can have more rows than the mean."""
    repeated = {
        name: result["num_repeated"]
        for name, result in results["train_with_unwritten_rows"](2).items()
    }
    assert any(repeated.values()), repeated
    assert not all(repeated.values()), repeated


def test_a_resumed_run_is_bitwise_equal(work):
    assert_resumes({"fsdp": {**work("qwen3_moe"), **SHARD2}}, 2)
