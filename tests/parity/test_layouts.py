"""Compare every strategy with a single process. Cases cover both model families, full training and
LoRA, tp, pp, their combination with data parallelism, and compiled code."""

import itertools

import pytest

from distributed_training.planner.checks import has_libaio
from distributed_training.settings.files import ROOT
from tests.parity.support import (
    DEEP,
    MODELS,
    assert_equal_runs,
    assert_resumes,
    mesh,
    micro_batches,
    named_cases,
    reference,
    run_cases,
    run_tables,
    small_infinity,
)

# CONFIG values for the single-process reference runs. A case names its reference before the slash.
LLAMAS = ROOT / "tests/models"
ODD_BATCH = 6
# biases, scaled positions and an untied output layer
UNTIED = {"model": str(LLAMAS / "untied"), "weights": "random"}
LORA = {**UNTIED, "lora_rank": 4, "lora_alpha": 8.0, "learning_rate": 1e-2}
REFERENCES = {
    "packed": {"pack": True},
    "padded": {"pack": False},
    "odd": micro_batches(1, global_batch=ODD_BATCH),
    "ten": micro_batches(1, global_batch=10),
    "twelve": micro_batches(1, global_batch=12),
    "eight": {"model": str(MODELS / "eight-layers")},
    "lora": LORA,
}
# Activation checkpointing and the chunked loss are combined with mechanisms that other cases test
# without them. No micro-batch is a multiple of the chunk size.
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
CHUNKED = {"loss_chunk_tokens": 50}
COMPILED = {"compile": True}
ZB_H1 = {"pipeline_schedule": "zb-h1"}
ZB_V = {"pipeline_schedule": "zb-v"}
INTERLEAVED = {"pipeline_schedule": "interleaved"}
HYBRID = {"strategy": "hybrid"}
WHOLE_LAYERS = ("dp", "fsdp", "zero1", "zero2", "zero3", "offload")
CASES = {
    2: {
        **{f"packed/{name}": {"strategy": name, **micro_batches(2)} for name in WHOLE_LAYERS},
        "packed/tp2": {**mesh(tp=2), **micro_batches(1)},
        "padded/tp2": {**mesh(tp=2), **micro_batches(2), **SELECTIVE, **CHUNKED},
        "packed/tp2-recomputed": {**mesh(tp=2), **micro_batches(2), **FULL},
        "padded/fsdp": {"strategy": "fsdp", **micro_batches(2), **SELECTIVE, **CHUNKED},
        "padded/pp2-1f1b-2": {**mesh(pp=2), **micro_batches(2), "pipeline_cut": "5,1"},
        "packed/pp2-zb-v-8": {**mesh(pp=2), **micro_batches(8), **ZB_V},
        # These numbers of micro-batches are not multiples of the number of stages.
        "odd/pp2-interleaved-3": {
            **mesh(pp=2), **micro_batches(3, global_batch=ODD_BATCH), **INTERLEAVED,
        },
        "ten/pp2-zb-h1-5": {**mesh(pp=2), **micro_batches(5, global_batch=10), **ZB_H1, **CHUNKED},
        "packed/hybrid-8": {**HYBRID, **micro_batches(8), "pipeline_cut": "1,5", **FULL, **CHUNKED},
        "padded/cp2": {**mesh(cp=2), **micro_batches(2), **SELECTIVE, **CHUNKED},
        "lora/cp2": {**mesh(cp=2), **micro_batches(2)},
        "lora/zero2": {"strategy": "zero2", **micro_batches(2), "loss_chunk_tokens": 16},
        "lora/hybrid": {**HYBRID, **micro_batches(4)},
    },
    4: {
        "padded/tp4-by-tokens": {**mesh(tp=4), **micro_batches(4)},
        "packed/copies2-cp2": {**mesh(dp_replicate=2, cp=2), **micro_batches(2), **FULL},
        "packed/hsdp2x2": {"strategy": "fsdp", "dp_replicate": 2, **micro_batches(2)},
        "eight/pp4-zb-v": {**mesh(pp=4), **micro_batches(8), **ZB_V},
        "padded/tp2-pp2-zb-v": {**mesh(tp=2, pp=2), **micro_batches(4), **ZB_V},
        "packed/shard2-pp2-interleaved": {
            **mesh(dp_shard=2, pp=2), **micro_batches(4), **INTERLEAVED,
        },
        "twelve/hybrid-3": {**HYBRID, **micro_batches(3, global_batch=12)},
    },
}  # fmt: skip
if has_libaio():  # test_shipped_config.py runs infinity with the shipped buffers
    CASES[2]["packed/infinity"] = {**small_infinity(), **micro_batches(2)}
# These cases test how compiled functions are called, with each kind of parameters and hooks in a
# graph. tests/gpu/test_gpu.py runs the code that Inductor generates.
TRACED = {
    1: {"packed/dp-traced": {"strategy": "dp", **micro_batches(1), **COMPILED, **CHUNKED}},
    2: {
        "packed/fsdp-traced": {"strategy": "fsdp", **micro_batches(2), **COMPILED},
        "lora/tp2-traced": {**mesh(tp=2), **micro_batches(2), **COMPILED},
        "packed/zero3-traced": {"strategy": "zero3", **micro_batches(1), **COMPILED},
        "packed/hybrid": {**HYBRID, **micro_batches(4), **COMPILED},
    },
}
TABLES = {"train": CASES, "train_without_inductor": TRACED}


