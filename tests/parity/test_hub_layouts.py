"""Compare layouts of models that run transformers' code with a single process. The kinds differ in
what surrounds and fills their blocks: scaled embeddings, windows, experts, linear attention, Mamba,
biases and positions."""

import functools

import pytest

from tests.models.hub_folders import KINDS, make_folder
from tests.parity.support import (
    BASE,
    assert_equal_runs,
    assert_resumes,
    mesh,
    micro_batches,
    named_cases,
    reference,
    run_cases,
    run_tables,
)
from tests.parity.test_layouts import CHUNKED, COMPILED, FULL, HYBRID, SELECTIVE, ZB_H1, ZB_V
from tests.parity.test_packing import PACKED
from tests.parity.test_resharding import assert_goes_on

NUM_BLOCKS = 4
PP2, FOUR = mesh(pp=2), micro_batches(4)
CP2, TWO = mesh(cp=2), micro_batches(2)
# tp splits samples if there are several in a micro-batch, otherwise tokens.
TP2, SAMPLES, TOKENS = mesh(tp=2), micro_batches(2), micro_batches(8)
FORMS = {"": {}, "packed": PACKED, "lora": {"lora_rank": 4, "learning_rate": 1e-2}}
# "kind/layout", or "kind, form/layout" -> CONFIG values
CASES = {
    2: {
        "gemma3_text/pp2-zb-v": {**PP2, **FOUR, **ZB_V},
        "gemma3_text, packed/pp2-1f1b": {**PP2, **FOUR, **SELECTIVE, **CHUNKED},
        "gemma3_text, packed/hybrid": {**HYBRID, **FOUR},
        "qwen3_moe/hybrid": {**HYBRID, **FOUR},
        "qwen3_5_text, packed/pp2-zb-h1": {**PP2, **FOUR, **ZB_H1},
        "nemotron_h/pp2-zb-v": {**PP2, **FOUR, **ZB_V},
        "qwen3_moe, lora/pp2-zb-v": {**PP2, **FOUR, **ZB_V},
        "phi/pp2-gpipe": {**PP2, **FOUR, "pipeline_schedule": "gpipe", "pipeline_cut": "3,1"},
        # Soft caps, windows, sinks, narrow values, chunks, learned positions
        "gemma2, packed/cp2": {**CP2, **TWO, **SELECTIVE},
        "gpt_oss/cp2": {**CP2, **TWO, **FULL},
        "deepseek_v3, packed/cp2": {**CP2, **TWO},
        "llama4_text, packed/cp2": {**CP2, **TWO, **CHUNKED},
        "biogpt/cp2": {"strategy": "cp", **TWO},
        "gemma3_text/tp2-samples": {**TP2, **SAMPLES, **SELECTIVE},
        "gemma3_text, packed/tp2-tokens": {**TP2, **TOKENS, **CHUNKED},
        "olmo2, packed/tp2-samples": {**TP2, **SAMPLES, **FULL},
        "phi/tp2-tokens": {**TP2, **TOKENS},
        "qwen3_moe, packed/tp2-samples": {**TP2, **SAMPLES},
        "qwen3_5_text, lora/tp2-samples": {**TP2, **SAMPLES},
    },
    4: {
        "gemma3_text/shard2-pp2-zb-v": {**mesh(dp_shard=2, pp=2), **FOUR, **ZB_V},
        # The model has fewer key/value heads than there are ranks along cp.
        "gemma3_text, packed/cp4": {**mesh(cp=4), **TWO},
        "gemma3_text/shard2-tp2": {**mesh(dp_shard=2, tp=2), **micro_batches(1)},
        "gemma3_text, packed/tp2-pp2-zb-h1": {**mesh(tp=2, pp=2), **FOUR, **ZB_H1},
        "olmo2, lora/shard2-tp2": {**mesh(dp_shard=2, tp=2), **SAMPLES},
    },
}  # fmt: skip
# Compiled code is traced, but not generated.
TRACED = {
    2: {
        "gemma3_text/pp2-zb-h1-traced": {**PP2, **FOUR, **ZB_H1, **COMPILED},
        "gemma2, packed/cp2-traced": {**CP2, **TWO, **COMPILED, **SELECTIVE},
        "olmo2/tp2-traced": {**TP2, **SAMPLES, **COMPILED, **SELECTIVE},
    }
}
TABLES = {"train": CASES, "train_without_inductor": TRACED}


@functools.cache
def deep_model(kind, make):
    """Return the value of `model` for a tiny model with four blocks."""
    changes = {"num_hidden_layers": NUM_BLOCKS}
    for key in ("layer_types", "layers_block_type", "no_rope_layers"):
        if key in KINDS[kind][1]:
            changes[key] = (NUM_BLOCKS * KINDS[kind][1][key])[:NUM_BLOCKS]
    return str(make_folder(kind, make(kind), **changes))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Return a function that returns the CONFIG values for a case's reference run."""

    def values(name):
        kind, _, form = name.partition("/")[0].partition(", ")
        return {**BASE, **FORMS[form], "model": deep_model(kind, tmp_path_factory.mktemp)}

    return values


@pytest.fixture(scope="module")
def results(request, work):
    return run_tables(request, TABLES, work)


@named_cases(TABLES)
def test_layout_equals_one_process(what, count, name, results, work):
    assert_equal_runs(results[what](count)[name], reference(work(name)))


def test_bf16_pipelines_follow_one_process(work):
    """Both runs round weights once per step. Stored weights are fp32, although modules of
    transformers' models return bf16 copies of them."""
    values = {**work("gemma3_text"), "precision": "bf16"}
    one = reference({**values, **FOUR}, steps=6)
    cases = {name: {**values, **PP2, **FOUR, **keys} for name, keys in (("h1", ZB_H1), ("v", ZB_V))}
    for name, result in run_cases(cases, 2, steps=6).items():
        assert result["losses"] == pytest.approx(one["losses"], rel=1e-4), name
        assert result["grad_norms"] == pytest.approx(one["grad_norms"], rel=2e-3), name


def test_a_resumed_layout_is_bitwise_equal(work):
    values = {**work("gemma3_text"), **micro_batches(2)}
    layouts = {"zb-v": PP2 | ZB_V, "hybrid": HYBRID, "tp": TP2}
    assert_resumes({name: {**values, **keys} for name, keys in layouts.items()}, 2)


def test_a_run_resumed_under_another_layout_equals_one_process(tmp_path):
    """tp pads the vocabulary, whose size is odd."""
    model = make_folder("olmo2", tmp_path / "model", vocab_size=2051)
    work = {**BASE, "model": str(model)}
    pairs = [("tp x 2", "fsdp x 2"), ("fsdp x 2", "3d-tp-pp x 4")]
    assert_goes_on(pairs, tmp_path, work)
