"""Test that one function chooses the layout for plan, strategy=auto, jobs and advice."""

import argparse
import dataclasses
import json
import random

import pytest

from distributed_training.planner.make_plan import draft_plan, make_plan
from distributed_training.planner.rank import as_typed, choose_batch_size, rank, suggest
from distributed_training.predict.predict import parse_cluster, predict
from distributed_training.settings.config import AUTO
from distributed_training.settings.request import build_config
from distributed_training.tools.jobs import build_options
from distributed_training.tools.plan import MAX_SHOWN, as_dict
from real_model_example import CONFIG
from tests.support import refused

CLUSTERS = [
    "T4", "L4", "A10G", "RTX-3060", "RTX-5090", "H200", "2xT4", "2xRTX-4090", "4xA100-40GB",
    "3xH200", "4xH100-80GB", "2x2xH100-80GB",
]  # fmt: skip
VALUES = {
    "model": ["gpt2", "gpt2-medium", "gpt2-xl", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"],
    "batch_size": [1, 2, 4, 4, 8, 8, 32, 32, AUTO],
    "max_length": [256, 512, 1024],
    "grad_accum_steps": [1, 1, 2, 8],
    "lora_rank": [0, 0, 16],
    "activation_checkpointing": ["none", "none", "selective"],
}  # fmt: skip
SMALL = CLUSTERS[:6]


def facts(plan, cluster):
    """Return everything that plan prints about a layout, and the settings that produce it."""
    keys = ("batch_size", "activation_checkpointing", "lora_rank", "pipeline_schedule")
    values = {key: getattr(plan.config, key) for key in keys}
    return json.loads(json.dumps(as_dict(predict(plan, cluster.rates)))), values


def random_requests(count):
    """Yield a cluster and the options of a request. Most clusters are small to save time."""
    draw = random.Random(66)
    for number in range(count):
        cluster = draw.choice(CLUSTERS if number % 10 == 0 else SMALL)
        chosen = {key: draw.choice(values) for key, values in VALUES.items()}
        typed = [f"{key}={value}" for key, value in chosen.items() if draw.random() < 0.7]
        yield parse_cluster(cluster), typed


def test_plan_auto_jobs_and_advice_choose_the_same_layout():
    """For 200 random requests, the first choice of plan, the run with strategy=auto, and the job
    that plan writes have the same layout, batch and prediction. If the layout does not fit, the
    advice is the first choice for the advised settings."""
    num_advised = 0
    for cluster, typed in random_requests(200):

        def configure(overrides):
            return build_config(CONFIG, overrides=overrides)

        request = configure([*typed, "strategy=auto"])
        sized = choose_batch_size(request, cluster, [])
        overrides = [*typed]
        if sized is not request:
            overrides = [text for text in typed if not text.startswith("batch_size=")]
            overrides.append(f"batch_size={sized.batch_size}")
        first = rank(configure([*overrides, "strategy=auto"]), cluster, num_best=MAX_SHOWN)[0]
        expected = facts(first.plan, cluster)
        assert facts(draft_plan(request, cluster), cluster) == expected
        arguments = argparse.Namespace(overrides=overrides, preset=None, force=False, strict=False)
        options = build_options(first.plan, arguments, configure)
        pairs = zip(options[::2], options[1::2], strict=True)
        job = configure([f"{key.removeprefix('--')}={value}" for key, value in pairs])
        assert facts(draft_plan(job, cluster), cluster) == expected
        if first.fits:
            continue
        planned = dataclasses.replace(first.plan, requested=sized)
        for settings, choice in suggest(planned, cluster)[:1]:
            num_advised += 1
            again = rank(as_typed(sized, **settings), cluster, num_best=1)[0]
            assert facts(again.plan, cluster) == facts(choice.plan, cluster)
    assert num_advised > 5


@pytest.mark.parametrize(
    ("cluster", "values"),
    [
        ("8xH100-80GB", {"model": "meta-llama/Llama-3.1-8B"}),
        ("2x4xH100-80GB", {"model": "gpt2-xl", "batch_size": 16, "max_length": 1024}),
        ("4xL4", {"model": "Qwen/Qwen3-4B", "batch_size": 8}),
        ("7xH200", {"model": "Qwen/Qwen3-4B", "batch_size": 8, "max_length": 4096}),
        ("2x8xA100", {"model": "gpt2-xl", "network_gbit": 10, "grad_accum_steps": 2}),
    ],
)
def test_layouts_that_cannot_win_are_skipped_without_changing_the_best_rows(cluster, values):
    cluster = parse_cluster(cluster)
    request = build_config({**values, "strategy": AUTO})
    complete, pruned = rank(request, cluster), rank(request, cluster, num_best=MAX_SHOWN)
    rows, best = ([json.dumps(as_dict(row)) for row in rows] for rows in (complete, pruned))
    assert best[:MAX_SHOWN] == rows[:MAX_SHOWN]
    assert len(best) < len(rows) or not all(choice.fits for choice in complete)
    assert json.dumps(as_dict(rank(request, cluster, num_best=1)[0])) == rows[0]


def first_of(cluster, **values):
    request = build_config({**values, "strategy": AUTO})
    return rank(request, parse_cluster(cluster))


def test_the_first_choice_is_one_that_a_practitioner_would_accept():
    """dp or fsdp comes first unless another layout is faster by more than the errors. On one GPU,
    strategies that only shard are not listed."""
    for cluster, values, names in (
        ("7xH200", {"model": "Qwen/Qwen3-4B", "batch_size": 8, "max_length": 4096}, {"fsdp"}),
        ("2x8xH100", {"model": "gpt2-xl"}, {"dp", "fsdp"}),
        ("8xH100", {"model": "Qwen/Qwen3-0.6B", "batch_size": 1, "grad_accum_steps": 8}, {"dp"}),
        ("8xH100", {"model": "meta-llama/Llama-3.1-8B"}, {"fsdp"}),
    ):
        assert first_of(cluster, **values)[0].plan.strategy.name in names
    listed = {choice.plan.strategy.name for choice in first_of("H100-80GB", model="gpt2-xl")}
    assert listed == {"dp", "offload", "infinity"}


def test_no_layout_is_chosen_without_the_ram_that_it_needs():
    large = {"model": "Qwen/Qwen3-8B", "strategy": AUTO}
    desktop, server = parse_cluster("RTX-4090"), parse_cluster("RTX-4090")
    machine = dataclasses.replace(server.machine, ram_bytes=2**39)
    server = dataclasses.replace(server, machine=machine)
    assert not rank(build_config(large), desktop)[0].fits
    assert rank(build_config(large), server)[0].plan.strategy.name == "offload"
    with refused("lora_rank=16", "base_dtype=nf4"):
        make_plan(build_config(large), desktop)


@pytest.mark.parametrize("name", ["H20", "GH200", "H100-PCIe", "A100"])
def test_gpus_count_as_measured_by_name(name):
    assert not first_of(name, model="gpt2-medium")[0].validated
    assert first_of("H200", model="gpt2-medium")[0].validated