def work(name):
    """Return the CONFIG values for a case's reference run. The model has two blocks, or six if the
    case has pipeline stages."""
    has_stages = "pp" in name or "hybrid" in name
    model = {} if has_stages else {"model": "gpt2-tiny"}
    return {**DEEP, **model, **REFERENCES[name.split("/")[0]]}


@pytest.fixture(scope="module")
def results(request):
    return run_tables(request, TABLES, work)


@named_cases(TABLES)
def test_layout_equals_one_process(what, count, name, results):
    assert_equal_runs(results[what](count)[name], reference(work(name)))


def test_lora_dropout_agrees_between_layouts_with_the_same_samples():
    dropped = {**DEEP, **LORA, "lora_dropout": 0.3}
    cases = {
        "dp": {**dropped, "strategy": "dp", **micro_batches(2)},
        "fsdp": {**dropped, "strategy": "fsdp", **micro_batches(2), **FULL},
        "zero3": {**dropped, "strategy": "zero3", **micro_batches(2)},
    }
    found = run_cases(cases, 2)
    for name in ("fsdp", "zero3"):
        assert_equal_runs(found[name], found["dp"])


BF16_WEIGHTS = {"precision": "bf16", "optimizer": "adamw-bf16-weights"}
# The cases include zb-v, in which one process holds both copies of the tied embedding. Under dp,
# the two processes save different parameters, so their weights must be equal.
TO_RESUME = {
    2: {
        "1f1b in bf16": {**mesh(pp=2), **micro_batches(2), "precision": "bf16"},
        **{f"bf16 weights under {name}": {"strategy": name, **BF16_WEIGHTS, **micro_batches(2)}
           for name in ("dp", "fsdp", "tp")},
    },
    4: {
        "shard2-pp2-zb-v": {**mesh(dp_shard=2, pp=2), **micro_batches(2), **ZB_V},
        "hsdp2x2": {"strategy": "fsdp", "dp_replicate": 2, **micro_batches(1)},
    },
}  # fmt: skip


@pytest.mark.parametrize("count", TO_RESUME)
def test_a_resumed_layout_is_bitwise_equal(count):
    assert_resumes({name: {**DEEP, **values} for name, values in TO_RESUME[count].items()}, count)


def test_bf16_layouts_follow_one_process():
    """In bf16, pipelines and FSDP give the same losses and gradient norms as a single process. All
    round weights once per step and add the micro-batches' gradients in fp32. `_evaluate` in
    cases.py would notice if FSDP exported its gathered bf16 weights."""
    bf16 = {**DEEP, "precision": "bf16", **micro_batches(4)}
    one = reference(bf16, steps=8)
    cases = {
        "1f1b": {**bf16, **mesh(pp=2)},
        "zb-v": {**bf16, **mesh(pp=2), **ZB_V},
        "fsdp": {**bf16, "strategy": "fsdp"},
    }
    for name, values in run_cases(cases, 2, steps=8).items():
        assert values["losses"] == pytest.approx(one["losses"], rel=1e-4), name
        assert values["grad_norms"] == pytest.approx(one["grad_norms"], rel=2e-3), name


@pytest.mark.parametrize(
    ("function", "strategies"),
    [
        ("train", ("zero1", "zero2", "zero3")),
        # A block is a leaf module of ZeRO-3, which ends with an error if it runs twice.
        ("train_with_a_block_twice", ("zero1", "zero2")),
    ],
)
def test_zero_in_bf16_follows_one_process(function, strategies):
    """DeepSpeed adds up all gradients of parameters that occur several times in a backward pass
    (DeepSpeed#8224), and of all micro-batches (#7718). The chunks of the loss and the inputs share
    the tied embedding."""
    work = {**DEEP, "precision": "bf16", **micro_batches(4), **CHUNKED}
    one = reference(work, steps=4, function=function)
    cases = {name: {**work, "strategy": name, **FULL} for name in strategies}
    for name, values in run_cases(cases, 2, steps=4, function=function).items():
        assert values["losses"] == pytest.approx(one["losses"], rel=1e-4), name
        assert values["grad_norms"] == pytest.approx(one["grad_norms"], rel=2e-3), name


def test_every_rank_draws_its_own_dropout_masks():
    noisy = {**DEEP, "dropout": 0.3, "lora_rank": 2, "lora_dropout": 0.3}
    cases = {
        "split": {**noisy, **mesh(dp_shard=2, tp=2), **micro_batches(1), **FULL},
        "tokens": {**noisy, **mesh(dp_shard=2, cp=2), **micro_batches(1)},
        "stages": {**noisy, **mesh(pp=2, tp=2), **micro_batches(2)},
    }
    out = run_cases(cases, 4, function="dropout_streams")
    for name, streams in out.items():
        for kind in ("residual", "attention", "adapter"):
            drawn = [set(rank[kind]) for rank in streams]
            assert all(drawn)
            for one, other in itertools.combinations(range(4), 2):
                assert not drawn[one] & drawn[other], f"{name}, {kind}: {one}, {other}"
    # With activation checkpointing, recomputation draws the same masks as the forward pass.
    assert all(len(rank["attention"]) == 2 * len(set(rank["attention"])) for rank in out["split"])
