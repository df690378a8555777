"""Test preference tuning under every strategy against one process. Pairs of answers are packed, so
that a sample has several, or one per sample."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distributed_training.data.tokenizer import EMBEDDED_DIR
from tests.conftest import assert_ok, clean_environment, train
from tests.e2e.support import metrics, run_folders
from tests.parity.support import (
    BASE,
    DEEP,
    assert_equal_runs,
    mesh,
    micro_batches,
    reference,
    run_cases,
    run_selected,
)
from tests.parity.test_layouts import CHUNKED, COMPILED, FULL, HYBRID, SELECTIVE, UNTIED, ZB_V
from tests.pool import ROOT
from tests.support import small_pairs, tiny_olmoe, tiny_qwen2

PAIRS = {"dataset": str(small_pairs()), "num_samples": -1, "max_length": 64, "preference": "dpo"}
LOSSES = {
    "dpo": {"pack": True, "preference_label_smoothing": 0.1, "preference_sft": 0.5},
    "ipo": {"preference": "ipo"},
    "simpo": {"preference": "simpo", "preference_beta": 2.0, "preference_margin": 0.5},
    "orpo": {"preference": "orpo", "pack": True},
    "deep": {"model": DEEP["model"], "weights": "random", "seed": 7, "pack": True},
    "lora": {**UNTIED, "lora_rank": 4, "learning_rate": 1e-2},
    "nf4": {"lora_rank": 4, "learning_rate": 1e-2, "base_dtype": "nf4"},
}
LOSSES = {name: {**BASE, **values, **PAIRS, **values} for name, values in LOSSES.items()}
CASES = {
    1: {"dpo/dp-traced": {"strategy": "dp", **micro_batches(2), **COMPILED}},
    2: {
        "dpo/dp": {"strategy": "dp", **micro_batches(2), **FULL},
        "ipo/fsdp": {"strategy": "fsdp", **micro_batches(1), **SELECTIVE},
        "dpo/zero1": {"strategy": "zero1", **micro_batches(2)},
        "orpo/zero2": {"strategy": "zero2", **micro_batches(1)},
        "dpo/offload": {"strategy": "offload", **micro_batches(1)},
        "dpo/zero3": {"strategy": "zero3", **micro_batches(2), **CHUNKED},
        "dpo/tp2-by-tokens": {**mesh(tp=2), **micro_batches(8)},
        "simpo/tp2": {**mesh(tp=2), **micro_batches(2), **CHUNKED},
        "orpo/cp2": {**mesh(cp=2), **micro_batches(2)},
        "deep/pp2-1f1b": {**mesh(pp=2), **micro_batches(4), **FULL},
        "deep/pp2-zb-v": {**mesh(pp=2), **micro_batches(4), **ZB_V},
        "deep/hybrid": {**HYBRID, **micro_batches(4)},
        "lora/fsdp": {"strategy": "fsdp", **micro_batches(1)},
        "nf4/fsdp": {"strategy": "fsdp", **micro_batches(1)},
    },
    4: {
        "dpo/cp4": {**mesh(cp=4), **micro_batches(2)},
        "dpo/shard2-cp2": {**mesh(dp_shard=2, cp=2), **micro_batches(1), **FULL},
        "dpo/tp2-pp2": {**mesh(tp=2, pp=2), **micro_batches(2)},
    },
}  # fmt: skip
NAMED = [(count, name) for count, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def results(request):
    options = {"function": "train_without_inductor"}
    return run_selected(request, CASES, lambda name: LOSSES[name.split("/")[0]], **options)


@pytest.mark.parametrize(("count", "name"), NAMED)
def test_layout_equals_one_process(count, name, results):
    kind = name.split("/")[0]
    alone = reference(LOSSES[kind])
    found = results(count)[name]
    assert_equal_runs(found, alone)
    if kind in ("deep", "lora", "nf4"):
        assert found["losses"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert found["losses"][0] == pytest.approx(alone["losses"][0], abs=1e-6)


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_bf16_begins_at_ln_2(strategy):
    values = {**LOSSES["deep"], "precision": "bf16", "strategy": strategy, **micro_batches(2)}
    (found,) = run_cases({"bf16": values}, 2, steps=1).values()
    assert found["losses"][0] == pytest.approx(math.log(2), abs=1e-3)
    assert torch.isfinite(torch.tensor(found["grad_norms"])).all()


# Names of values in metrics.jsonl -> in TRL's logs. CPO and ORPO log means of log-probabilities.
LOGGED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
}
LOGPS = {f"logps_{name}": f"logps/{name}" for name in ("chosen", "rejected")}


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"preference": "dpo"}, {"kind": "dpo"}),
        (
            {"preference": "dpo", "preference_label_smoothing": 0.1, "preference_sft": 0.5},
            {
                "kind": "dpo",
                "loss_type": ["robust", "sft"],
                "loss_weights": [1.0, 0.5],
                "label_smoothing": 0.1,
            },
        ),
        ({"preference": "ipo"}, {"kind": "dpo", "loss_type": ["ipo"]}),
        # By default, TRL adds the router's loss of a mixture.
        ({"preference": "dpo"}, {"kind": "dpo", "router_aux_loss_coef": 0.0}),
        (
            {"preference": "simpo", "preference_beta": 2.0, "preference_margin": 0.5},
            {
                "kind": "cpo",
                "loss_type": "simpo",
                "cpo_alpha": 0.0,
                "beta": 2.0,
                "simpo_gamma": 0.5,
            },
        ),
    ],
)
def test_one_process_equals_trl(ours, theirs, tmp_path):
    model = tmp_path / "model"
    torch.manual_seed(0)
    build = tiny_olmoe if "router_aux_loss_coef" in theirs else tiny_qwen2
    build(vocab_size=2048, initializer_range=0.2).save_pretrained(model)
    for file in EMBEDDED_DIR.iterdir():
        shutil.copy(file, model)
    rows = [json.loads(line) for line in small_pairs().read_text().splitlines()]
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps(rows[0]) + "\n")
    steps = {"max_steps": 3, "batch_size": 4, "epochs": 1, "warmup_steps": 0}
    values = {**PAIRS, **steps, **ours, "model": model, "validation_dataset": held_out}
    values |= {"lr_schedule": "constant", "learning_rate": 1e-3, "precision": "fp32"}
    values |= {"strategy": "dp", "generate": None, "output_dir": tmp_path / "runs"}
    assert_ok(train(values))
    (run_dir,) = run_folders(tmp_path / "runs")
    order = np.random.default_rng([42, 0]).permutation(len(rows))[:12]
    request = {**theirs, "model": str(model), "rows": [rows[index] for index in order]}
    request |= {"output_dir": str(tmp_path / "trl"), "max_steps": 3}
    program = [sys.executable, ROOT / "tests/parity/trl_reference.py", json.dumps(request)]
    environment = clean_environment(PYTHONPATH=os.pathsep.join(sys.path))
    printed = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
    expected = json.loads(printed.stdout.splitlines()[-1])
    names = LOGGED | (LOGPS if theirs["kind"] == "dpo" else {})
    for row, log in zip(metrics(run_dir), expected["logs"], strict=True):
        for name, logged in names.items():
            assert row[name] == pytest.approx(log[logged], rel=1e-5, abs=2e-6), name
    weights = load_file(run_dir / "hf/model.safetensors")
    for name, norm in expected["weights"].items():
        if name in weights:
            assert float(weights[name].double().norm()) == pytest.approx(norm, rel=1e-5), name
