"""Test the values that depend on the data: the numbers of samples, steps and warm-up steps."""

import json
import math
import shutil

import numpy as np
import pytest

from distributed_training.data.cache import token_cache_dir
from distributed_training.plan.samples import load_data
from distributed_training.planner import checks, data
from distributed_training.planner.data import peek_data, read_data
from distributed_training.planner.make_plan import make_plan
from distributed_training.predict.predict import local_cluster, parse_cluster
from distributed_training.records.display import describe_amount
from distributed_training.settings.cache import CACHE_VARIABLE
from distributed_training.settings.request import build_config
from tests.support import CPU_MACHINE, refused

LENGTH = 64


def plan_for(tmp_path, num_words, *, read=read_data, **config):
    text = tmp_path / "mine.txt"
    text.write_text("one more word " * num_words)
    values = {
        "model": "gpt2-tiny", "strategy": "dp", "dataset": str(text), "max_length": LENGTH,
        "output_dir": str(tmp_path / "runs"), **config,
    }  # fmt: skip
    return make_plan(build_config(values), local_cluster(CPU_MACHINE, 2, 2), read)


def test_a_short_text_is_used_completely(tmp_path):
    plan = plan_for(tmp_path, 2000, epochs=3)
    num_samples = len(load_data(plan).train)
    assert 8 < num_samples < 1000
    assert plan.num_steps == 3 * math.ceil(num_samples / plan.batch.global_batch_size)
    assert describe_amount(plan.amount) == f"{num_samples} blocks, 3 epochs"
    capped = plan_for(tmp_path, 2000, num_samples=num_samples + 1)
    assert f"the dataset has only {num_samples} training samples" in capped.notes
    assert capped.num_steps * 3 == plan.num_steps * 2
    assert plan.config.warmup_steps == 10 < plan.num_steps


def test_the_best_weights_are_kept_where_this_costs_little(tmp_path):
    for values, keeps_best, is_noted in (
        ({}, True, False), ({"epochs": 1}, False, False), ({"export": False}, False, False),
        ({"eval_every": 1}, False, True), ({"eval_every": 1, "keep_best": True}, True, False),
    ):  # fmt: skip
        plan = plan_for(tmp_path, 20_000, **values)
        assert plan.config.keep_best is keeps_best, values
        assert any("--keep_best" in note for note in plan.notes) is is_noted


def test_two_samples_are_enough(tmp_path):
    plan = plan_for(tmp_path, 32)  # 2 x 64 + 1 tokens
    assert (len(load_data(plan).train), plan.num_steps) == (1, 2)
    assert plan.config.warmup_steps == 1
    assert "the warm-up lasts 1 step instead of 10, because the run has only 2 steps" in plan.notes
    with refused("is too short", "more text"):
        plan_for(tmp_path, 31)


def test_max_steps_beyond_the_epochs_repeats_the_data(tmp_path):
    plan = plan_for(tmp_path, 32, max_steps=9)
    assert plan.num_steps == 9
    assert describe_amount(plan.amount) == "1 block, 9 epochs"


def test_a_weight_that_leaves_no_sample_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one more word " * 2000)
    name = f"{tmp_path}/a.txt:0.0001"
    with refused(f"dataset={name!r}", "larger weight"):
        plan_for(tmp_path, 1, dataset=name)


def test_a_dry_run_counts_the_samples_of_a_short_text_and_writes_nothing(tmp_path):
    plan = plan_for(tmp_path, 2000, read=peek_data)
    assert not (tmp_path / "runs").exists()
    full_plan = plan_for(tmp_path, 2000)
    assert (plan.config, plan.num_steps, plan.notes) == (
        full_plan.config,
        full_plan.num_steps,
        full_plan.notes,
    )


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_large_text_is_estimated_until_its_tokens_are_cached(name, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    large = tmp_path / name
    lines = ["one more word " * (5 + number % 300) for number in range(2500)]
    if name == "a.jsonl":
        lines = [json.dumps({"prompt": "a", "completion": line}) for line in lines]
    large.write_text("\n".join(lines))
    plan = plan_for(tmp_path, 1, read=peek_data, dataset=str(large))
    assert plan.num_steps is None
    exact = plan_for(tmp_path, 1, dataset=str(large))
    assert exact.amount.error == 0.0 < plan.amount.error < 0.3
    error = plan.amount.error
    assert plan.amount.num_samples == pytest.approx(exact.amount.num_samples, rel=error)
    assert plan.amount.num_steps == pytest.approx(exact.num_steps, rel=error)
    assert plan_for(tmp_path, 1, read=peek_data, dataset=str(large)).amount == exact.amount
    capped = plan_for(tmp_path, 1, read=peek_data, dataset=str(large), num_samples=100)
    assert capped.amount.num_samples == 100


def test_a_large_text_of_one_line_has_an_unknown_size(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_DRY_RUN_BYTES", 1000)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "line.txt").write_text("one more word " * 2000)
    plan = plan_for(tmp_path, 1, read=peek_data, dataset=str(tmp_path / "line.txt"))
    assert plan.amount is None


def test_processes_use_the_planned_samples_without_reading_the_text(tmp_path, monkeypatch):
    plan = plan_for(tmp_path, 2000)
    expected = load_data(plan).train
    (tmp_path / "mine.txt").write_text("another text " * 3000)
    with monkeypatch.context() as patch:
        patch.setattr(data, "find_corpus", None)
        found = load_data(plan).train
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    # Tokens are not read from output_dir, because other users may be able to write to it.
    assert not (tmp_path / "runs" / ".cache").exists()
    # A machine with a separate disk has no such cache and reads its copy of the text.
    shutil.rmtree(token_cache_dir() / plan.cache)
    assert load_data(plan).cache != plan.cache


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        ({"tokenizer": "embedded"}, ["dataset='wikitext-2'", "hf download Salesforce/wikitext"]),
        ({"dataset": "embedded"}, ["tokenizer='gpt2'", "hf download openai-community/gpt2 "]),
    ],
)
def test_a_strict_run_accepts_no_substitutes(config, messages, tmp_path):
    values = {"model": "gpt2", "weights": "random", "strategy": "dp", **config}
    values["output_dir"] = str(tmp_path)
    built = build_config(values)
    cluster = local_cluster(CPU_MACHINE, 1, 1)
    assert make_plan(built, cluster).config.weights == "random"
    with refused(*messages):
        make_plan(built.model_copy(update={"strict": True}), cluster, data.peek_data)


def test_a_plan_for_other_machines_does_not_check_this_one(tmp_path, monkeypatch):
    def fail(*_):
        raise AssertionError("looked at this machine")

    for name in ("check_packages", "check_disk", "check_extensions"):
        monkeypatch.setattr(checks, name, fail)
    values = {"model": "gpt2-tiny", "strategy": "offload", "dataset": "embedded"}
    built = build_config({**values, "output_dir": str(tmp_path)})
    assert make_plan(built, parse_cluster("2x2xH100-80GB")).num_processes == 4
    with pytest.raises(AssertionError):
        make_plan(built, local_cluster(CPU_MACHINE, 1, 1))
