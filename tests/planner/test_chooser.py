"""Test which layout comes first. tests/tools/test_jobs.py tests that plan, strategy=auto, jobs and
advice choose this layout."""

import dataclasses

import pytest

from distributed_training.planner.make_plan import draft_plan, make_plan
from distributed_training.planner.sort import layout_settings, sort_layouts, suggest
from distributed_training.predict.predict import parse_cluster
from distributed_training.settings.config import AUTO
from distributed_training.settings.machine import GIB
from distributed_training.settings.request import build_config
from tests.support import refused

LONG = {
    "model": "Llama-3.1-8B", "lora_rank": 16, "base_dtype": "nf4", "batch_size": 1,
    "max_length": 32768,
}  # fmt: skip


def first_of(cluster, **values):
    request = build_config({**values, "strategy": AUTO})
    return sort_layouts(request, parse_cluster(cluster))


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


def test_no_more_blocks_recompute_than_necessary_if_that_is_clearly_faster():
    values = {"model": "Llama-3.1-8B", "lora_rank": 16, "batch_size": 1, "max_length": 4096}
    first = first_of("RTX-4090", **values)[0]
    settings = layout_settings(first.plan)
    planned = draft_plan(build_config({**values, "strategy": AUTO}), parse_cluster("RTX-4090"))
    assert layout_settings(planned) == settings
    settings["checkpointed_blocks"] -= 1
    assert first.memory_fit == "yes" != first_of("RTX-4090", **values, **settings)[0].memory_fit
    small_gain = first_of("4xL4", model="Qwen/Qwen3-4B", batch_size=8)[0]
    assert layout_settings(small_gain.plan) == {"activation_checkpointing": "full"}


def test_no_layout_is_chosen_without_the_ram_that_it_needs():
    large = {"model": "Qwen/Qwen3-8B", "strategy": AUTO}
    desktop, server = parse_cluster("RTX-4090"), parse_cluster("RTX-4090")
    machine = dataclasses.replace(server.machine, ram_bytes=2**39)
    server = dataclasses.replace(server, machine=machine)
    assert not sort_layouts(build_config(large), desktop)[0].fits
    assert sort_layouts(build_config(large), server)[0].plan.strategy.name == "offload"
    with refused("lora_rank=16", "base_dtype=nf4"):
        make_plan(build_config(large), desktop)


def test_settings_that_fit_safely_are_suggested_before_settings_that_may_fit():
    request = build_config({"model": "Qwen/Qwen3-4B", "strategy": "dp"})
    for name, first in (
        ("RTX-5090", {"lora_rank": 16}),
        ("A100-40GB", {"optimizer": "adamw-bf16-weights"}),
    ):
        cluster = parse_cluster(name)
        assert suggest(draft_plan(request, cluster), cluster)[0][0] == first


@pytest.mark.parametrize(
    ("cluster", "model", "batch_size", "evidence"),
    [
        ("H200", "Llama-3.2-1B", 4, "measured: 0.128 s"),
        ("H200", "Llama-3.2-1B", 5, "nearest: Llama-3.2-1B"),
        ("2xH200", "Qwen3-8B", 2, "nearest: "),
        ("RTX-4090", "Qwen3-0.6B", 1, "nearest: Qwen3-0.6B"),
        ("T4", "Qwen3-0.6B", 1, "no comparable run"),
        ("2x8xH100-80GB", "Qwen/Qwen3-30B-A3B", 64, "no comparable run"),
    ],
)
def test_the_nearest_measured_run_is_named(cluster, model, batch_size, evidence):
    values = {"model": model, "batch_size": batch_size, "max_length": 2048, "weights": "random"}
    first = first_of(cluster, **values)[0]
    assert first.evidence.nearest.startswith(evidence)
    if "no comparable" in evidence:
        assert first.likely_s is None
    else:
        low, high = first.evidence.shares
        assert 0.85 < low < 1 < high < 1.4
        assert ("4090" in cluster) == (high > 1.25)  # a generation that we did not measure


def test_if_nothing_fits_the_layout_that_lacks_least_comes_first():
    request = build_config({**LONG, "strategy": AUTO})
    cluster = parse_cluster("RTX-3060")
    first = sort_layouts(request, cluster)[0]
    assert first.plan.config.activation_checkpointing == "offload"
    assert (first.memory_fit, first.step, first.tokens_per_s) == ("no", None, None)
    assert 0 < first.missing_bytes < GIB
    for settings, choice in suggest(first.plan, cluster):
        assert (settings, choice.fits) in [({"max_length": 16384}, True), ({"num_gpus": 2}, True)]


def test_activation_checkpointing_that_was_typed_is_changed_if_nothing_else_helps():
    request = build_config({**LONG, "max_length": 8192, "activation_checkpointing": "selective"})
    cluster = parse_cluster("RTX-3060")
    settings, choice = suggest(draft_plan(request, cluster), cluster)[0]
    assert settings["activation_checkpointing"] == "full"
    assert choice.fits


def test_layouts_are_sorted_by_what_they_lack():
    layouts = first_of("2xT4", model="Llama-3.1-8B", weights="random")
    lacking = [choice.missing_bytes for choice in layouts if choice.memory_fit == "no"]
    assert len(lacking) > 3
    assert lacking == sorted(lacking)
